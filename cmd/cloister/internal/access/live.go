// SPDX-License-Identifier: Apache-2.0

package access

import (
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/cloister-build/cloister/cmd/internal/filestate"
	"google.golang.org/grpc"
)

// Live are the rules of a file as it is now: they are read again when it, or a file of keys that it names, has changed. It is
// safe for concurrent use.
type Live struct {
	file  string
	check func(*Rules) error
	log   *slog.Logger
	every time.Duration // how often the files are looked at, at most
	rules atomic.Pointer[Rules]

	mu     sync.Mutex
	looked time.Time // guarded by mu
	told   string    // guarded by mu; why the files could not be read again, "" if they could
}

// lookEvery is how long a call may be decided by rules that have changed.
const lookEvery = time.Second

// NewLive reads the rules of a file. Rules that check refuses, with an error, are as good as a mistake in the file. When the
// file has changed and has a mistake, log is told, and the rules that were read last hold.
func NewLive(file string, check func(*Rules) error, log *slog.Logger) (*Live, error) {
	l := &Live{file: file, check: check, log: log, every: lookEvery, looked: time.Now()}
	rules, err := l.load()
	if err != nil {
		return nil, err
	}
	l.rules.Store(rules)
	return l, nil
}

func (l *Live) load() (*Rules, error) {
	rules, err := ReadFile(l.file)
	if err == nil {
		err = l.check(rules)
	}
	return rules, err
}

// Rules returns the rules as they are in the file, or were a second ago.
func (l *Live) Rules() *Rules {
	// Nobody waits for who is reading already: a file may be far away.
	if !l.mu.TryLock() {
		return l.rules.Load()
	}
	defer l.mu.Unlock()
	now, rules := time.Now(), l.rules.Load()
	if now.Sub(l.looked) < l.every {
		return rules
	}
	l.looked = now
	if rules.current() {
		l.told = ""
		return rules
	}
	fresh, err := l.load()
	if err != nil {
		if why := err.Error(); why != l.told { // once, and not every second
			l.told = why
			l.log.Warn("the file of callers cannot be read again: those of before may do what they might", "auth", l.file, "err", err)
		}
		return rules
	}
	l.told = ""
	l.rules.Store(fresh)
	l.log.Info("the file of callers has changed, and holds from now on", "auth", l.file, "callers", len(fresh.callers))
	return fresh
}

// current reports whether the files that r is of are as they were read.
func (r *Rules) current() bool {
	for file, at := range r.read {
		if !filestate.Of(file).Equal(at) {
			return false
		}
	}
	return true
}

// Options is Rules.Options by the rules as they are when a call comes. One that is admitted goes on by those.
func (l *Live) Options() []grpc.ServerOption { return guard{l.Rules, methods}.options() }

// WorkerOptions is Options of a server for workers.
func (l *Live) WorkerOptions() []grpc.ServerOption { return guard{l.Rules, workers}.options() }
