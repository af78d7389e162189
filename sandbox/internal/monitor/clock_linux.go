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
	"github.com/cloister-build/cloister/sandbox/printable"
)

// A clock is a run's time of day: the host's with an offset, or frozen, so that only readings advance it. It is safe
// for concurrent use.
type clock struct {
	offset time.Duration
	frozen bool
	since  time.Time // start of the run by the host's clock
	begin  time.Time // start of the run by a frozen clock

	mu       sync.Mutex
	next     time.Time       // next reading of a frozen clock; guarded by mu
	readings int             // of a frozen clock; guarded by mu
	waits    map[uint32]wait // by thread, for a frozen clock; guarded by mu
}

// A wait is a thread's wait for a time of a frozen clock. It takes as long as if the clock ran.
type wait struct {
	deadline time.Time
	since    time.Time
	total    time.Duration
}

const (
	// tick is how much each reading advances a frozen clock, so that most programs see only one second. A program that
	// makes manyReadings probably polls for a later time, so each further reading advances the clock by longTick.
	tick, longTick = time.Microsecond, time.Millisecond
	manyReadings   = 100_000
	// maxWaits bounds the number of waits, most of which may be over.
	maxWaits = 10_000
	// maxSeconds is the latest distinguishable time, far from overflow.
	maxSeconds = 1 << 40
)

// newClock returns the clock of a run, or nil if it has the host's.
func newClock(c *sandbox.Conditions) *clock {
	if c.ClockOffset == 0 && c.FrozenClock == 0 {
		return nil
	}
	begin := time.Unix(c.FrozenClock, 0)
	return &clock{
		offset: c.ClockOffset, frozen: c.FrozenClock != 0, since: coarse(), begin: begin,
		next: begin, waits: map[uint32]wait{},
	}
}

// read returns the time of one of the kernel's time-of-day clocks; a frozen clock serves for all. It returns the
// kernel's error for clocks that the machine lacks, such as an alarm clock.
func (c *clock) read(id int32) (time.Time, error) {
	var ts unix.Timespec
	if err := unix.ClockGettime(id, &ts); err != nil {
		return time.Time{}, err
	}
	if c.frozen {
		c.mu.Lock()
		defer c.mu.Unlock()
		now := c.next
		if c.readings++; c.readings > manyReadings {
			c.next = now.Add(longTick)
		} else {
			c.next = now.Add(tick)
		}
		return now, nil
	}
	return time.Unix(ts.Unix()).Add(c.offset), nil
}

// advance advances a frozen clock by a sleep.
func (c *clock) advance(d time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.frozen {
		c.next = c.next.Add(d)
	}
}

// remaining returns how long a thread must still wait for a time, at most 0 if it has come. The thread may have begun
// to wait before.
func (c *clock) remaining(thread uint32, id int32, deadline time.Time) (time.Duration, error) {
	if !c.frozen {
		now, err := c.read(id)
		return deadline.Sub(now), err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	w, ok := c.waits[thread]
	if !ok || !w.deadline.Equal(deadline) {
		if len(c.waits) >= maxWaits {
			clear(c.waits) // the others start over
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

// answerTime answers a call about the time of day and reports whether it was one.
func (w *session) answerTime(n *notification, name string) bool {
	switch name {
	case "clock_gettime":
		w.answerClock(n, int32(n.Args[0]), n.Args[1], 1)
	case "gettimeofday":
		w.answerClock(n, unix.CLOCK_REALTIME, n.Args[0], 1000)
	case "time":
		w.answerSeconds(n)
	case "nanosleep":
		w.sleepFor(n, n.Args[0])
	case "clock_nanosleep":
		switch id := int32(n.Args[0]); {
		case id == unix.CLOCK_REALTIME_COARSE || id == unix.CLOCK_REALTIME_ALARM:
			w.queue.proceed(n.ID) // fails: one cannot sleep, the other needs a privilege
		case n.Args[1]&unix.TIMER_ABSTIME != 0:
			w.sleepUntil(n)
		default:
			w.sleepFor(n, n.Args[2])
		}
	case "futex":
		w.waitUntil(n)
	default: // calls for file times may be recorded first
		return false
	}
	return true
}

// answerClock writes the time as a struct timespec, or as a timeval with unit 1000.
func (w *session) answerClock(n *notification, id int32, at uint64, unit int) {
	m, err := w.memory(n)
	if err != nil {
		w.cannotAnswer(n, err)
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
		w.cannotAnswer(n, err)
		return
	}
	var b []byte
	b = binary.NativeEndian.AppendUint64(b, uint64(now.Unix()))
	b = binary.NativeEndian.AppendUint64(b, uint64(now.Nanosecond()/unit))
	ok := m.write(at, b)
	if unit > 1 { // gettimeofday may have null arguments; the time zone is always zero
		ok = (at == 0 || ok) && (n.Args[1] == 0 || m.write(n.Args[1], make([]byte, 8)))
	}
	if !ok {
		w.queue.fail(n.ID, unix.EFAULT)
		return
	}
	w.queue.value(n.ID, 0)
}

// answerSeconds answers time(2).
func (w *session) answerSeconds(n *notification) {
	now, err := w.clock.read(unix.CLOCK_REALTIME_COARSE)
	if err != nil {
		w.cannotAnswer(n, err)
		return
	}
	if n.Args[0] != 0 {
		m, err := w.memory(n)
		if err != nil {
			w.cannotAnswer(n, err)
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

// leastSleep is the shortest sleep that advances a frozen clock. Shorter ones are polling loops of unpredictable
// length: Go's runtime sleeps for up to 10 ms.
const leastSleep = 100 * time.Millisecond

// sleepFor lets the kernel perform a relative sleep. A frozen clock advances at once, equally in every run.
func (w *session) sleepFor(n *notification, at uint64) {
	if w.clock.frozen {
		m, err := w.memory(n)
		if err != nil {
			w.cannotAnswer(n, err)
			return
		}
		defer m.close()
		if t, ok := m.timespec(at); ok && t.Sub(time.Unix(0, 0)) >= leastSleep { // the kernel rejects invalid times
			w.clock.advance(t.Sub(time.Unix(0, 0)))
		}
	}
	w.queue.proceed(n.ID)
}

const (
	// sleepSlice is how often to check whether a sleeping thread has a signal: only its death interrupts a reported
	// call.
	sleepSlice = 20 * time.Millisecond
	// wakeSlice is how long a thread waits at a futex, where nobody can wake it meanwhile, before it looks again.
	wakeSlice = 5 * time.Millisecond
)

// sleepUntil answers clock_nanosleep(2) until a time of day.
func (w *session) sleepUntil(n *notification) {
	m, err := w.memory(n)
	if err != nil {
		w.cannotAnswer(n, err)
		return
	}
	defer m.close()
	deadline, ok := m.timespec(n.Args[2])
	if !ok {
		w.queue.proceed(n.ID) // fails
		return
	}
	w.sleep(*n, deadline)
}

// sleep answers a call when its time has come or a signal is pending.
func (w *session) sleep(n notification, deadline time.Time) {
	left, err := w.clock.remaining(n.PID, int32(n.Args[0]), deadline)
	switch {
	case err != nil:
		w.cannotAnswer(&n, err)
	case left <= 0:
		w.queue.value(n.ID, 0)
	case signalled(n.PID):
		w.queue.fail(n.ID, unix.EINTR)
	case w.queue.valid(n.ID):
		w.timers.after(n.ID, min(left, sleepSlice), func() { w.sleep(n, deadline) })
	}
}

// waitUntil answers futex(2) with a time of day. At the end of a slice it pretends a spurious wake-up, which every
// caller must handle.
func (w *session) waitUntil(n *notification) {
	m, err := w.memory(n)
	if err != nil {
		w.cannotAnswer(n, err)
		return
	}
	defer m.close()
	deadline, ok := m.timespec(n.Args[3])
	var word [4]byte
	if !ok || n.Args[0]%4 != 0 || n.Args[5]&0xffffffff == 0 || !m.read(n.Args[0], word[:]) {
		w.queue.proceed(n.ID) // fails
		return
	}
	if binary.NativeEndian.Uint32(word[:]) != uint32(n.Args[2]) {
		w.queue.fail(n.ID, unix.EAGAIN)
		return
	}
	left, err := w.clock.remaining(n.PID, unix.CLOCK_REALTIME, deadline)
	switch {
	case err != nil:
		w.cannotAnswer(n, err)
	case left <= 0:
		w.queue.fail(n.ID, unix.ETIMEDOUT)
	default:
		id := n.ID
		w.timers.after(id, min(left, wakeSlice), func() { w.queue.value(id, 0) })
	}
}

// A delayedAnswers answers calls after a delay, until end.
type delayedAnswers struct {
	mu        sync.Mutex
	ended     bool                   // guarded by mu
	timers    map[uint64]*time.Timer // by call ID; guarded by mu
	answering sync.WaitGroup
}

// after calls answer for the call with that ID after d, unless end comes first.
func (l *delayedAnswers) after(id uint64, d time.Duration, answer func()) {
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

// end stops all timers and waits for running answers.
func (l *delayedAnswers) end() {
	l.mu.Lock()
	l.ended = true
	for _, t := range l.timers {
		t.Stop()
	}
	l.mu.Unlock()
	l.answering.Wait()
}

// cannotAnswer fails a call that cannot be answered as the run's conditions demand, and with it the run, which must not
// continue under other conditions. If the process is gone nothing is lost.
func (w *session) cannotAnswer(n *notification, err error) {
	name := processName(n.PID) // it may be gone after the answer
	if w.queue.fail(n.ID, unix.EPERM) {
		w.mu.Lock()
		defer w.mu.Unlock()
		if w.broken == nil {
			w.broken = fmt.Errorf("process %q: %w", printable.Tail(name, maxSubject), err)
		}
	}
}
