// SPDX-License-Identifier: Apache-2.0

package buildbarn

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	remoteworkerpb "github.com/cloister-build/cloister/proto/buildbarn/remoteworker"
	"github.com/cloister-build/cloister/worker"
	"github.com/cloister-build/cloister/worker/queue"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/emptypb"
	"google.golang.org/protobuf/types/known/timestamppb"
)

// ServerConfig configures a Server. Queue and Instances are required; every other zero value means its default.
type ServerConfig struct {
	Queue *queue.Queue
	// Instances are where workers read inputs and write results: what a result names must be there.
	Instances cas.Instances
	// Action reads an action, which may be shared and is not changed; nil reads it from the store each time.
	Action func(ctx context.Context, in *cas.Instance, action cas.Digest) (*repb.Action, error)
	// Silence is how long a worker may not be heard of before it is lost; the default is a minute.
	Silence time.Duration
	// Busy is when a worker that executes is to be heard of again; the default is ten seconds, or a third of Silence
	// if that is less.
	Busy time.Duration
	// Idle is the longest time for which a call waits for an action: each a random part of it, so that those that began
	// together do not come back together. The default is two minutes.
	Idle time.Duration
	// Retries is how often an action is handed once more to a worker that does not say that it executes it; the
	// default is 9.
	Retries int
	// Stall is how long a worker may say that it fetches the inputs of an action, or stores its outputs, before it is believed no
	// more; the default is an hour.
	Stall time.Duration
	// Ready, if not nil, says why no action can be executed now, whichever worker has it: none is handed out then. It is asked
	// every second, and not after Close.
	Ready func() error
	// Unready is how long an action waits while Ready has an error; the default is five minutes.
	Unready time.Duration
	// MaxTimeout is the timeout of an action that states none: workers are always told one. The default is 24 hours.
	MaxTimeout time.Duration
	// Caller, if not nil, names who calls. What one caller joined is no other's: he could take actions away from a worker
	// of instances that he has no right in, by its worker_id.
	Caller func(context.Context) string
	// Log is told who joins and who is lost; nil discards that.
	Log *slog.Logger
}

// maxWorkers is how many workers, each with one slot, there may be at once.
const maxWorkers = 20_000

// A Server is a scheduler toward workers: it serves OperationQueue, for those that ask, with the actions of a queue.
type Server struct {
	remoteworkerpb.UnimplementedOperationQueueServer
	ServerConfig

	ctx  context.Context // ended by Close
	stop context.CancelFunc
	wg   sync.WaitGroup // calls, and who waits for cancellations

	mu     sync.Mutex // guards what follows, and what a session says is guarded by it; a call of the queue may be made with it
	closed bool
	joined map[string]*session // by name

	gate *gate // shut while Ready has an error
}

// Register adds the service to s. The caller calls Close of what it returns when s is to stop, before the queue is closed.
func Register(s grpc.ServiceRegistrar, c ServerConfig) *Server {
	defaults(&c)
	b := &Server{ServerConfig: c, joined: make(map[string]*session), gate: newGate("not asked yet")}
	b.ctx, b.stop = context.WithCancel(context.Background())
	b.ask(time.Time{})
	if c.Ready != nil {
		b.wg.Go(b.watch)
	}
	remoteworkerpb.RegisterOperationQueueServer(s, b)
	return b
}

func defaults(c *ServerConfig) {
	c.Silence = positive(c.Silence, time.Minute)
	c.Idle = positive(c.Idle, 2*time.Minute)
	c.Stall = positive(c.Stall, time.Hour)
	c.Unready = positive(c.Unready, 5*time.Minute)
	c.MaxTimeout = positive(c.MaxTimeout, 24*time.Hour)
	c.Busy = positive(c.Busy, min(10*time.Second, c.Silence/3))
	c.Retries = positive(c.Retries, 9)
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	if c.Action == nil {
		c.Action = func(ctx context.Context, in *cas.Instance, action cas.Digest) (*repb.Action, error) {
			a := &repb.Action{}
			return a, cas.ReadProto(ctx, in.Store, action, a)
		}
	}
}

func positive[T int | time.Duration](v, otherwise T) T {
	if v > 0 {
		return v
	}
	return otherwise
}

// Close ends every call that waits, and gives up all workers: what they execute is lost. Calls are UNAVAILABLE from then
// on.
func (s *Server) Close() {
	s.mu.Lock()
	s.closed = true
	s.stop()
	s.mu.Unlock()
	s.mu.Lock()
	for _, w := range s.joined {
		if w.call == nil { // else its call ends, and it with that
			s.lose(w, "the server is shutting down")
		}
	}
	s.mu.Unlock()
	s.wg.Wait()
}

// watch asks Ready until Close.
func (s *Server) watch() {
	tick := time.NewTicker(readyEvery)
	defer tick.Stop()
	var since time.Time
	for {
		select {
		case <-tick.C:
			since = s.ask(since)
		case <-s.ctx.Done():
			return
		}
	}
}

// ask asks Ready once, and does what follows. Since, and what it returns, is when actions could not be executed any more, zero
// while they can.
func (s *Server) ask(since time.Time) time.Time {
	var err error
	if s.Ready != nil {
		err = s.Ready()
	}
	if err == nil {
		if s.gate.open() && !since.IsZero() {
			s.Log.Info("actions are handed out to workers again")
		}
		return time.Time{}
	}
	if s.gate.shut(err.Error(), false) && since.IsZero() {
		s.Log.Warn("no action is handed out to workers", "why", err)
	}
	s.Queue.Refuse(s.Unready, "no action is handed out to workers: "+err.Error())
	if since.IsZero() {
		return time.Now()
	}
	return since
}

// A session is a worker as far as it has one worker_id: a slot.
type session struct {
	sender
	owner string // who has joined it, as Caller says
	offer queue.Offer
	slot  *queue.Slot

	call    *call       // guarded by Server.mu; the one that is being answered, or nil
	calls   uint64      // guarded by Server.mu; how many there were
	silence *time.Timer // guarded by Server.mu; while there is no call
	heard   time.Time   // guarded by Server.mu; when the last call ended

	// assigned is what it is to execute, or nil, before the one before it, and last the run of its last answer. They belong
	// to the call that is being answered, and between calls to whoever has Server.mu.
	assigned, before *assignment
	last             stamp
}

// dismiss says that the worker is not to execute what it was to execute any more.
func (w *session) dismiss() { w.assigned, w.before = nil, w.assigned }

// A call is one of a worker.
type call struct {
	ctx  context.Context // ends with the client's interest
	over chan struct{}   // closed when it is answered
}

// An assignment is an action that a worker is to execute.
type assignment struct {
	run     *queue.Run
	in      *cas.Instance
	action  cas.Digest
	desired *remoteworkerpb.DesiredState_Executing
	handed  int           // how often
	begun   bool          // the worker has said that it executes it
	over    chan struct{} // closed once the run has its end, and the slot is free
	stage   worker.Stage  // that the worker has said last
	since   time.Time     // when it said so first; zero while it has said nothing
}

// stuck returns why the worker is not believed any more that it gets on with a, or "", and whether that may be a's fault. A
// timeout is the worker's affair, and some do not count what a command waits for; but one that cannot end a command, as where it
// hangs in a dead file system, says for ever that it runs, and one whose store hangs that it fetches or uploads.
func (a *assignment) stuck(stage worker.Stage, stall time.Duration) (why string, its bool) {
	if a.since.IsZero() || a.stage != stage {
		a.stage, a.since = stage, time.Now()
	}
	lasts := time.Since(a.since)
	if stage != worker.Run {
		if lasts < stall {
			return "", false
		}
		does := "fetching"
		if stage > worker.Run {
			does = "uploading"
		}
		return fmt.Sprintf("it says that it has been %s for %v", does, lasts.Round(time.Second)), false
	}
	timeout := a.desired.Action.Timeout.AsDuration()
	// A timeout may be the longest of all durations, to which nothing can be added.
	if lasts-overdue > timeout && lasts-overdue-timeout > timeout {
		return fmt.Sprintf("it says that the command has run for %v, of a timeout of %v", lasts.Round(time.Second), timeout), true
	}
	return "", false
}

// overdue is how long after twice its timeout a command is taken for one that its worker cannot end.
const overdue = 10 * time.Minute

// ended reports whether the run is over, or nobody waits for it: whether the action is not wanted from this worker any
// more.
func (a *assignment) ended() bool {
	select {
	case <-a.run.Cancelled():
		return true
	default:
		return false
	}
}

// Synchronize implements the method.
func (s *Server) Synchronize(ctx context.Context, req *remoteworkerpb.SynchronizeRequest) (*remoteworkerpb.SynchronizeResponse, error) {
	offer, who, err := parseOffer(req)
	if err != nil {
		return nil, err
	}
	executing, err := parseState(req.CurrentState)
	if err != nil {
		return nil, err
	}
	offer.Ending = executing != nil && executing.GetCompleted() == nil // unless it is what it was given here
	w, err := s.enter(ctx, who, offer)
	if err != nil {
		return nil, err
	}
	defer s.leave(w)

	a := w.assigned
	if executing == nil || a == nil || !proto.Equal(executing.ActionDigest, a.desired.ActionDigest) {
		if again := s.again(w); again != nil {
			return again, nil
		}
		if executing != nil && executing.GetCompleted() == nil {
			w.slot.SetEnding(true)
			return idle(), nil // it calls again once it has killed that
		}
		return s.next(ctx, w, req.PreferBeingIdle)
	}
	if completed := executing.GetCompleted(); completed != nil {
		ran := stampOf(completed)
		if !a.begun && ran != (stamp{}) && ran == w.last {
			// It was told to execute the same action once more, and has not heard it: this is the answer of before.
			if again := s.again(w); again != nil {
				return again, nil
			}
			return s.next(ctx, w, req.PreferBeingIdle)
		}
		a.begun = true
		if err := s.complete(ctx, w, a, completed); err != nil {
			return nil, err
		}
		w.last = ran
		w.dismiss()
		return s.next(ctx, w, req.PreferBeingIdle)
	}
	a.begun = true
	if a.ended() {
		w.dismiss()
		w.slot.SetEnding(true)
		return idle(), nil
	}
	stage := stageOf(executing)
	if why, its := a.stuck(stage, s.Stall); why != "" {
		s.Log.Warn("worker cannot end an action", "worker", w.offer.Worker, "slot", w.offer.Slot, "action", a.action.String(), "why", why)
		if its {
			a.run.Lost(why)
		} else {
			a.run.GiveBack(why)
		}
		w.dismiss()
		w.slot.SetEnding(true)
		return idle(), nil
	}
	a.run.Report(stage)
	return &remoteworkerpb.SynchronizeResponse{NextSynchronizationAt: timestamppb.New(time.Now().Add(s.Busy))}, nil
}

// enter returns the session of a worker, for a call: a new one if it was not heard of lately.
func (s *Server) enter(ctx context.Context, who sender, o queue.Offer) (*session, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	w := s.joined[who.name]
	for w != nil && w.call != nil && w.call.ctx.Err() != nil {
		// The worker has given that call up, to make this one. It is over in a moment.
		over := w.call.over
		s.mu.Unlock()
		select {
		case <-over:
		case <-ctx.Done():
		}
		s.mu.Lock()
		if err := ctx.Err(); err != nil {
			return nil, status.FromContextError(err).Err()
		}
		w = s.joined[who.name]
	}
	owner := ""
	if s.Caller != nil {
		owner = s.Caller(ctx)
	}
	switch {
	case s.closed:
		return nil, errClosed
	case ctx.Err() != nil:
		// What it says is of the past: the worker may have made the next call already, and do something else by now.
		return nil, status.FromContextError(ctx.Err()).Err()
	case w != nil && w.owner != owner:
		return nil, status.Errorf(codes.PermissionDenied, "worker ID %s is another caller's than %s until it was not heard of for %v; each slot of each machine needs an ID of its own",
			who.name, owner, s.Silence)
	case w != nil && w.store != who.store:
		// Of two processes that are there the first stays. One that has neither an action nor a call, for longer than lies
		// between two, may have ended, and has nothing to lose: it is told if it comes back.
		if why := w.there(min(between, s.Silence)); why != "" {
			return nil, status.Errorf(codes.FailedPrecondition, "another process, with another store, is worker %s: %s; give each worker a name of its own with --name. "+
				"If that one has ended, its name is free once it was not heard of for %v", who.name, why, s.Silence)
		}
		s.lose(w, "another process has joined by its name")
		w = nil
	case w != nil && w.call != nil:
		return nil, status.Errorf(codes.ResourceExhausted, "A worker with the same worker ID is already synchronizing: %s; each slot of each machine needs an ID of its own", who.name)
	case w != nil && !equal(w.offer, o):
		s.lose(w, "it has joined again with other properties")
		w = nil
	}
	if w == nil {
		if len(s.joined) >= maxWorkers {
			return nil, status.Errorf(codes.ResourceExhausted, "%d workers have joined, which is the limit", len(s.joined))
		}
		slot, err := s.Queue.Join(o)
		switch {
		case errors.Is(err, queue.ErrClosed):
			return nil, errClosed // soon: there is no action any more
		case err != nil:
			return nil, status.Errorf(codes.FailedPrecondition, "worker %s cannot join: %v", who.name, err)
		}
		w = &session{sender: who, owner: owner, offer: o, slot: slot}
		s.joined[w.name] = w
		s.Log.Info("worker has joined", "worker", o.Worker, "slot", o.Slot, "instances", o.Prefix+"*", "properties", fmt.Sprint(o.Properties))
	}
	if w.silence != nil {
		w.silence.Stop()
	}
	w.call = &call{ctx, make(chan struct{})}
	w.calls++
	s.wg.Add(1)
	return w, nil
}

// between is how long a worker without an action may take from one call to the next: those of ours ten seconds (later), of
// Buildbarn's less.
const between = 15 * time.Second

// there says by what one knows that the worker is there, or may be, "" if it has no action and has not called for so long, with
// Server.mu held.
func (w *session) there(silent time.Duration) string {
	switch {
	case w.call != nil: // to which what is assigned belongs
		return "it calls, or waits for an action, at this moment"
	case w.assigned != nil && !w.assigned.ended():
		return fmt.Sprintf("it has an action, and was heard of %v ago", time.Since(w.heard).Round(time.Second))
	case time.Since(w.heard) < silent:
		return fmt.Sprintf("it was heard of %v ago", time.Since(w.heard).Round(time.Second))
	}
	return ""
}

// errClosed ends calls because the server goes away.
var errClosed = status.Error(codes.Unavailable, "the server is shutting down: call again, it or its successor has actions")

// leave ends the call of a worker, and waits for the next.
func (s *Server) leave(w *session) {
	defer s.wg.Done()
	s.mu.Lock()
	defer s.mu.Unlock()
	close(w.call.over)
	w.call, w.heard = nil, time.Now()
	if s.closed {
		s.lose(w, "the server is shutting down")
		return
	}
	calls := w.calls
	w.silence = time.AfterFunc(s.Silence, func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		if w.calls == calls && s.joined[w.name] == w {
			s.lose(w, fmt.Sprintf("it was not heard of for %v", s.Silence))
		}
	})
}

// lose gives up a worker of which no call is being answered, with mu held.
func (s *Server) lose(w *session, why string) {
	delete(s.joined, w.name)
	if w.silence != nil {
		w.silence.Stop()
	}
	level, attrs := slog.LevelInfo, []any{"worker", w.offer.Worker, "slot", w.offer.Slot, "why", why}
	if a := w.assigned; a != nil && !a.ended() {
		level, attrs = slog.LevelWarn, append(attrs, "action", a.action.String())
	}
	w.slot.Leave(why)
	s.Log.Log(context.Background(), level, "worker has left", attrs...)
}

// again hands a worker that does something else the action that it is to execute once more, or returns nil if there is
// none, or none any more. A worker that has once said that it executes it, and now does something else, has lost it; one
// that never says so gets it again only so often.
func (s *Server) again(w *session) *remoteworkerpb.SynchronizeResponse {
	a := w.assigned
	if a == nil {
		return nil
	}
	switch {
	case a.ended():
	case a.begun:
		s.Log.Warn("worker has lost an action", "worker", w.offer.Worker, "slot", w.offer.Slot, "action", a.action.String())
		a.run.Lost("it had begun, and does something else now: it was started again, or another has its name")
	case a.handed > s.Retries:
		a.run.End(nil, &worker.Fault{Kind: worker.Internal, Err: fmt.Errorf(
			"Attempted to execute task %d times, but it never completed. This task may cause worker %s to crash.", a.handed, w.name)})
	default:
		return s.hand(a)
	}
	w.dismiss()
	return nil
}

// next waits for an action for the worker, for a while.
func (s *Server) next(ctx context.Context, w *session, preferIdle bool) (*remoteworkerpb.SynchronizeResponse, error) {
	w.slot.SetEnding(false) // whether it gets another action or not
	if preferIdle {
		return idle(), nil
	}
	wait, cancel := context.WithTimeout(ctx, 1+rand.N(s.Idle))
	defer cancel()
	defer context.AfterFunc(s.ctx, cancel)()
	if w.before != nil {
		select {
		case <-w.before.over: // what its end is told to may take a while
			w.before = nil
		case <-wait.Done():
		}
	}
	for {
		s.gate.wait(wait, nil)
		open, shut := context.WithCancel(wait)
		stop := s.gate.onShut(shut)
		run, err := w.slot.Take(open)
		stop()
		shut()
		switch {
		case err == nil:
		case s.ctx.Err() != nil:
			return nil, errClosed
		case ctx.Err() != nil:
			return nil, status.FromContextError(ctx.Err()).Err()
		case wait.Err() != nil:
			return idle(), nil
		case errors.Is(err, context.Canceled):
			continue // the gate has been shut
		default:
			return nil, status.Error(codes.Unavailable, err.Error())
		}
		a, err := s.assign(w, run)
		if err == nil {
			w.assigned = a
			return s.hand(a), nil
		}
		run.End(nil, err)
	}
}

// hand returns what tells a worker to execute a.
func (s *Server) hand(a *assignment) *remoteworkerpb.SynchronizeResponse {
	a.handed++
	return &remoteworkerpb.SynchronizeResponse{
		NextSynchronizationAt: timestamppb.New(time.Now().Add(s.Busy)),
		DesiredState:          &remoteworkerpb.DesiredState{WorkerState: &remoteworkerpb.DesiredState_Executing_{Executing: a.desired}},
	}
}

// idle returns what tells a worker to end what it does, if it does anything, and to call again.
func idle() *remoteworkerpb.SynchronizeResponse {
	return &remoteworkerpb.SynchronizeResponse{
		NextSynchronizationAt: timestamppb.Now(),
		DesiredState:          &remoteworkerpb.DesiredState{WorkerState: &remoteworkerpb.DesiredState_Idle{Idle: &emptypb.Empty{}}},
	}
}

// stageOf returns how far a worker has come.
func stageOf(e *remoteworkerpb.CurrentState_Executing) worker.Stage {
	switch e.ExecutionState.(type) {
	case *remoteworkerpb.CurrentState_Executing_FetchingInputs:
		return worker.StageInputs
	case *remoteworkerpb.CurrentState_Executing_Running:
		return worker.Run
	case *remoteworkerpb.CurrentState_Executing_UploadingOutputs:
		return worker.Collect
	}
	return worker.Fetch
}

// A stamp is when an action was executed, by the worker's clock: no two executions of a slot have the same. It is zero of
// an answer that does not say.
type stamp struct{ begin, start, completed, end int64 }

func stampOf(r *repb.ExecuteResponse) stamp {
	m := r.GetResult().GetExecutionMetadata()
	at := func(t *timestamppb.Timestamp) int64 {
		if t == nil {
			return 0
		}
		return t.AsTime().UnixNano()
	}
	return stamp{at(m.GetWorkerStartTimestamp()), at(m.GetExecutionStartTimestamp()), at(m.GetExecutionCompletedTimestamp()), at(m.GetWorkerCompletedTimestamp())}
}

// equal reports whether two offers are the same.
func equal(a, b queue.Offer) bool {
	return a.Worker == b.Worker && a.Slot == b.Slot && a.Prefix == b.Prefix && slices.Equal(a.Properties, b.Properties)
}
