// SPDX-License-Identifier: Apache-2.0

package monitor

import (
	"os"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/sandbox/internal/seccomp"
)

// Start answers what the listener of a run's filter notifies, until every process of the run is gone or
// Stop is called. It takes the listener over and closes it. All processes of the run must have the same
// root directory.
//
// The filter should be installed with SECCOMP_FILTER_FLAG_WAIT_KILLABLE_RECV: a signal then does not
// interrupt a call while it is looked at.
func Start(listener int, v Config) *Monitor {
	w := newWatch(listener, v)
	go w.serve()
	return w.Monitor
}

func newWatch(listener int, v Config) *watch {
	w := &watch{Monitor: newMonitor(v), queue: newQueue(listener), root: -1, clock: newClock(&v.Conditions), random: newRandom(&v.Conditions)}
	// Whoever waits for the next call keeps no thread of the worker, which has as many watches as runs. Of a descriptor it
	// is no error that it does not block anyway.
	_ = unix.SetNonblock(listener, true)
	w.listener = os.NewFile(uintptr(listener), "listener")
	w.stop = sync.OnceFunc(func() {
		w.stopped.Store(true)
		_ = w.listener.SetReadDeadline(time.Now()) // the watch may have ended by itself
	})
	return w
}

// A watch is the goroutine of a Monitor.
type watch struct {
	*Monitor
	listener *os.File // and its queue
	queue    *queue
	stopped  atomic.Bool
	// root is the root directory of the run, rootName what readlink calls it: the same as for everything
	// else that the run has open. They are -1 and "" until the first process is seen.
	root     int
	rootName string
	text     [unix.PathMax]byte // what was read last from a process

	// clock and random are the run's own, nil if they are the host's.
	clock  *clock
	random *random
	later  later
}

// lastAnswers is how many calls Stop answers at most. Those that wait beyond that get ENOSYS from the
// kernel as the listener is closed.
const lastAnswers = 10_000

func (w *watch) serve() {
	defer close(w.done)
	defer func() {
		w.stop()
		w.later.end()
		w.listener.Close()
		w.random.close()
		if w.root >= 0 {
			unix.Close(w.root)
		}
	}()
	raw, err := w.listener.SyscallConn()
	if err != nil {
		return
	}
	ended := false
	if err := raw.Read(func(uintptr) bool {
		ended = w.answerAll()
		return ended || w.stopped.Load()
	}); err != nil && !w.stopped.Load() {
		return // it cannot be waited for: what is notified fails from here on
	}
	// What came before the end is answered.
	if !ended {
		w.answerAll()
	}
}

// answerAll answers the calls that wait, and reports whether there can be no more.
func (w *watch) answerAll() (ended bool) {
	for left := lastAnswers; left > 0; {
		// Older kernels wait for ever in receive once the run is gone, so this asks first.
		fds := []unix.PollFd{{Fd: int32(w.queue.fd), Events: unix.POLLIN}}
		_, err := unix.Poll(fds, 0)
		switch {
		case err == unix.EINTR:
		case err != nil:
			return true
		case fds[0].Revents&unix.POLLIN != 0:
			if !w.next() {
				return true
			}
			if w.stopped.Load() {
				left--
			}
		default:
			return fds[0].Revents != 0 // the run is gone
		}
	}
	return true
}

// next answers one call. It returns false if nothing can be received any more.
func (w *watch) next() bool {
	n, err := w.queue.receive()
	if err != nil {
		return err == unix.ENOENT || err == unix.EINTR
	}
	w.answer(&n)
	return true
}

// answer looks at a call, answers it, and records what was seen.
func (w *watch) answer(n *notification) {
	var (
		nr     = int(n.Nr)
		name   = seccomp.Name(nr)
		seen   []sandbox.Event
		waited bool
	)
	if w.answerOwn(n, name) {
		return
	}
	if seccomp.Permitted(nr, n.Args) {
		w.networked = w.networked || name == "socket"
		seen = w.look(n, name)
		// Before the answer: what is executed may be the last of the run, whose mounts end with it.
		for _, e := range seen {
			if e.Kind == inputExecuted && !w.executed[e.Subject] {
				seen = append(seen, w.interpreters(n.PID, e.Subject)...)
			}
		}
		waited = w.queue.proceed(n.ID)
	} else {
		seen = []sandbox.Event{refusal(n, name)}
		waited = w.queue.fail(n.ID, seccomp.Errno(nr))
	}
	if !waited {
		return
	}
	for _, e := range seen {
		w.record(e)
	}
}

// answerOwn answers a call of which a run with conditions of its own is told, and reports whether it was one.
func (w *watch) answerOwn(n *notification, name string) bool {
	switch {
	case w.clock == nil && w.random == nil:
		return false
	case name == "arch_prctl":
		w.begin(n)
		return true
	case w.clock != nil && w.tellTime(n, name):
		return true
	}
	return w.random != nil && w.tellRandom(n, name)
}
