// SPDX-License-Identifier: Apache-2.0

package queue

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"time"

	"github.com/cloister-build/cloister/worker"
	"github.com/cloister-build/cloister/worker/queue/internal/fairqueue"
)

// An Offer describes which actions a slot takes.
type Offer struct {
	// Worker names the machine and Slot one of its slots; together they are unique among the joined slots.
	Worker, Slot string
	// Prefix limits the slot to the instance of this name and those below it; "" means every instance.
	Prefix string
	// Properties are those of the worker; a name may have several values. The slot takes actions all of whose demands
	// are among them.
	Properties []worker.Property
	// Ending reports that the worker still executes an action that the slot was not given; see Slot.SetEnding.
	Ending bool
	// Places means that the worker implements the properties of worker.IsPlacement, so that it need not offer them.
	Places bool
	// Any makes the slot take actions regardless of their demands.
	Any bool
}

// Errors returned by Take and Join.
var (
	// ErrClosed reports that the queue is closed and has no more actions.
	ErrClosed = errors.New("the queue is closed")
	// ErrLeft reports that the slot has left.
	ErrLeft = errors.New("the slot has left the queue")
	// ErrJoined reports that a slot with the same Worker and Slot has joined.
	ErrJoined = errors.New("a slot of this name has already joined")
	// ErrBusy reports that the slot has a Run or another Take waits.
	ErrBusy = errors.New("the slot already has an action or waits for one")
)

// A Slot executes one action at a time, here or on another machine. Its methods are safe for concurrent use.
type Slot struct {
	q      *Queue
	worker *workerGroup
	name   string

	// The fields below are guarded by q.mu.
	run    *Run
	woken  chan struct{} // closed when the slot has a run or never will; nil unless Take waits
	left   bool
	ending time.Time // see SetEnding
	// The last run yielded. The slot counts in q.yielding until it asks for the next job.
	yielded bool
}

// SetEnding records whether the worker still executes, and is stopping, an action that this slot does not have: one
// that was cancelled, or assigned by an earlier queue. Take clears it.
func (s *Slot) SetEnding(ending bool) {
	s.q.mu.Lock()
	defer s.q.mu.Unlock()
	switch {
	case !ending:
		s.ending = time.Time{}
	case s.ending.IsZero():
		s.ending = time.Now()
	}
}

// Join adds a slot. It fails with ErrJoined or ErrClosed. Slots of a drained worker may join, but get no actions.
func (q *Queue) Join(o Offer) (*Slot, error) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.closed() {
		return nil, ErrClosed
	}
	for _, w := range q.byName[o.Worker] {
		if w.slots[o.Slot] != nil {
			return nil, fmt.Errorf("%w: slot %q of worker %q", ErrJoined, o.Slot, o.Worker)
		}
	}
	return q.join(o, false, 0), nil
}

// joinOwn starts the local slots.
func (q *Queue) joinOwn() {
	o := Offer{Worker: "local", Any: true}
	if q.cfg.Offer != nil {
		o = *q.cfg.Offer
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	for i := range q.cfg.Slots {
		depths := q.cfg.Depth + 1
		if i >= maxNested {
			depths = 1
		}
		for depth := range depths {
			o.Slot = strconv.Itoa(i)
			if depth > 0 {
				o.Slot += "." + strconv.Itoa(depth)
			}
			s := q.join(o, true, depth)
			if depth == 0 {
				q.own = s.worker
			}
			q.wg.Go(func() { q.runSlot(s) })
		}
	}
}

// join adds a slot with a new name.
func (q *Queue) join(o Offer, own bool, depth int) *Slot {
	w := q.group(o, own, depth)
	s := &Slot{q: q, worker: w, name: o.Slot}
	w.slots[o.Slot] = s
	w.seen, w.left = time.Now(), time.Time{}
	if o.Ending {
		s.ending = w.seen
	}
	return s
}

// runSlot executes actions in a local slot until there are no more.
func (q *Queue) runSlot(s *Slot) {
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

// Take waits for an action for the slot. The slots of a drained worker get none. Take fails with the error of ctx,
// ErrClosed, ErrLeft or ErrBusy, and may succeed although ctx ends. The caller ends the Run.
func (s *Slot) Take(ctx context.Context) (*Run, error) {
	q := s.q
	q.mu.Lock()
	defer q.mu.Unlock()
	s.worker.seen, s.ending = time.Now(), time.Time{}
	q.settle(s)
	switch {
	case s.left:
		return nil, ErrLeft
	case s.run != nil || s.woken != nil:
		return nil, ErrBusy
	case q.closed():
		return nil, ErrClosed
	case ctx.Err() != nil:
		return nil, ctx.Err()
	}
	if b := q.ready.Next(func(j *job) bool { return q.mayTake(s.worker, j) }); b != nil {
		q.begin(s, b.Take())
		return s.run, nil
	}
	woken := make(chan struct{})
	s.woken = woken
	s.worker.idle = append(s.worker.idle, s)
	q.idle[s.worker] = true
	q.slotFree.Signal()
	q.mu.Unlock()
	select {
	case <-woken:
	case <-ctx.Done():
	}
	q.mu.Lock()
	switch {
	case s.run != nil && s.run.woke == woken:
		return s.run, nil
	case s.left:
		return nil, ErrLeft
	case s.woken == nil:
		return nil, ErrClosed
	}
	s.wake()
	return nil, ctx.Err()
}

// wake ends the waiting of s, if it waits.
func (s *Slot) wake() {
	if s.woken == nil {
		return
	}
	close(s.woken)
	s.woken = nil
	w := s.worker
	if w.idle = slices.DeleteFunc(w.idle, func(t *Slot) bool { return t == s }); len(w.idle) == 0 {
		delete(s.q.idle, w)
	}
}

// wakeAll ends the waiting of all slots, which get no more actions.
func (q *Queue) wakeAll() {
	for _, w := range q.workers {
		for len(w.idle) > 0 {
			w.idle[0].wake()
		}
	}
}

// Leave removes the slot from the queue, for the reason why. Its action, if any, is lost. Further calls do nothing.
func (s *Slot) Leave(why string) {
	q := s.q
	q.mu.Lock()
	defer q.mu.Unlock()
	if s.left {
		return
	}
	s.left = true
	s.wake()
	w := s.worker
	delete(w.slots, s.name)
	w.seen = time.Now()
	if s.run != nil {
		q.lose(s.run, why, false)
	}
	q.settle(s)
	if len(w.slots) == 0 {
		w.left = w.seen
		q.forgetWorkers(w.left)
		q.dispatchAll() // workers that lost a job may have to take it again
	}
}

// dispatch assigns the jobs of b to waiting slots.
func (q *Queue) dispatch(b *fairqueue.Bucket[*job]) {
	for b.Len() > 0 {
		s := q.leastLoadedSlot(b.Peek())
		if s == nil {
			return
		}
		q.begin(s, b.Take())
	}
}

// dispatchAll assigns jobs to waiting slots after a change of workers. It then ends unwanted runs for whose slots other
// jobs wait.
func (q *Queue) dispatchAll() {
	for _, b := range slices.Clone(q.ready.Buckets()) {
		q.dispatch(b)
	}
	q.yieldAwaited()
}
