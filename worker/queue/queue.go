// SPDX-License-Identifier: Apache-2.0

// Package queue holds actions until a slot is free and tells whoever waits what becomes of them. It
// serves no wire and runs nothing itself: the one is execserver's business, the other the Executor's, or that of the
// workers elsewhere whose slots have joined.
//
// A request becomes an Operation, which its client follows, and a job, which a slot runs:
//
//	Submit --> arrived --> Prepare --> ready --> Slot.Take --> Run.End --> completed
//	                          |          ^ ^                |
//	                          |          | +-- Run.Lost <---+
//	                          |          +-- shares the job of an equal action in flight
//	                          +------------- known already, or refused: completed
//
// Each operation belongs to one job until it is completed; a job works for one or more operations
// and is cancelled when the last of them has left. One mutex guards all of it and is never held
// while Prepare or the Executor works.
//
// No slot that may take a job waits while that job does: a job that comes goes to such a slot, a slot that comes gets
// such a job, and whenever workers join, leave, are drained or no longer drained, it is looked again.
package queue

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"runtime"
	"sync"
	"time"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/worker"
)

// Config configures a Queue. Executor is required unless Head is set; every other zero value means its default.
type Config struct {
	Executor worker.Executor
	// Slots is how many actions the Executor executes at once; the default is one for each CPU.
	Slots int
	// Head says that the queue has no slots of its own: actions run where others have joined. Logs, Fetch and Idle are of
	// own slots alone.
	Head bool
	// Offer, if not nil, is what the queue's own slots offer; its Slot is not used. The default takes every action, under
	// the name "local".
	Offer *Offer
	// Attempts is how often an action runs at most if it is lost with its workers; the default is 3.
	Attempts int
	// Settle is for how long after New an action waits that no worker offers to take, since its worker may not have joined
	// yet; the default is a minute. Later it is refused at once.
	Settle time.Duration
	// Unmatched is how long an action waits while there is no worker at all; the default is five minutes.
	Unmatched time.Duration
	// Remembered is for how long after its last slot has left a worker counts as one that may come back, so that actions
	// wait for it; the default is 15 minutes.
	Remembered time.Duration
	// Preparers is how many requests are prepared at once; the default is twice Slots.
	Preparers int
	// MaxLive is how many operations there may be that are not completed; the default is 100,000.
	MaxLive int
	// Grace is how long an operation is carried on that nobody waits for; the default is a minute.
	Grace time.Duration
	// Retain is how long a completed operation still answers; the default is five minutes.
	Retain time.Duration
	// Renew, if not nil, is to mark the inputs of an action as used, so that no store lets them go while it
	// waits for a slot. Every RenewEvery one goroutine calls it for each waiting action in turn: worker.Local takes
	// 2 ms for two thousand files that no other action has had marked lately, else 20 us. A round that takes
	// longer than RenewEvery is followed by the next at once.
	Renew func(context.Context, *worker.Task)
	// RenewEvery must lie well within the time for which the store keeps what was used; the default is an
	// hour.
	RenewEvery time.Duration
	// Fetch, if not nil, is to bring near what an action needs that waits for a slot, from a store that is far. It
	// is called once for each of the next 2*Slots in line, four at once, while no slot is free. It says to room how
	// many bytes the action needs, and fetches none if room returns false, which may take a while. Its context ends
	// when nobody waits for the action any more; that a slot has taken the action does not end it.
	Fetch func(ctx context.Context, t *worker.Task, room func(bytes int64) bool)
	// FetchBytes is how many bytes those actions may need together, however many of them were near already; for one
	// that needs more, nothing is fetched before it has a slot. The default is 1 GiB.
	FetchBytes int64
	// Logs, if not nil, makes what the output of an action is read from while it runs. It is called when a slot
	// takes the action, before anybody learns that it executes, and must neither wait nor call the queue. The
	// function end is called with the outcome, or nil if there is none, before anybody learns of that.
	Logs func(t *worker.Task) (logs *worker.Logs, end func(*worker.Outcome))
	// Ended, if not nil, is called once for each end that an operation may have, its outcome or its fault, and returns
	// what is called for each operation that has this end, in its last state and before anybody learns of that. Of
	// an end by the executor the first call may take a while. The second must neither wait nor call the queue.
	Ended func(*worker.Outcome, *worker.Fault) func(Info, State)
	// Idle, if not nil, is to work while a slot is free, on what nobody waits for. One goroutine calls it, again and
	// again; it returns when its context ends, which it does as soon as an action wants that slot. The action does not
	// wait for it to return.
	Idle func(ctx context.Context)
	// Drains are the workers that are drained from the start; see Queue.DrainState.
	Drains DrainState
	// MaxRetained is how many completed operations are kept, and MaxRetainedBytes how much memory, as
	// estimated, they may take; the defaults are 10,000 and 256 MiB. The oldest are dropped first,
	// those whose action did not run before all others.
	MaxRetained      int
	MaxRetainedBytes int64
}

// A Request asks for an action to be executed.
type Request struct {
	// Task is what the Executor is given. A zero Queued is set to the time of Submit. The Stdout and
	// Stderr of a request that shares an earlier run are not written to.
	Task worker.Task
	// Priority orders what waits: the lower value is sooner. Among equal ones the invocations of each instance take
	// turns, and the requests of one are served in order of arrival.
	Priority int32
	// Alone keeps the action from sharing a run.
	Alone bool
	// Terms keep it from sharing the run of an equal action whose terms differ.
	Terms string
	// Demands are what it demands of the worker, sorted. Equal actions demand the same.
	Demands []worker.Property
	// Prepare, if not nil, does what is possible without a slot, once and before the action waits
	// for one. It may return an Outcome that is known already, or a *worker.Fault; if it returns
	// neither, the action is queued. It may set Alone, Terms, Demands and Task.SkipCacheLookup of the Request
	// it is given.
	Prepare func(context.Context, *Request) (*worker.Outcome, error)
}

// Stats counts what is in a queue now, and the operations completed since it was made.
type Stats struct {
	// Queued and Running count runs, which several operations may share.
	Queued, Running int
	// Oldest is when the request arrived that has waited in line for the longest; zero if none waits.
	Oldest time.Time
	// Slots is how many slots there are, its own and those that have joined.
	Slots int
	// Done counts completed operations; Cached and Failed those of them that were answered from the
	// action cache and that ended in a Fault.
	Done, Cached, Failed int64
	// Lost counts the runs that were lost with their worker, Again those of them that were made again.
	Lost, Again int64
}

// A Queue gives actions to slots, its own and those that join. Its methods are safe for concurrent use.
type Queue struct {
	cfg     Config
	ctx     context.Context // ended by Close, under mu
	stop    context.CancelFunc
	wg      sync.WaitGroup // the preparers, the slots, the sweeper, who renews, fetches and idles
	empty   chan struct{}  // closed when the queue is draining and has no job
	started time.Time
	own     *member // whose slots are the queue's own; nil if it has none

	mu             sync.Mutex // guards everything below and in each job and Operation
	arrived, ready line
	seq            uint64
	flights        map[flight]*job       // the jobs that an equal action may share
	ops            map[string]*Operation // by name
	listed         roll                  // the same, in order of arrival
	live           int                   // how many of ops are not completed
	// The rest of ops, oldest first: those whose action ran, and those that were answered without.
	executed, answered []*Operation
	kept               int64 // bytes of both
	stats              Stats // without what is counted when asked
	draining           bool
	members            []*member         // those that have joined, and those that are remembered
	drained            map[string]*drain // by the name of the worker
	drainJoining       *drain            // of every worker that joins; nil if none is to be
	admitted           map[string]bool   // the workers of which that is not, by name
	// What is fetched for jobs that wait.
	fetched int64     // bytes of Config.FetchBytes that are taken
	asking  []*job    // those that room is wanted for
	room    sync.Cond // there may be room
	waiting sync.Cond // there may be a job to fetch for
	// What is done while a slot is free.
	idle  sync.Cond          // a slot may be free
	spare context.CancelFunc // nil unless Config.Idle works
}

// A flight is what equal actions have in common.
type flight struct {
	instance string
	action   cas.Digest
	terms    string
}

// New returns a queue that is working. The caller closes it.
func New(c Config) *Queue {
	c.Slots = positive(c.Slots, runtime.GOMAXPROCS(0))
	c.Preparers = positive(c.Preparers, 2*c.Slots)
	c.Attempts = positive(c.Attempts, 3)
	c.Settle = positive(c.Settle, time.Minute)
	c.Unmatched = positive(c.Unmatched, 5*time.Minute)
	c.Remembered = positive(c.Remembered, 15*time.Minute)
	c.MaxLive = positive(c.MaxLive, 100_000)
	c.Grace = positive(c.Grace, time.Minute)
	c.Retain = positive(c.Retain, 5*time.Minute)
	c.RenewEvery = positive(c.RenewEvery, time.Hour)
	c.FetchBytes = positive(c.FetchBytes, 1<<30)
	c.MaxRetained = positive(c.MaxRetained, 10_000)
	c.MaxRetainedBytes = positive(c.MaxRetainedBytes, 256<<20)

	q := &Queue{
		cfg:     c,
		empty:   make(chan struct{}),
		flights: make(map[flight]*job),
		ops:     make(map[string]*Operation),
		drained: make(map[string]*drain),
		started: time.Now(),
	}
	q.admitted = make(map[string]bool)
	q.restore(c.Drains)
	q.ctx, q.stop = context.WithCancel(context.Background())
	q.arrived.more.L, q.ready.more.L, q.room.L, q.waiting.L, q.idle.L = &q.mu, &q.mu, &q.mu, &q.mu, &q.mu
	for range c.Preparers {
		q.wg.Go(q.serve)
	}
	q.wg.Go(q.sweep)
	if c.Renew != nil {
		q.wg.Go(q.renew)
	}
	if c.Head {
		return q
	}
	q.joinOwn()
	if c.Idle != nil {
		q.wg.Go(q.spend)
	}
	if c.Fetch != nil {
		for range fetchers {
			q.wg.Go(q.fetchAhead)
		}
	}
	return q
}

func positive[T cmp.Ordered](v, otherwise T) T {
	var zero T
	if v > zero {
		return v
	}
	return otherwise
}

// Submit takes a request and returns the operation to follow. It never blocks. It fails with a
// *worker.Fault: Unavailable when the queue drains, Exhausted when it is full.
func (q *Queue) Submit(r Request) (*Operation, error) {
	now := time.Now()
	if r.Task.Queued.IsZero() {
		r.Task.Queued = now
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.draining {
		return nil, errDraining
	}
	if q.live >= q.cfg.MaxLive {
		return nil, fault(worker.Exhausted, "%d operations are queued or running here, which is the limit: ask again when some have ended", q.live)
	}
	q.seq++
	j := &job{req: r, ops: make(map[*Operation]bool, 1)}
	o := newOperation(q, j, now)
	q.ops[o.info.Name] = o
	q.listed.add(o)
	q.live++
	if r.Prepare == nil {
		q.enter(j)
	} else {
		q.arrived.push(j)
	}
	return o, nil
}

// errDraining refuses a request, or ends an operation, because the queue goes away.
var errDraining = fault(worker.Unavailable, "the server is shutting down: ask again, another or its successor takes the action")

// Operation returns the operation of that name, unless it never was or is no longer kept.
func (q *Queue) Operation(name string) (*Operation, bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	o, ok := q.ops[name]
	return o, ok
}

// Stats returns the present counts.
func (q *Queue) Stats() Stats {
	q.mu.Lock()
	defer q.mu.Unlock()
	s := q.stats
	s.Queued = q.arrived.waiting + q.arrived.busy + q.ready.waiting
	s.Running = q.ready.busy
	for _, l := range []*line{&q.arrived, &q.ready} {
		if o := l.oldest(); o != nil && (s.Oldest.IsZero() || o.info.Queued.Before(s.Oldest)) {
			s.Oldest = o.info.Queued
		}
	}
	for _, m := range q.members {
		s.Slots += len(m.slots)
	}
	return s
}

// Drain refuses new requests from now on, since the queue is to go away, and returns when nothing is queued or running;
// DrainWorker is another thing. When ctx ends first, the operations left are completed with a Fault of kind Unavailable,
// their actions are cancelled, and Drain returns the error of ctx when the last in a slot of its own has ended; it
// does not wait for the word of other workers. Completed operations answer until Close and after it.
func (q *Queue) Drain(ctx context.Context) error {
	q.mu.Lock()
	q.draining = true
	q.claim()
	q.checkEmpty()
	q.mu.Unlock()
	select {
	case <-q.empty:
		return nil
	case <-ctx.Done():
	}
	q.mu.Lock()
	for _, o := range q.ops {
		if o.job != nil {
			q.leave(o, errDraining)
		}
	}
	q.dismiss()
	q.mu.Unlock()
	<-q.empty
	return ctx.Err()
}

// Close cancels what is queued or running, as Drain does, and waits for it and for every goroutine of
// the queue.
func (q *Queue) Close() {
	now, cancel := context.WithCancel(context.Background())
	cancel()
	_ = q.Drain(now) // its error says only that something was left to cancel
	q.mu.Lock()
	q.stop()
	q.arrived.more.Broadcast()
	q.waiting.Broadcast()
	q.idle.Broadcast()
	q.mu.Unlock()
	q.wg.Wait()
}

// checkEmpty closes q.empty when that has become true.
func (q *Queue) checkEmpty() {
	if !q.draining || q.arrived.waiting+q.arrived.busy+q.ready.waiting+q.ready.busy > 0 {
		return
	}
	select {
	case <-q.empty:
	default:
		close(q.empty)
		q.wakeAll()
	}
}

// sweep looks, often enough, for operations that nobody waits for and for those kept long enough.
func (q *Queue) sweep() {
	tick := time.NewTicker(min(q.cfg.Grace, q.cfg.Retain, q.cfg.Settle, q.cfg.Unmatched, q.cfg.Remembered)/4 + 1)
	defer tick.Stop()
	for {
		select {
		case <-q.ctx.Done():
			return
		case now := <-tick.C:
			q.expire(now)
		}
	}
}

func (q *Queue) expire(now time.Time) {
	q.mu.Lock()
	defer q.mu.Unlock()
	for _, o := range q.ops {
		if o.job != nil && o.waiters == 0 && now.Sub(o.idle) > q.cfg.Grace {
			q.leave(o, fault(worker.Cancelled, "cancelled because nobody waited for the operation for %v: execute the action again", q.cfg.Grace))
		}
	}
	q.forgetWorkers(now)
	q.refuse(now)
	q.dropExpired(now)
}

// complete gives o its end. It belongs to no job from here on.
func (q *Queue) complete(o *Operation, e end) {
	ran := o.job.ran
	o.job = nil
	o.completed = time.Now()
	o.bytes = operationBytes + e.bytes + int64(len(o.info.Target)+len(o.info.Mnemonic)+len(o.info.Invocation)+len(o.info.Correlated))
	s := o.state // when it began, where, and the names of its logs stay
	s.Stage, s.Outcome, s.Fault = repb.ExecutionStage_COMPLETED, e.outcome, e.fault
	if e.tell == nil && q.cfg.Ended != nil {
		e.tell = q.cfg.Ended(e.outcome, e.fault)
	}
	if e.tell != nil {
		e.tell(o.info, s)
	}
	o.change(s)
	q.live--
	q.stats.Done++
	switch {
	case e.fault != nil:
		q.stats.Failed++
	case e.outcome.Cached:
		q.stats.Cached++
	}
	q.keep(o, ran)
}

func fault(k worker.Kind, format string, args ...any) *worker.Fault {
	return &worker.Fault{Kind: k, Err: fmt.Errorf(format, args...)}
}

// asFault returns err as the *worker.Fault that it should be. Anything else is a defect.
func asFault(err error) *worker.Fault {
	if f, ok := errors.AsType[*worker.Fault](err); ok {
		return f
	}
	return &worker.Fault{Kind: worker.Internal, Err: err}
}
