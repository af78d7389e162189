// SPDX-License-Identifier: Apache-2.0

package monitor

import (
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/sandbox/internal/seccomp"
)

// Start answers the calls reported through the listener of a run's filter, until every process of the run is gone or
// Stop is called. It takes over the listener. All processes of the run must have the same root directory.
//
// The filter should be installed with SECCOMP_FILTER_FLAG_WAIT_KILLABLE_RECV, so that a signal does not interrupt a
// call being examined.
func Start(listener int, v Config) *Monitor {
	w := newSession(listener, v)
	go w.serve()
	return w.Monitor
}

func newSession(listener int, v Config) *session {
	w := &session{Monitor: newMonitor(v), queue: newQueue(listener), root: -1, clock: newClock(&v.Conditions), random: newRandom(&v.Conditions)}
	w.resolver = &resolver{socket: v.Resolver, hosts: v.Hosts, lookups: &w.lookups, kill: v.Kill}
	// Waiting for the next call must not occupy a thread of the worker. A failure is harmless: the worker
	// just waits in a thread.
	_ = unix.SetNonblock(listener, true)
	w.listener = os.NewFile(uintptr(listener), "listener")
	w.stop = sync.OnceFunc(func() {
		w.stopped.Store(true)
		_ = w.listener.SetReadDeadline(time.Now()) // it may have ended by itself
	})
	return w
}

// A session is the goroutine of a Monitor.
type session struct {
	*Monitor
	listener *os.File // and its queue
	queue    *queue
	stopped  atomic.Bool
	// root is the run's root directory, rootName its name in readlink; the names of everything else that the run has
	// open begin with it. They are -1 and "" until the first call.
	root     int
	rootName string
	text     [unix.PathMax]byte // buffer for strings of a process

	// users and groups are the maps of the run's user namespace, nil until they are needed.
	users, groups idMap
	// clock and random are the run's own, nil if they are the host's.
	clock  *clock
	random *random
	timers delayedAnswers

	resolver *resolver
}

// lastAnswers is how many calls Stop answers at most. The kernel answers further ones with ENOSYS when the listener is
// closed.
const lastAnswers = 10_000

func (w *session) serve() {
	defer close(w.done)
	defer func() {
		w.stop()
		w.timers.end()
		w.listener.Close()
		w.random.close()
		w.resolver.stop()
		w.recordLookups()
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
		return // it cannot be polled: reported calls fail from here on
	}
	// Answer what came before the end.
	if !ended {
		w.answerAll()
	}
}

// answerAll answers the waiting calls and reports whether there can be no more.
func (w *session) answerAll() (ended bool) {
	for left := lastAnswers; left > 0; {
		// Older kernels wait forever in receive once the run is gone.
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

// next answers one call. It returns false if nothing more can be received.
func (w *session) next() bool {
	n, err := w.queue.receive()
	if err != nil {
		return err == unix.ENOENT || err == unix.EINTR
	}
	w.answer(&n)
	return true
}

// answer examines a call, answers it and records what it tried.
func (w *session) answer(n *notification) {
	var (
		nr     = int(n.Nr)
		name   = seccomp.Name(nr)
		seen   []sandbox.Event
		waited bool
	)
	if w.emulate(n, name) {
		return
	}
	if seccomp.Permitted(nr, n.Args) && listenerOf(n, name) == "" {
		if name == "socket" {
			w.networked = true
			if mayAsk(n.Args) {
				w.resolver.start() // it may send a lookup in ways that are not reported
			}
		}
		seen = w.examine(n, name)
		// Before the answer: the run's mounts end with its last program.
		for _, e := range seen {
			if e.Kind == inputExecuted && !w.executed[e.Subject] {
				seen = append(seen, w.interpreters(n.PID, e.Subject)...)
			}
		}
		waited = w.kill(n.ID, seen) || w.conclude(n, name)
	} else {
		seen = []sandbox.Event{refusal(n, name)}
		waited = w.kill(n.ID, seen) || w.queue.fail(n.ID, seccomp.Errno(nr))
	}
	if !waited {
		return
	}
	for _, e := range seen {
		w.record(e)
	}
}

// conclude lets a permitted call continue, or answers it as the run's conditions demand, and reports whether the call
// still waited.
func (w *session) conclude(n *notification, name string) bool {
	if _, is := statBuffers[name]; is && w.changesFiles() {
		return w.answerStat(n, name)
	}
	return w.queue.proceed(n.ID)
}

// kill kills the run if one of the events of a call that still waits demands it, and reports whether it did.
func (w *session) kill(id uint64, seen []sandbox.Event) bool {
	return w.view.Kill != nil && len(seen) > 0 && w.queue.valid(id) && slices.ContainsFunc(seen, w.view.Kill)
}

// emulate answers a call as the run's conditions demand, and reports whether it did.
func (w *session) emulate(n *notification, name string) bool {
	switch {
	case name == "fstat":
		w.conclude(n, name)
		return true
	case name == "getdents64" && w.view.Conditions.OutputOrder != 0:
		w.answerListing(n)
		return true
	case name == "getdents64":
		w.queue.proceed(n.ID)
		return true
	case w.clock == nil && w.random == nil:
		return false
	case name == "arch_prctl":
		w.startProgram(n)
		return true
	case w.clock != nil && w.answerTime(n, name):
		return true
	}
	return w.random != nil && w.answerRandom(n, name)
}
