// SPDX-License-Identifier: Apache-2.0

package access

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/cloister-build/cloister/worker/internal/filestate"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// Live holds the current rules of a file. One goroutine rereads the file when it or a key file changes: no call waits
// for a file. Use NewLive; the zero Live is not usable. It is safe for concurrent use.
type Live struct {
	admitted
	// FailClosed makes the Live refuse every call with UNAVAILABLE while the files are invalid or unreadable, instead
	// of keeping the previous rules in force.
	FailClosed atomic.Bool

	file  string
	check func(*Rules) error
	log   *slog.Logger
	read  func(file string) (*Rules, error) // ReadFile, except in tests
	rules atomic.Pointer[Rules]
	stale atomic.Pointer[error] // why the files could not be read; nil if their rules are in force
	late  atomic.Int64          // reads that were given up and have not ended
	stop  context.CancelFunc
	ended chan struct{} // closed when watch has ended

	looking sync.Mutex // held while the files are checked
	good    *Rules     // guarded by looking; the last that were read

	mu      sync.Mutex
	waiting map[*waiter]struct{} // guarded by mu
}

const (
	// checkInterval is the time between two checks of the files.
	checkInterval = time.Second
	// readTimeout limits a check, since the file may be on a network.
	readTimeout = 5 * time.Second
	// maxLate limits the reads that were given up and may never end, each of which holds a thread.
	maxLate = 500
)

// NewLive reads the rules of a file. NewLive treats an error of check, which may be nil, as a mistake in the file. If a
// changed file has a mistake or cannot be read in time, Live logs that and keeps the previous rules. The caller closes
// it.
func NewLive(file string, check func(*Rules) error, log *slog.Logger) (*Live, error) {
	return newLive(file, check, log, ReadFile)
}

func newLive(file string, check func(*Rules) error, log *slog.Logger, read func(string) (*Rules, error)) (*Live, error) {
	if check == nil {
		check = func(*Rules) error { return nil }
	}
	log = cmp.Or(log, slog.New(slog.DiscardHandler))
	l := &Live{file: file, check: check, log: log, read: read, ended: make(chan struct{}), waiting: map[*waiter]struct{}{}}
	var ctx context.Context
	ctx, l.stop = context.WithCancel(context.Background())
	rules, err := l.readInTime(ctx, nil)
	if err != nil {
		l.stop()
		return nil, err
	}
	l.good = rules
	l.rules.Store(rules)
	l.warn(rules)
	go l.watch(ctx)
	return l, nil
}

// Close ends the goroutine that reads the file.
func (l *Live) Close() {
	l.stop()
	<-l.ended
}

// watch checks the files until ctx ends. Each read that was given up doubles the interval, up to a minute.
func (l *Live) watch(ctx context.Context) {
	defer close(l.ended)
	for {
		late := l.late.Load()
		select {
		case <-time.After(min(checkInterval<<min(late, 6), time.Minute)):
		case <-ctx.Done():
			return
		}
		if late < maxLate {
			l.look(ctx)
		}
	}
}

// look reads the files if they have changed, and puts them in force.
func (l *Live) look(ctx context.Context) {
	l.looking.Lock()
	defer l.looking.Unlock()
	old := l.good
	fresh, err := l.readInTime(ctx, old)
	if ctx.Err() != nil {
		return
	}
	stale := l.Stale()
	if err != nil {
		l.stale.Store(&err)
		effect := "the previous rules stay in force"
		if l.FailClosed.Load() {
			effect = "every call is refused"
			l.put(&closedRules)
		}
		if stale == nil || stale.Error() != err.Error() { // log each error once
			l.log.Warn("cannot read the callers file; "+effect, "auth", l.file, "err", err)
		}
		return
	}
	l.stale.Store(nil)
	if l.good = fresh; fresh != l.rules.Load() {
		l.put(fresh)
	}
	switch changed := !fresh.same(old); {
	case changed:
		l.log.Info("the callers file has changed and is in force", "auth", l.file, "callers", len(fresh.callers))
		l.warn(fresh)
	case stale != nil:
		l.log.Info("the callers file can be read again", "auth", l.file)
	}
}

// Stale returns why the files could not be read. Until it returns nil, the previous rules are in force, or with
// FailClosed none.
func (l *Live) Stale() error {
	if err := l.stale.Load(); err != nil {
		return *err
	}
	return nil
}

// closedRules refuse every call.
var closedRules = Rules{refusal: status.Error(codes.Unavailable,
	"the server cannot read its callers file and refuses every call until its operator corrects the file")}

// readInTime returns the rules in the files, or old if the files have not changed. It gives up after readTimeout.
func (l *Live) readInTime(ctx context.Context, old *Rules) (*Rules, error) {
	type result struct {
		rules *Rules
		err   error
	}
	done := make(chan result, 1)
	var over atomic.Bool // the read has ended, or was given up
	go func() {
		var r result
		if old != nil && old.current() {
			r.rules = old
		} else if r.rules, r.err = l.read(l.file); r.err == nil {
			r.err = l.check(r.rules)
		}
		done <- r
		if over.Swap(true) {
			l.late.Add(-1)
		}
	}()
	timeout := time.NewTimer(readTimeout)
	defer timeout.Stop()
	select {
	case r := <-done:
		return r.rules, r.err
	case <-ctx.Done():
		return nil, ctx.Err()
	case <-timeout.C:
		if l.late.Add(1); over.Swap(true) { // it has just ended
			l.late.Add(-1)
		}
		return nil, fmt.Errorf("%s or a file that it names does not answer within %v", l.file, readTimeout)
	}
}

// warn logs the warnings of rules.
func (l *Live) warn(r *Rules) {
	for _, w := range r.Warnings() {
		l.log.Warn("callers file: "+w, "auth", l.file)
	}
}

// Rules returns the rules in force; see Stale and FailClosed.
func (l *Live) Rules() *Rules { return l.rules.Load() }

// put puts rules in force, and ends the waiting calls that they do not permit.
func (l *Live) put(r *Rules) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.rules.Store(r)
	for w := range l.waiting {
		w.recheck(r)
	}
}

// current reports whether the files of r are unchanged.
func (r *Rules) current() bool {
	for file, at := range r.read {
		if !filestate.Of(file).Equal(at.state) {
			return false
		}
	}
	return true
}

// same reports whether r and other were read from equal files.
func (r *Rules) same(other *Rules) bool {
	if len(r.read) != len(other.read) {
		return false
	}
	for file, at := range r.read {
		if before, ok := other.read[file]; !ok || before.sum != at.sum {
			return false
		}
	}
	return true
}

// Options is Rules.Options with the rules in force when a call arrives. They apply to the call until its end, except
// that a call that waits for an action to execute is checked against new rules, too.
func (l *Live) Options() []grpc.ServerOption {
	return guard{rules: l.Rules, table: methods, live: l}.options()
}

// WorkerOptions is Options for the workers' port.
func (l *Live) WorkerOptions() []grpc.ServerOption {
	return guard{rules: l.Rules, table: workers, live: l}.options()
}

// A waiter is a call that waits, and ends when its caller loses the right to it.
type waiter struct {
	ctx     context.Context // of the call, with its credentials
	refused context.CancelCauseFunc
	table   table
	method  string
	message any
}

// recheck ends the call if rules do not permit it.
func (w *waiter) recheck(r *Rules) {
	c, err := r.caller(w.ctx)
	if err == nil {
		err = w.table.permit(c, w.method, w.message)
	}
	if err != nil {
		w.refused(err)
	}
}

// wait adds w to the waiting calls until the returned function is called. The rules may have changed since the call was
// admitted.
func (l *Live) wait(w *waiter) (end func()) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.waiting[w] = struct{}{}
	w.recheck(l.rules.Load())
	return func() {
		l.mu.Lock()
		defer l.mu.Unlock()
		delete(l.waiting, w)
	}
}
