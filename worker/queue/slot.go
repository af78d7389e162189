// SPDX-License-Identifier: Apache-2.0

package queue

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/worker"
)

// An Offer is what a slot takes.
type Offer struct {
	// Worker is the name of the machine, and Slot which of its slots it is: no two that have joined have both in common.
	Worker, Slot string
	// Prefix is what the instances are, or are below, whose actions it takes; "" is every instance.
	Prefix string
	// Properties are what the worker has; a name may have several values. It takes actions each of whose demands is
	// among them.
	Properties []worker.Property
	// Ending says that the worker executes in the slot what it was not given, and is to end; see Slot.Ends.
	Ending bool
	// Any says that it takes actions whatever they demand.
	Any bool
}

// What Take and Join fail with.
var (
	// ErrClosed is the error of a queue that has no action any more and will have none.
	ErrClosed = errors.New("the queue is closed")
	// ErrLeft is the error of a slot that has left.
	ErrLeft = errors.New("the slot has left the queue")
	// ErrJoined is the error of an offer whose Worker and Slot have joined already.
	ErrJoined = errors.New("a slot of this name has joined already")
	// ErrBusy is the error of a slot that has a Run, or waits for one.
	ErrBusy = errors.New("the slot has an action, or waits for one already")
)

// A Slot executes one action at a time, here or elsewhere. Its methods are safe for concurrent use.
type Slot struct {
	q    *Queue
	of   *member
	name string

	// The rest is guarded by q.mu.
	run    *Run
	wake   chan struct{} // closed when it has a run, or will never have; nil unless Take waits
	left   bool
	ending time.Time // see Ends
}

// Ends notes whether the worker executes in this slot what nobody waits for, and is to end: what an earlier queue gave it,
// or what was cancelled. Its machine is not idle. Take notes that it does not.
func (s *Slot) Ends(executes bool) {
	s.q.mu.Lock()
	defer s.q.mu.Unlock()
	switch {
	case !executes:
		s.ending = time.Time{}
	case s.ending.IsZero():
		s.ending = time.Now()
	}
}

// Join adds a slot. It fails with ErrJoined or ErrClosed. A worker that is drained may join: it gets nothing.
func (q *Queue) Join(o Offer) (*Slot, error) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.over() {
		return nil, ErrClosed
	}
	for _, m := range q.members {
		if m.name == o.Worker && m.slots[o.Slot] != nil {
			return nil, fmt.Errorf("%w: slot %q of worker %q", ErrJoined, o.Slot, o.Worker)
		}
	}
	return q.join(o, false), nil
}

// joinOwn starts the queue's own slots.
func (q *Queue) joinOwn() {
	o := Offer{Worker: "local", Any: true}
	if q.cfg.Offer != nil {
		o = *q.cfg.Offer
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	for i := range q.cfg.Slots {
		o.Slot = strconv.Itoa(i)
		s := q.join(o, true)
		q.own = s.of
		q.wg.Go(func() { q.work(s) })
	}
}

// join adds a slot whose name is new.
func (q *Queue) join(o Offer, own bool) *Slot {
	m := q.member(o, own)
	s := &Slot{q: q, of: m, name: o.Slot}
	m.slots[o.Slot] = s
	m.seen, m.left = time.Now(), time.Time{}
	if o.Ending {
		s.ending = m.seen
	}
	return s
}

// work executes actions in one of the queue's own slots until there are no more.
func (q *Queue) work(s *Slot) {
	for {
		r, err := s.Take(q.ctx)
		if err != nil {
			return
		}
		task := r.Task()
		out, err := guard(func() (*worker.Outcome, error) { return q.cfg.Executor.Execute(r.ctx, &task, r.Report) })
		r.End(out, err)
	}
}

// Take waits for an action for the slot, for as long as its worker is drained in vain, and fails with the error of ctx,
// ErrClosed, ErrLeft or ErrBusy. It may succeed although ctx ends. The caller ends the Run.
func (s *Slot) Take(ctx context.Context) (*Run, error) {
	q := s.q
	q.mu.Lock()
	defer q.mu.Unlock()
	s.of.seen, s.ending = time.Now(), time.Time{}
	switch {
	case s.left:
		return nil, ErrLeft
	case s.run != nil || s.wake != nil:
		return nil, ErrBusy
	case q.over():
		return nil, ErrClosed
	case ctx.Err() != nil:
		return nil, ctx.Err()
	}
	if n := q.ready.first(func(n *lane) bool { return q.may(s.of, n) }); n != nil {
		q.begin(s, q.ready.take(n))
		return s.run, nil
	}
	wake := make(chan struct{})
	s.wake = wake
	s.of.idle = append(s.of.idle, s)
	q.idle.Signal()
	q.mu.Unlock()
	select {
	case <-wake:
	case <-ctx.Done():
	}
	q.mu.Lock()
	switch {
	case s.run != nil && s.run.wake == wake:
		return s.run, nil
	case s.left:
		return nil, ErrLeft
	case s.wake == nil:
		return nil, ErrClosed
	}
	s.rouse()
	return nil, ctx.Err()
}

// rouse ends the waiting of s.
func (s *Slot) rouse() {
	if s.wake == nil {
		return
	}
	close(s.wake)
	s.wake = nil
	s.of.idle = slices.DeleteFunc(s.of.idle, func(t *Slot) bool { return t == s })
}

// wakeAll ends the waiting of all slots, which get nothing any more.
func (q *Queue) wakeAll() {
	for _, m := range q.members {
		for len(m.idle) > 0 {
			m.idle[0].rouse()
		}
	}
}

// over reports whether there is no action and will be none.
func (q *Queue) over() bool {
	select {
	case <-q.empty:
		return true
	default:
		return false
	}
}

// Leave takes the slot out of the queue and says why. An action that it has is lost. A slot leaves once.
func (s *Slot) Leave(why string) {
	q := s.q
	q.mu.Lock()
	defer q.mu.Unlock()
	if s.left {
		return
	}
	s.left = true
	s.rouse()
	m := s.of
	delete(m.slots, s.name)
	if m.seen = time.Now(); len(m.slots) == 0 {
		m.left = m.seen
		q.forgetWorkers(m.left)
	}
	if s.run != nil {
		q.lose(s.run, why, false)
	}
	// What others were to take rather than those that are left, these may have to.
	q.dispatchAll()
}

// A Run is an action that a slot has. Its methods are safe for concurrent use.
type Run struct {
	q    *Queue
	job  *job
	slot *Slot
	task worker.Task
	ctx  context.Context // ended by the queue when nobody waits, or when it is over
	wake chan struct{}   // of the Take that it ended; nil if that did not wait
	// endLogs is of Config.Logs, nil if there are none.
	endLogs func(*worker.Outcome)
	began   time.Time

	// The rest is guarded by q.mu.
	stage worker.Stage
	over  bool // it has an end, or is lost
}

// begin gives s a job that was taken from the line.
func (q *Queue) begin(s *Slot, j *job) {
	q.giveRoom(j)
	// Nothing but leave cancels a job: its operations know why by then.
	r := &Run{q: q, job: j, slot: s, task: j.req.Task, wake: s.wake, began: time.Now()}
	r.ctx, j.cancel = context.WithCancel(context.Background())
	if s.of == q.own {
		if q.cfg.Logs != nil {
			r.task.Logs, r.endLogs = q.cfg.Logs(&j.req.Task)
		}
	} else {
		// Who prepared it has looked, and whoever has it executes it.
		r.task.SkipCacheLookup = true
		j.ran = true
		if j.prefetch.stop != nil {
			j.prefetch.stop()
		}
	}
	j.run, s.run = r, r
	s.of.busy++
	s.rouse()
	j.advance(j.ops, repb.ExecutionStage_EXECUTING)
	q.claim()
}

// dispatch gives the jobs of n to slots that wait.
func (q *Queue) dispatch(n *lane) {
	for n.waiting > 0 {
		s := q.idler(n)
		if s == nil {
			return
		}
		q.begin(s, q.ready.take(n))
	}
}

// dispatchAll gives jobs to slots that wait, since who may take what has changed.
func (q *Queue) dispatchAll() {
	for _, n := range slices.Clone(q.ready.open) {
		q.dispatch(n)
	}
}

// Task returns what is to be executed. Of a slot of another worker it says to skip the lookup: whoever queued the action
// has looked into the action cache.
func (r *Run) Task() worker.Task { return r.task }

// Cancelled is closed when nobody waits for the action any more, and when the run is over.
func (r *Run) Cancelled() <-chan struct{} { return r.ctx.Done() }

// Report says which stage has begun, or that it goes on.
func (r *Run) Report(s worker.Stage) {
	r.q.mu.Lock()
	defer r.q.mu.Unlock()
	if r.over {
		return
	}
	r.stage = s
	r.slot.of.seen = time.Now()
	if s > worker.Fetch {
		r.job.ran = true
	}
}

// End says what became of the action, and frees the slot. Only the first End counts, and none of a run that was lost.
func (r *Run) End(out *worker.Outcome, err error) {
	if err != nil {
		out = nil // whatever came beside it
	} else if out == nil {
		err = errors.New("the executor returned neither an outcome nor a fault")
	}
	q := r.q
	q.mu.Lock()
	if r.over {
		q.mu.Unlock()
		return
	}
	r.over = true
	j := r.job
	cancel := j.cancel
	q.mu.Unlock()
	if r.endLogs != nil {
		r.endLogs(out)
	}
	cancel()
	e := q.endOf(out, err)
	q.mu.Lock()
	defer q.mu.Unlock()
	r.slot.of.done++
	q.release(r)
	q.finish(j, e)
	q.checkEmpty()
}

// release takes from the slot of r its job.
func (q *Queue) release(r *Run) {
	s := r.slot
	s.run = nil
	s.of.busy--
	s.of.seen = time.Now()
	q.ready.done(r.job)
}

// A loss is how a run was lost.
type loss struct {
	worker, why string
	given       bool // back, for a reason that is not the action's
}

// Lost frees the slot and says why the action has no end there: it is given to another slot, at most Config.Attempts
// times in all, and to one of a worker that lost it only where no other that is there may take it. It does nothing if the
// run has an end.
func (r *Run) Lost(why string) {
	r.q.mu.Lock()
	defer r.q.mu.Unlock()
	r.q.lose(r, why, false)
}

// GiveBack is Lost, of a worker that was told to end and did not wait for the action, or that does not get as far as to its
// command, or its result. The action is not suspected of that.
func (r *Run) GiveBack(why string) {
	r.q.mu.Lock()
	defer r.q.mu.Unlock()
	r.q.lose(r, why, true)
}

func (q *Queue) lose(r *Run, why string, given bool) {
	if r.over {
		return
	}
	r.over = true
	j := r.job
	j.cancel()
	if r.endLogs != nil {
		r.endLogs(nil)
	}
	r.slot.of.lost++
	q.stats.Lost++
	q.release(r)
	j.run, j.ran = nil, false
	j.losses = append(j.losses, loss{r.slot.of.name, why, given})
	switch {
	case len(j.ops) == 0: // nobody waits for it
	case len(j.losses) >= q.cfg.Attempts:
		q.finish(j, endOf(nil, j.poison()))
	default:
		q.stats.Again++
		j.lot.avoided = encode(j.avoided()...)
		q.await(j)
	}
	q.checkEmpty()
}

// avoided returns the workers that have lost j, sorted and each once.
func (j *job) avoided() []string {
	var names []string
	for _, l := range j.losses {
		names = append(names, l.worker)
	}
	slices.Sort(names)
	return slices.Compact(names)
}

// poison is the fault of an action that was lost too often. If it was given back at least once, it is not that which ended
// its workers each time, and clients may ask again.
func (j *job) poison() *worker.Fault {
	var each []string
	for _, l := range j.losses {
		each = append(each, fmt.Sprintf("worker %s (%s)", word(l.worker), l.why))
	}
	if slices.ContainsFunc(j.losses, func(l loss) bool { return l.given }) {
		return fault(worker.Unavailable, "action %s was lost %d times, also for reasons that were not its own: ask again; it was lost with %s",
			j.req.Task.Action, len(each), strings.Join(each, ", "))
	}
	return fault(worker.Unmet, "action %s is suspected of ending its workers, and is not run again: it was lost %d times, with %s",
		j.req.Task.Action, len(each), strings.Join(each, ", "))
}

// dismiss frees the slots of other workers, for whose runs nobody waits any more: the queue goes away.
func (q *Queue) dismiss() {
	for _, m := range q.members {
		if m == q.own {
			continue
		}
		for _, s := range m.slots {
			if s.run != nil {
				q.lose(s.run, "", false)
			}
		}
	}
	q.checkEmpty()
}
