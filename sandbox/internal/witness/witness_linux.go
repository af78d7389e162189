// SPDX-License-Identifier: Apache-2.0

package witness

import (
	"sync"

	"golang.org/x/sys/unix"

	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/sandbox/internal/seccomp"
)

// Watch answers what the listener of a run's filter notifies, until every process of the run is gone or
// Stop is called. It takes the listener over and closes it. All processes of the run must have the same
// root directory.
//
// The filter should be installed with SECCOMP_FILTER_FLAG_WAIT_KILLABLE_RECV: a signal then does not
// interrupt a call while it is looked at.
func Watch(listener int, v View) *Recorder {
	w := newWatch(listener, v)
	go w.serve()
	return w.Recorder
}

func newWatch(listener int, v View) *watch {
	w := &watch{Recorder: newRecorder(v), queue: newQueue(listener), root: -1, stopped: make(chan struct{}), wake: -1}
	var pipe [2]int
	if err := unix.Pipe2(pipe[:], unix.O_CLOEXEC); err != nil {
		w.stop = sync.OnceFunc(func() { close(w.stopped) })
		return w
	}
	w.wake = pipe[0]
	w.stop = sync.OnceFunc(func() { close(w.stopped); unix.Close(pipe[1]) })
	return w
}

// A watch is the goroutine of a Recorder.
type watch struct {
	*Recorder
	queue *queue
	// stopped is closed by Stop. wake is then readable, or -1 if there was no descriptor left for it.
	stopped chan struct{}
	wake    int
	// root is the root directory of the run, rootName what readlink calls it: the same as for everything
	// else that the run has open. They are -1 and "" until the first process is seen.
	root     int
	rootName string
	text     [unix.PathMax]byte // what was read last from a process
}

// lastAnswers is how many calls Stop answers at most. Those that wait beyond that get ENOSYS from the
// kernel as the listener is closed.
const lastAnswers = 10_000

func (w *watch) serve() {
	defer close(w.done)
	defer func() {
		w.stop()
		for _, fd := range []int{w.queue.fd, w.wake, w.root} {
			if fd >= 0 {
				unix.Close(fd)
			}
		}
	}()
	timeout := -1
	if w.wake < 0 {
		timeout = 100 // milliseconds
	}
	left := lastAnswers
	for left > 0 {
		// Older kernels wait for ever in receive once the run is gone, so this asks first.
		fds := []unix.PollFd{{Fd: int32(w.queue.fd), Events: unix.POLLIN}, {Fd: int32(w.wake), Events: unix.POLLIN}}
		_, err := unix.Poll(fds, timeout)
		if err == unix.EINTR {
			continue
		}
		if err != nil {
			return
		}
		stopped := false
		select {
		case <-w.stopped:
			stopped = true
			left--
		default:
		}
		switch {
		case fds[0].Revents&unix.POLLIN != 0:
			if !w.next() {
				return
			}
		case fds[0].Revents != 0 || stopped: // the run is gone, or nobody waits
			return
		}
	}
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
	if seccomp.Permitted(nr, n.Args) {
		w.networked = w.networked || name == "socket"
		seen = w.look(n, name)
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
