// SPDX-License-Identifier: Apache-2.0

package buildbarn

import (
	"cmp"
	"context"
	"errors"
	"log/slog"
	"math/rand/v2"
	"strings"
	"sync"
	"time"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	remoteworkerpb "github.com/cloister-build/cloister/proto/buildbarn/remoteworker"
	cloisterpb "github.com/cloister-build/cloister/proto/cloister/v1"
	"github.com/cloister-build/cloister/worker"
	"github.com/cloister-build/cloister/worker/queue"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/emptypb"
	"google.golang.org/protobuf/types/known/timestamppb"
)

// ServerConfig configures a Server. Queue and Instances are required; every other zero value selects its default.
type ServerConfig struct {
	Queue *queue.Queue
	// Instances holds the stores from which workers read inputs and to which they write results.
	Instances cas.Instances
	// Action reads an action, which may be shared and is not modified; nil reads it from the store each time.
	Action func(ctx context.Context, in *cas.Instance, action cas.Digest) (*repb.Action, error)
	// Silence is how long a worker may be silent before it is lost; the default is a minute.
	Silence time.Duration
	// Busy is the interval of calls from a worker that executes; the default is ten seconds, or a third of Silence if
	// that is less.
	Busy time.Duration
	// Idle is the longest time that a call waits for an action. Each waits a random fraction of it, so that workers
	// that start together do not call together. The default is two minutes.
	Idle time.Duration
	// Retries is how often an action is sent again to a worker that does not start it; the default is 9.
	Retries int
	// Stall is how long a worker may fetch inputs or upload outputs before its action is taken away; the default is an
	// hour.
	Stall time.Duration
	// Ready, if not nil, returns why no action can be executed now on any worker: none is assigned then. It is called
	// every second, and not after Close.
	Ready func() error
	// Unready is how long an action waits while Ready returns an error; the default is five minutes.
	Unready time.Duration
	// MaxTimeout is sent as the timeout of actions without one. The default is 24 hours.
	MaxTimeout time.Duration
	// Toolchain, if not "", is the fingerprint that the toolchain of every worker must have, which only Clients state.
	Toolchain string
	// Page, if not nil, returns the URL of a page about an action, for the message of its failure, or "".
	Page func(instance string, action cas.Digest) string
	// Caller, if not nil, returns the identity of a caller. A worker_id belongs to the caller that joined with it:
	// others could otherwise use it to take actions of instances they have no right to.
	Caller func(context.Context) string
	// Log receives who joins and leaves; nil discards it.
	Log *slog.Logger
}

// A Server is a scheduler: it serves OperationQueue with the actions of a queue. Use Register; the zero Server is not
// usable.
type Server struct {
	remoteworkerpb.UnimplementedOperationQueueServer
	cfg ServerConfig

	ctx  context.Context // ended by Close
	stop context.CancelFunc
	wg   sync.WaitGroup // calls, assignments and watchReady

	// mu guards the fields below and some of each session. The queue may be called while it is held.
	mu       sync.Mutex
	closed   bool
	sessions map[string]*session // by name

	readiness *readiness // as Ready says
}

// Register adds the service to s, and fails if a required field is missing. The caller closes the Server when s is to
// stop, before the queue.
func Register(s grpc.ServiceRegistrar, c ServerConfig) (*Server, error) {
	switch {
	case c.Queue == nil:
		return nil, errors.New("buildbarn: ServerConfig.Queue is missing")
	case c.Instances == nil:
		return nil, errors.New("buildbarn: ServerConfig.Instances is missing")
	}
	defaults(&c)
	b := &Server{cfg: c, sessions: make(map[string]*session), readiness: newReadiness()}
	b.ctx, b.stop = context.WithCancel(context.Background())
	b.checkReady(time.Time{})
	if c.Ready != nil {
		b.wg.Go(b.watchReady)
	}
	remoteworkerpb.RegisterOperationQueueServer(s, b)
	return b, nil
}

func defaults(c *ServerConfig) {
	c.Silence = positive(c.Silence, time.Minute)
	c.Idle = positive(c.Idle, 2*time.Minute)
	c.Stall = positive(c.Stall, time.Hour)
	c.Unready = positive(c.Unready, 5*time.Minute)
	c.MaxTimeout = positive(c.MaxTimeout, 24*time.Hour)
	c.Busy = positive(c.Busy, min(10*time.Second, c.Silence/3))
	c.Retries = positive(c.Retries, 9)
	c.Log = cmp.Or(c.Log, slog.New(slog.DiscardHandler))
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

// Close ends every waiting call and gives up all workers and their actions. Later calls fail with UNAVAILABLE.
func (s *Server) Close() {
	s.mu.Lock()
	s.closed = true
	s.stop()
	for _, w := range s.sessions {
		if w.call == nil { // else endCall does it
			s.lose(w, "the server is shutting down")
		}
	}
	s.mu.Unlock()
	s.wg.Wait()
}

// watchReady updates s.readiness until Close.
func (s *Server) watchReady() {
	tick := time.NewTicker(readyInterval)
	defer tick.Stop()
	var since time.Time
	for {
		select {
		case <-tick.C:
			since = s.checkReady(since)
		case <-s.ctx.Done():
			return
		}
	}
}

// checkReady calls Ready and acts on the answer. since and the result are when it first failed; zero while it succeeds.
func (s *Server) checkReady(since time.Time) time.Time {
	var err error
	if s.cfg.Ready != nil {
		err = s.cfg.Ready()
	}
	if err == nil {
		if s.readiness.set() && !since.IsZero() {
			s.cfg.Log.Info("workers get actions again")
		}
		return time.Time{}
	}
	if s.readiness.clear(err.Error(), false) && since.IsZero() {
		s.cfg.Log.Warn("workers get no actions", "why", err)
	}
	s.cfg.Queue.Refuse(s.cfg.Unready, "workers get no actions: "+err.Error())
	if since.IsZero() {
		return time.Now()
	}
	return since
}

// Synchronize implements the method.
func (s *Server) Synchronize(
	ctx context.Context, req *remoteworkerpb.SynchronizeRequest,
) (*remoteworkerpb.SynchronizeResponse, error) {
	offer, id, err := parseOffer(req)
	if err != nil {
		return nil, err
	}
	executing, err := parseState(req.CurrentState)
	if err != nil {
		return nil, err
	}
	offer.Ending = executing != nil && executing.GetCompleted() == nil // unless it was assigned here
	unfit := s.checkToolchain(ctx, offer.Worker)
	if unfit != nil && executing == nil {
		return nil, unfit
	}
	preferIdle := req.PreferBeingIdle || unfit != nil
	w, err := s.beginCall(ctx, id, offer)
	if err != nil {
		return nil, err
	}
	defer s.endCall(w)

	a := w.assigned
	if executing == nil || a == nil || !proto.Equal(executing.ActionDigest, a.desired.ActionDigest) {
		if resent := s.resend(w); resent != nil {
			return resent, nil
		}
		if executing != nil && executing.GetCompleted() == nil {
			return s.kill(w), nil
		}
		return s.nextAction(ctx, w, preferIdle)
	}
	if completed := executing.GetCompleted(); completed != nil {
		ran := timesOf(completed)
		if !a.started && ran != (runTimes{}) && ran == w.last {
			// The worker has missed that it is to execute the same action again: this is its earlier answer.
			if resent := s.resend(w); resent != nil {
				return resent, nil
			}
			return s.nextAction(ctx, w, preferIdle)
		}
		a.started = true
		if err := s.complete(ctx, w, a, completed); err != nil {
			return nil, err
		}
		w.last = ran
		w.unassign()
		return s.nextAction(ctx, w, preferIdle)
	}
	a.started = true
	if a.over() {
		w.unassign()
		return s.kill(w), nil
	}
	return s.progress(w, a, stageOf(executing), statedPull(ctx)), nil
}

// checkToolchain returns an error if the caller, of the worker name, does not have the toolchain that workers must
// have. It is the same for all slots, so that the worker logs it once.
func (s *Server) checkToolchain(ctx context.Context, name string) error {
	has, want := strings.Join(metadata.ValueFromIncomingContext(ctx, toolchainKey), ","), s.cfg.Toolchain
	switch {
	case want == "" || has == want:
		return nil
	case has == "":
		return status.Errorf(codes.InvalidArgument,
			"worker %s states no fingerprint of its toolchain, and this server requires %s; use cloister join", name, want)
	}
	return status.Errorf(codes.InvalidArgument, "worker %s has the toolchain %+.80q, and this server requires %s; install that one "+
		"on the worker, or require another one", name, has, want)
}

// progress answers a worker that executes a. pull is what it waits for, or nil.
func (s *Server) progress(
	w *session, a *assignment, stage worker.Stage, pull *cloisterpb.ImagePull,
) *remoteworkerpb.SynchronizeResponse {
	if why, actionFault := a.stuck(stage, s.cfg.Stall); why != "" {
		s.cfg.Log.Warn("action is stuck", "worker", w.offer.Worker, "slot", w.offer.Slot, "action", a.action.String(), "why", why)
		if actionFault {
			a.run.Lost(why)
		} else {
			a.run.GiveBack(why)
		}
		w.unassign()
		return s.kill(w)
	}
	a.run.Report(stage)
	a.showPull(pull)
	next := s.cfg.Busy
	if pull != nil {
		next = min(next, pullInterval)
	}
	return &remoteworkerpb.SynchronizeResponse{NextSynchronizationAt: timestamppb.New(time.Now().Add(next))}
}

// resend returns the assigned action once more for a worker that does something else, or nil if it need not run. A
// worker that has started it and now does something else has lost it; one that never starts it gets it Retries times.
func (s *Server) resend(w *session) *remoteworkerpb.SynchronizeResponse {
	a := w.assigned
	if a == nil {
		return nil
	}
	switch {
	case a.over():
	case a.started:
		s.cfg.Log.Warn("worker has lost an action", "worker", w.offer.Worker, "slot", w.offer.Slot, "action", a.action.String())
		a.run.Lost("the worker had started it and now does something else: it was restarted, or another has its name")
	case a.sent > s.cfg.Retries:
		a.run.End(nil, tooManyAttempts(w, a))
	default:
		return s.send(a)
	}
	w.unassign()
	return nil
}

// nextAction waits a while for an action for the worker.
func (s *Server) nextAction(
	ctx context.Context, w *session, preferIdle bool,
) (*remoteworkerpb.SynchronizeResponse, error) {
	w.slot.SetEnding(false)
	if preferIdle {
		return idle(), nil
	}
	wait, cancel := context.WithTimeout(ctx, 1+rand.N(s.cfg.Idle))
	defer cancel()
	defer context.AfterFunc(s.ctx, cancel)()
	if w.previous != nil {
		select {
		case <-w.previous.released: // ending a run may take a while
			w.previous = nil
		case <-wait.Done():
		}
	}
	for {
		s.readiness.wait(wait, nil)
		ready, unready := context.WithCancel(wait)
		stop := s.readiness.onClear(unready)
		run, err := w.slot.Take(ready)
		stop()
		unready()
		switch {
		case err == nil && refused(ctx):
			run.GiveBack("the worker has lost the right to take it")
			return nil, status.FromContextError(ctx.Err()).Err()
		case err == nil:
		case s.ctx.Err() != nil:
			return nil, errClosed
		case ctx.Err() != nil:
			return nil, status.FromContextError(ctx.Err()).Err()
		case wait.Err() != nil:
			return idle(), nil
		case errors.Is(err, context.Canceled):
			continue // no longer ready
		default:
			return nil, status.Error(codes.Unavailable, err.Error())
		}
		a, err := s.assign(w, run)
		if err == nil {
			w.assigned = a
			return s.send(a), nil
		}
		run.End(nil, err)
	}
}

// refused reports whether the server ended a call for a reason of its own, such as that its caller has lost a right. A
// worker that hangs up calls again, and then gets what it was assigned.
func refused(ctx context.Context) bool {
	return ctx.Err() != nil && !errors.Is(context.Cause(ctx), ctx.Err())
}

// send returns the answer that makes a worker execute a.
func (s *Server) send(a *assignment) *remoteworkerpb.SynchronizeResponse {
	a.sent++
	return &remoteworkerpb.SynchronizeResponse{
		NextSynchronizationAt: timestamppb.New(time.Now().Add(s.cfg.Busy)),
		DesiredState: &remoteworkerpb.DesiredState{
			WorkerState: &remoteworkerpb.DesiredState_Executing_{Executing: a.desired},
		},
	}
}

// kill returns the answer that makes a worker kill its action.
func (s *Server) kill(w *session) *remoteworkerpb.SynchronizeResponse {
	w.slot.SetEnding(true)
	return idle()
}

// idle returns the answer that makes a worker kill its action, if any, and call again.
func idle() *remoteworkerpb.SynchronizeResponse {
	return &remoteworkerpb.SynchronizeResponse{
		NextSynchronizationAt: timestamppb.Now(),
		DesiredState:          &remoteworkerpb.DesiredState{WorkerState: &remoteworkerpb.DesiredState_Idle{Idle: &emptypb.Empty{}}},
	}
}
