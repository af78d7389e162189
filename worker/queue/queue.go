// SPDX-License-Identifier: Apache-2.0

// Package queue holds actions until a slot is free and reports their progress to clients. It speaks no wire protocol,
// which is execserver's job, and executes nothing: its Executor does, or the workers whose slots have joined.
//
// A request becomes an Operation, which its client follows, and a job, which a slot runs:
//
//	Submit --> arrived --> Prepare --> Pull --> ready --> Slot.Take --> Run.End --> completed
//	                          |         |         ^ ^                |
//	                          |         |         | +-- Run.Lost <---+
//	                          |         |         +-- shares the job of an equal action in flight
//	                          +---------+------------ answered or refused: completed
//
// Each operation belongs to one job until it is completed; a job serves one or more operations and is cancelled when
// the last of them leaves. One mutex guards everything and is never held while Prepare, Pull or the Executor works.
//
// No slot waits while a job waits that it may take: a new job goes to such a slot, a new slot gets such a job, and the
// queue matches again when workers join, leave, are drained or undrained. Package fairqueue decides which job is next.
package queue

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/worker"
	"github.com/cloister-build/cloister/worker/queue/internal/fairqueue"
)

// A Request asks for the execution of an action.
type Request struct {
	// Task is passed to the Executor. Submit sets Queued if it is zero. If the request shares an earlier run, its
	// Stdout and Stderr are unused.
	Task worker.Task
	// Caller is who requests it, if the server authenticates callers; requests of several callers may share a run.
	Caller string
	// Priority orders requests: lower values run first. Builds of equal priority take turns; requests of one build run
	// in order of arrival.
	Priority int32
	// Alone prevents sharing a run.
	Alone bool
	// Terms prevents sharing a run with equal actions whose Terms differ.
	Terms string
	// Demands are the properties that a worker must have, sorted. Equal actions with equal Terms have equal demands.
	Demands []worker.Property
	// Prepare, if not nil, does the work that needs no slot, once, before the action is queued. It may return an
	// Outcome or a *worker.Fault, which completes the request; otherwise the action is queued. It may set Alone, Terms,
	// Demands, Pull and Task.SkipCacheLookup.
	Prepare func(context.Context, *Request) (*worker.Outcome, error)
	// Pull, if not nil, waits for what the action needs before it takes a slot, such as a container image. Prepare may
	// set it. Any number of them run at once. An error, a *worker.Fault, completes the request.
	Pull func(context.Context) error
}

// Stats counts the present contents of a queue, and the operations completed since New.
type Stats struct {
	// Queued and Running count runs, which several operations may share.
	Queued, Running int
	// Oldest is the arrival time of the oldest waiting request; zero if none waits.
	Oldest time.Time
	// Slots counts local slots, except those for nested actions, and slots that have joined.
	Slots int
	// Working, Drained and Gone count workers, including this machine if it has slots: those that take actions, the
	// drained ones, and those that are remembered after their last slot has left.
	Working, Drained, Gone int
	// Done counts completed operations; Cached and Failed those answered from the action cache and ended by a Fault.
	Done, Cached, Failed int64
	// Lost counts runs lost with their worker; Again those of them that were retried.
	Lost, Again int64
}

// A Queue assigns actions to slots: local ones and those that join. Use New; the zero Queue is not usable. Its
// methods are safe for concurrent use.
type Queue struct {
	cfg     Config
	ctx     context.Context // ended by Close, under mu
	stop    context.CancelFunc
	wg      sync.WaitGroup // all goroutines of the queue
	empty   chan struct{}  // closed when the queue is draining and has no job
	started time.Time
	own     *workerGroup // the local slots; nil if there are none

	mu             sync.Mutex // guards the fields below and those of each job and Operation
	arrived, ready fairqueue.Queue[*job]
	toPrepare      sync.Cond     // arrived may have a job
	pulling        map[*job]bool // jobs whose Pull runs
	seq            uint64
	flights        map[flightKey]*job    // jobs that equal actions may share
	ops            map[string]*Operation // by name
	listed         opList                // the same, in order of arrival
	live           int                   // operations that are not completed
	// Completed operations, oldest first: those whose action ran, and those answered without a run.
	executed, answered []*Operation
	retainedBytes      int64 // of both
	stats              Stats // only what is not counted on demand
	draining           bool
	workers            []*workerGroup            // joined or remembered
	byName             map[string][]*workerGroup // the same
	idle               map[*workerGroup]bool     // those with slots that wait for a job
	groups             uint64                    // number of the last one
	drained            map[string]*drain         // by worker name
	drainJoining       *drain                    // applies to every worker that joins; nil if none
	undrained          map[string]bool           // names of workers exempt from drainJoining
	demands            map[string]*demand        // of the jobs in ready, by the result of appendDemands
	distinct           map[string]int            // number of demands, by instance
	callers            map[callerKey]int         // number of demands, by the caller of the first action with them
	visits             int                       // workers and operations that searches have visited, for tests
	// Prefetching.
	fetched   int64     // bytes reserved of Config.FetchBytes
	reserving []*job    // jobs waiting to reserve
	reserved  sync.Cond // a reservation may succeed
	toFetch   sync.Cond // there may be a job to prefetch
	// Abandoned actions.
	left     []departure                    // of the last clients of operations, oldest first, including outdated ones
	unwanted map[*workerGroup]map[*Run]bool // runs without a client for Config.CancelGrace that do not yield yet
	yielding int                            // yielding runs, and their slots until these ask for the next job
	// Background work.
	slotFree sync.Cond          // a slot may be free
	stopIdle context.CancelFunc // nil unless Config.Idle runs
}

// New returns a running queue, which the caller closes. It fails without an Executor, unless Head is set.
func New(c Config) (*Queue, error) {
	if c.Executor == nil && !c.Head {
		return nil, errors.New("queue: Config.Executor is missing: only a queue with Head set has none")
	}
	c = c.withDefaults()
	q := &Queue{
		cfg:       c,
		empty:     make(chan struct{}),
		flights:   make(map[flightKey]*job),
		ops:       make(map[string]*Operation),
		byName:    make(map[string][]*workerGroup),
		idle:      make(map[*workerGroup]bool),
		drained:   make(map[string]*drain),
		undrained: make(map[string]bool),
		unwanted:  make(map[*workerGroup]map[*Run]bool),
		pulling:   make(map[*job]bool),
		demands:   make(map[string]*demand),
		distinct:  make(map[string]int),
		callers:   make(map[callerKey]int),
		started:   time.Now(),
	}
	q.restoreDrains(c.Drains)
	q.ctx, q.stop = context.WithCancel(context.Background())
	for _, c := range []*sync.Cond{&q.toPrepare, &q.reserved, &q.toFetch, &q.slotFree} {
		c.L = &q.mu
	}
	for range c.Preparers {
		q.wg.Go(q.prepareJobs)
	}
	q.wg.Go(q.sweep)
	if c.Renew != nil {
		q.wg.Go(q.renew)
	}
	if c.Head {
		return q, nil
	}
	q.joinOwn()
	if c.Idle != nil {
		q.wg.Go(q.runIdle)
	}
	if c.Fetch != nil {
		for range fetchers {
			q.wg.Go(q.prefetchJobs)
		}
	}
	return q, nil
}

// Submit accepts a request and returns the operation to follow. It never blocks. It fails with a *worker.Fault:
// Unavailable while the queue drains, Exhausted when it is full.
func (q *Queue) Submit(r Request) (*Operation, error) {
	now := time.Now()
	if r.Task.Queued.IsZero() {
		r.Task.Queued = now
	}
	depth := r.Task.Caller.Nesting()
	q.mu.Lock()
	defer q.mu.Unlock()
	switch {
	case q.closed(), q.draining && depth == 0: // running actions may need others to end
		return nil, errDraining
	case depth > 0 && (depth > q.cfg.Depth || q.own == nil):
		return nil, fault(worker.FaultUnmet, "this server has no slots for nested actions of depth %d", depth)
	}
	// MaxLive does not apply to nested actions: those that wait for them may fill the queue. Their endpoint limits them.
	if depth == 0 && q.live >= q.cfg.MaxLive && !q.dropBackground() {
		return nil, fault(worker.FaultExhausted, "the queue is full: %d operations are queued or running; retry later", q.live)
	}
	q.seq++
	j := &job{req: r, ops: make(map[*Operation]bool, 1)}
	j.item.Value = j
	o := newOperation(q, j)
	q.ops[o.info.Name] = o
	q.listed.add(o)
	q.live++
	if r.Prepare == nil {
		q.enter(j)
	} else {
		q.arrived.Push(&j.item, "", &o.entry)
		q.toPrepare.Signal()
	}
	return o, nil
}

// errDraining refuses requests and ends operations at shutdown.
var errDraining = fault(worker.FaultUnavailable, "the server is shutting down; retry, its successor or another server takes the action")

// Operation returns the operation of that name, if it is known.
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
	s.Queued = q.arrived.Waiting() + q.arrived.InService() + len(q.pulling) + q.ready.Waiting()
	s.Running = q.ready.InService()
	s.Oldest = q.arrived.Oldest()
	if t := q.ready.Oldest(); s.Oldest.IsZero() || !t.IsZero() && t.Before(s.Oldest) {
		s.Oldest = t
	}
	for _, w := range q.workers {
		switch {
		case w.depth > 0:
			continue
		case !w.left.IsZero():
			s.Gone++
		case w.drained != nil:
			s.Drained++
		default:
			s.Working++
		}
		s.Slots += len(w.slots)
	}
	return s
}

// RetainedBytes returns the estimated memory of completed operations.
func (q *Queue) RetainedBytes() int64 {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.retainedBytes
}

// Drain refuses new requests and returns when nothing is queued or running; it prepares the queue for Close, unlike
// DrainWorker. When ctx ends first, Drain completes the remaining operations with a Fault of kind FaultUnavailable,
// cancels their actions, waits for those in local slots, not for other workers, and returns the error of ctx. Completed
// operations can be queried until Close and after it.
func (q *Queue) Drain(ctx context.Context) error {
	q.mu.Lock()
	q.draining = true
	q.reclaimSlot()
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
	q.abandonRemoteRuns()
	q.mu.Unlock()
	<-q.empty
	return ctx.Err()
}

// Close cancels queued and running actions, as Drain does, and waits for them and for every goroutine of the queue.
func (q *Queue) Close() {
	ended, cancel := context.WithCancel(context.Background())
	cancel()
	_ = q.Drain(ended) // its error only says that something was cancelled
	q.mu.Lock()
	q.stop()
	q.toPrepare.Broadcast()
	q.toFetch.Broadcast()
	q.slotFree.Broadcast()
	q.mu.Unlock()
	q.wg.Wait()
}

// checkEmpty closes q.empty once a draining queue has no job.
func (q *Queue) checkEmpty() {
	if !q.draining || q.closed() ||
		q.arrived.Waiting()+q.arrived.InService()+len(q.pulling)+q.ready.Waiting()+q.ready.InService() > 0 {
		return
	}
	close(q.empty)
	q.wakeAll()
}

// closed reports whether there is no action and will be none.
func (q *Queue) closed() bool {
	select {
	case <-q.empty:
		return true
	default:
		return false
	}
}

// sweep periodically removes whatever has exceeded its time.
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
	q.dropAbandoned(now)
	q.forgetWorkers(now)
	q.refuseUnmatched(now)
	q.dropExpired(now)
}

// complete ends o, which belongs to no job afterwards.
func (q *Queue) complete(o *Operation, e end) {
	ran, task := o.job.ran, &o.job.req.Task
	o.job = nil
	o.completed = time.Now()
	o.bytes = operationBytes + e.bytes +
		int64(len(o.info.Target)+len(o.info.Mnemonic)+len(o.info.Invocation)+len(o.info.Correlated)+len(o.info.Caller))
	s := o.state // keeps Began, Worker and the names of the logs
	s.Stage, s.Outcome, s.Fault = repb.ExecutionStage_COMPLETED, e.outcome, e.fault
	if e.notify == nil && q.cfg.Ended != nil {
		e.notify = q.cfg.Ended(task, e.outcome, e.fault)
	}
	if e.notify != nil {
		e.notify(o.info, s)
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
	q.retain(o, ran)
}

func fault(k worker.FaultKind, format string, args ...any) *worker.Fault {
	return &worker.Fault{Kind: k, Err: fmt.Errorf(format, args...)}
}

// asFault returns err as a *worker.Fault; any other error is a defect.
func asFault(err error) *worker.Fault {
	if f, ok := errors.AsType[*worker.Fault](err); ok {
		return f
	}
	return &worker.Fault{Kind: worker.FaultInternal, Err: err}
}
