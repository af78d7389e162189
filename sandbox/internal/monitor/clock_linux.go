// SPDX-License-Identifier: Apache-2.0

package monitor

import (
	"encoding/binary"
	"errors"
	"fmt"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/cloister-build/cloister/sandbox"
)

// A clock is what a run takes for the time of day: the host's with something added, or one that goes on only as it is
// asked. It is safe for concurrent use.
type clock struct {
	shift time.Duration
	held  bool
	since time.Time // when the run began, by the host's clock
	begin time.Time // by a held clock

	mu    sync.Mutex
	next  time.Time       // of a held clock, what is read next; guarded by mu
	waits map[uint32]wait // of a held clock, what threads wait for; guarded by mu
}

// A wait is that of one thread for a time of a held clock. It lasts as long as it would if the clock went on.
type wait struct {
	deadline time.Time
	since    time.Time
	total    time.Duration
}

const (
	// tick is by how much a held clock goes on each time that it is read.
	tick = time.Millisecond
	// maxWaits bounds what is remembered of threads that wait, most of which may be gone.
	maxWaits = 10_000
	// maxSeconds is the last time that is told apart from those after it, far from what overflows.
	maxSeconds = 1 << 40
)

// newClock returns the clock of a run, or nil if it has the host's.
func newClock(c *sandbox.Conditions) *clock {
	if c.ClockOffset == 0 && c.FrozenClock == 0 {
		return nil
	}
	begin := time.Unix(c.FrozenClock, 0)
	return &clock{
		shift: c.ClockOffset, held: c.FrozenClock != 0, since: coarse(), begin: begin,
		next: begin, waits: map[uint32]wait{},
	}
}

// read returns the time by one of the kernel's clocks of the time of day, of which a held clock is all. What the kernel does
// not read for anybody, like an alarm's clock on a machine without one, is a unix.Errno.
func (c *clock) read(id int32) (time.Time, error) {
	var ts unix.Timespec
	if err := unix.ClockGettime(id, &ts); err != nil {
		return time.Time{}, err
	}
	if c.held {
		c.mu.Lock()
		defer c.mu.Unlock()
		now := c.next
		c.next = now.Add(tick)
		return now, nil
	}
	return time.Unix(ts.Unix()).Add(c.shift), nil
}

// pass has a held clock go on, as one does while somebody waits.
func (c *clock) pass(d time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.held {
		c.next = c.next.Add(d)
	}
}

// left returns how long a thread has yet to wait for a time: at most 0 if it has come. The thread may have waited for it
// before.
func (c *clock) left(thread uint32, id int32, deadline time.Time) (time.Duration, error) {
	if !c.held {
		now, err := c.read(id)
		return deadline.Sub(now), err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	w, ok := c.waits[thread]
	if !ok || !w.deadline.Equal(deadline) {
		if len(c.waits) >= maxWaits {
			clear(c.waits) // who still waits begins again
		}
		w = wait{deadline, time.Now(), deadline.Sub(c.next)}
		c.waits[thread] = w
	}
	left := w.total - time.Since(w.since)
	if left <= 0 {
		delete(c.waits, thread)
		if c.next.Before(deadline) {
			c.next = deadline
		}
	}
	return left, nil
}

// tellTime answers a call about the time of day, and reports whether it was one.
func (w *watch) tellTime(n *notification, name string) bool {
	switch name {
	case "clock_gettime":
		w.tell(n, int32(n.Args[0]), n.Args[1], 1)
	case "gettimeofday":
		w.tell(n, unix.CLOCK_REALTIME, n.Args[0], 1000)
	case "time":
		w.tellSeconds(n)
	case "nanosleep":
		w.sleepFor(n, n.Args[0])
	case "clock_nanosleep":
		switch id := int32(n.Args[0]); {
		case id == unix.CLOCK_REALTIME_COARSE || id == unix.CLOCK_REALTIME_ALARM:
			w.queue.proceed(n.ID) // which fails: one has no sleep, the other needs a right to wake the machine
		case n.Args[1]&unix.TIMER_ABSTIME != 0:
			w.sleepUntil(n)
		default:
			w.sleepFor(n, n.Args[2])
		}
	case "futex":
		w.waitUntil(n)
	case "fstat":
		w.date(n, name)
		w.queue.proceed(n.ID)
	case "stat", "lstat", "newfstatat", "statx":
		w.date(n, name)
		return false // it may be of interest to the watch
	default:
		return false
	}
	return true
}

// tell writes the time as a struct timespec, or timeval, whose second part counts so many nanoseconds.
func (w *watch) tell(n *notification, id int32, at uint64, unit int) {
	m, err := w.memory(n)
	if err != nil {
		w.lost(n, err)
		return
	}
	defer m.close()
	now, err := w.clock.read(id)
	var unread unix.Errno
	switch {
	case errors.As(err, &unread):
		w.queue.fail(n.ID, unread)
		return
	case err != nil:
		w.lost(n, err)
		return
	}
	var b []byte
	b = binary.NativeEndian.AppendUint64(b, uint64(now.Unix()))
	b = binary.NativeEndian.AppendUint64(b, uint64(now.Nanosecond()/unit))
	ok := m.write(at, b)
	if unit > 1 { // gettimeofday may be asked for nothing, or for the zone that the kernel does not know either
		ok = (at == 0 || ok) && (n.Args[1] == 0 || m.write(n.Args[1], make([]byte, 8)))
	}
	if !ok {
		w.queue.fail(n.ID, unix.EFAULT)
		return
	}
	w.queue.value(n.ID, 0)
}

// tellSeconds answers time(2).
func (w *watch) tellSeconds(n *notification) {
	now, err := w.clock.read(unix.CLOCK_REALTIME_COARSE)
	if err != nil {
		w.lost(n, err)
		return
	}
	if n.Args[0] != 0 {
		m, err := w.memory(n)
		if err != nil {
			w.lost(n, err)
			return
		}
		defer m.close()
		if !m.write(n.Args[0], binary.NativeEndian.AppendUint64(nil, uint64(now.Unix()))) {
			w.queue.fail(n.ID, unix.EFAULT)
			return
		}
	}
	w.queue.value(n.ID, now.Unix())
}

// leastSleep is for how long a thread sleeps if that was asked for by a program. Shorter ones are of those who wait for
// others, as many as it takes: threads of Go's runtime sleep for up to 10 ms.
const leastSleep = 100 * time.Millisecond

// sleepFor lets the kernel have the thread sleep for a time. A held clock goes on by it at once: it is the same in every
// run, however long the thread then sleeps.
func (w *watch) sleepFor(n *notification, at uint64) {
	if w.clock.held {
		m, err := w.memory(n)
		if err != nil {
			w.lost(n, err)
			return
		}
		defer m.close()
		if t, ok := m.timespec(at); ok && t.Sub(time.Unix(0, 0)) >= leastSleep { // the kernel complains of what is none
			w.clock.pass(t.Sub(time.Unix(0, 0)))
		}
	}
	w.queue.proceed(n.ID)
}

const (
	// sleepSlice is how often it is looked whether a thread that sleeps has a signal to handle: an answer that is
	// awaited is interrupted by the end of the process alone.
	sleepSlice = 20 * time.Millisecond
	// wakeSlice is how long a thread waits at a futex, for which nobody can wake it meanwhile. Then it looks for
	// itself.
	wakeSlice = 5 * time.Millisecond
)

// sleepUntil answers clock_nanosleep(2) until a time of day.
func (w *watch) sleepUntil(n *notification) {
	m, err := w.memory(n)
	if err != nil {
		w.lost(n, err)
		return
	}
	defer m.close()
	deadline, ok := m.timespec(n.Args[2])
	if !ok {
		w.queue.proceed(n.ID) // which fails
		return
	}
	w.sleep(*n, deadline)
}

// sleep answers a call when its time has come, or a signal.
func (w *watch) sleep(n notification, deadline time.Time) {
	left, err := w.clock.left(n.PID, int32(n.Args[0]), deadline)
	switch {
	case err != nil:
		w.lost(&n, err)
	case left <= 0:
		w.queue.value(n.ID, 0)
	case signalled(n.PID):
		w.queue.fail(n.ID, unix.EINTR)
	case w.queue.valid(n.ID):
		w.later.after(n.ID, min(left, sleepSlice), func() { w.sleep(n, deadline) })
	}
}

// waitUntil answers futex(2) with a time of day: at the end of a slice as if the thread was woken for nothing, which
// everybody who waits so must expect.
func (w *watch) waitUntil(n *notification) {
	m, err := w.memory(n)
	if err != nil {
		w.lost(n, err)
		return
	}
	defer m.close()
	deadline, ok := m.timespec(n.Args[3])
	var word [4]byte
	if !ok || n.Args[0]%4 != 0 || n.Args[5]&0xffffffff == 0 || !m.read(n.Args[0], word[:]) {
		w.queue.proceed(n.ID) // which fails
		return
	}
	if binary.NativeEndian.Uint32(word[:]) != uint32(n.Args[2]) {
		w.queue.fail(n.ID, unix.EAGAIN)
		return
	}
	left, err := w.clock.left(n.PID, unix.CLOCK_REALTIME, deadline)
	switch {
	case err != nil:
		w.lost(n, err)
	case left <= 0:
		w.queue.fail(n.ID, unix.ETIMEDOUT)
	default:
		id := n.ID
		w.later.after(id, min(left, wakeSlice), func() { w.queue.value(id, 0) })
	}
}

// A later answers calls after a while, until its end.
type later struct {
	mu        sync.Mutex
	ended     bool                   // guarded by mu
	timers    map[uint64]*time.Timer // by the call that they answer; guarded by mu
	answering sync.WaitGroup
}

// after calls answer, for the call with that ID, unless the end comes before.
func (l *later) after(id uint64, d time.Duration, answer func()) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.ended {
		return
	}
	if l.timers == nil {
		l.timers = map[uint64]*time.Timer{}
	}
	l.timers[id] = time.AfterFunc(d, func() {
		l.mu.Lock()
		defer l.mu.Unlock()
		delete(l.timers, id)
		if !l.ended {
			l.answering.Go(answer)
		}
	})
}

// end returns when nothing is answered any more.
func (l *later) end() {
	l.mu.Lock()
	l.ended = true
	for _, t := range l.timers {
		t.Stop()
	}
	l.mu.Unlock()
	l.answering.Wait()
}

// lost fails a call that cannot be answered as the conditions of the run demand, and with it the run: it must not go on
// under others unnoticed. If the process is gone it is no loss.
func (w *watch) lost(n *notification, err error) {
	name := processName(n.PID) // which may be gone once it is answered
	if w.queue.fail(n.ID, unix.EPERM) {
		w.mu.Lock()
		defer w.mu.Unlock()
		if w.broken == nil {
			w.broken = fmt.Errorf("process %q: %w", printable(name), err)
		}
	}
}
