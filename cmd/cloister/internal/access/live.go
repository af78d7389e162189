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

// Live holds the current rules of a file and reads them again when it or a key file changes. It is safe for concurrent use.
type Live struct {
	file  string
	check func(*Rules) error
	log   *slog.Logger
	every time.Duration // minimum time between two checks of the files
	rules atomic.Pointer[Rules]

	mu      sync.Mutex
	checked time.Time // guarded by mu
	logged  string    // guarded by mu; the last error of reading again, "" if there was none
}

// checkInterval is how long a call may be decided by outdated rules.
const checkInterval = time.Second

// NewLive reads the rules of a file. An error of check counts as a mistake in the file. If a changed file has a mistake, Live
// logs it and keeps the previous rules.
func NewLive(file string, check func(*Rules) error, log *slog.Logger) (*Live, error) {
	l := &Live{file: file, check: check, log: log, every: checkInterval, checked: time.Now()}
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

// Rules returns the rules of the file, at most a second old.
func (l *Live) Rules() *Rules {
	// Do not wait for another reader: the file may be on a network.
	if !l.mu.TryLock() {
		return l.rules.Load()
	}
	defer l.mu.Unlock()
	now, rules := time.Now(), l.rules.Load()
	if now.Sub(l.checked) < l.every {
		return rules
	}
	l.checked = now
	if rules.current() {
		l.logged = ""
		return rules
	}
	fresh, err := l.load()
	if err != nil {
		if why := err.Error(); why != l.logged { // log each error once
			l.logged = why
			l.log.Warn("cannot read the changed callers file; the previous rules stay in force", "auth", l.file, "err", err)
		}
		return rules
	}
	l.logged = ""
	l.rules.Store(fresh)
	l.log.Info("the callers file has changed and is in force", "auth", l.file, "callers", len(fresh.callers))
	return fresh
}

// current reports whether the files of r are unchanged.
func (r *Rules) current() bool {
	for file, at := range r.read {
		if !filestate.Of(file).Equal(at) {
			return false
		}
	}
	return true
}

// Options is Rules.Options with the rules in force when a call arrives, which apply to it until its end.
func (l *Live) Options() []grpc.ServerOption { return guard{l.Rules, methods}.options() }

// WorkerOptions is Options for the workers' port.
func (l *Live) WorkerOptions() []grpc.ServerOption { return guard{l.Rules, workers}.options() }
