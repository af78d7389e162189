// SPDX-License-Identifier: Apache-2.0

// Package execserver serves a queue as the Execution service of the Remote Execution API, and its operations as
// google.longrunning.Operations. It neither schedules nor executes: it translates requests for the queue, and states
// and faults into messages.
//
// A failed execution is reported as the status in the ExecuteResponse of a completed operation, so that every client
// that waits for the operation sees it. A call itself fails only if its request never becomes an operation.
package execserver

import (
	"cmp"
	"context"
	"errors"
	"log/slog"
	"math"
	"sync/atomic"
	"time"

	"cloud.google.com/go/longrunning/autogen/longrunningpb"
	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/casstatus"
	"github.com/cloister-build/cloister/cas/tree"
	"github.com/cloister-build/cloister/worker"
	"github.com/cloister-build/cloister/worker/internal/nested"
	"github.com/cloister-build/cloister/worker/internal/requestmetadata"
	"github.com/cloister-build/cloister/worker/internal/response"
	"github.com/cloister-build/cloister/worker/internal/results"
	"github.com/cloister-build/cloister/worker/queue"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"
	"google.golang.org/protobuf/types/known/timestamppb"
)

// Config configures the service. Queue, Instances and Admit are required.
type Config struct {
	Queue     *queue.Queue
	Instances cas.Instances
	// Admit checks a task and its inputs before it takes a slot. It fails with a *worker.Fault. The queue's preparers
	// call it concurrently.
	Admit func(ctx context.Context, t *worker.Task) (worker.Admission, error)
	// Action reads an action, which may be shared and is not modified; nil reads it from the store each time.
	Action func(ctx context.Context, in *cas.Instance, action cas.Digest) (*repb.Action, error)
	// Remark, if not nil, returns a line to add to the message of each result of an action, "" for none.
	Remark func(instance string, action cas.Digest) string
	// Rights, if not nil, reports whether the caller may execute actions in an instance, for lists of the operations of
	// all instances.
	Rights func(ctx context.Context, instance string) (execute, update bool)
	// Caller, if not nil, returns who calls, for the history; "" if that is unknown.
	Caller func(context.Context) string
	// Worker names this server in messages about actions that no worker has had; it may be empty.
	Worker string
	// KeepaliveInterval limits the silence on a stream; the default is 20 seconds. From 20,000 streams on it grows with
	// their number, up to two and a half times: many waiting clients must not keep the server busy.
	KeepaliveInterval time.Duration
	// Log receives defects; nil discards them.
	Log *slog.Logger
}

// Register adds both services to s, and fails if a required field is missing. The caller owns the queue: to shut down,
// it drains the queue, stops s, then closes the queue.
func Register(s grpc.ServiceRegistrar, c Config) error {
	switch {
	case c.Queue == nil:
		return errors.New("execserver: Config.Queue is missing")
	case c.Instances == nil:
		return errors.New("execserver: Config.Instances is missing")
	case c.Admit == nil:
		return errors.New("execserver: Config.Admit is missing: worker.Local has one")
	}
	if c.KeepaliveInterval <= 0 {
		c.KeepaliveInterval = 20 * time.Second
	}
	c.Log = cmp.Or(c.Log, slog.New(slog.DiscardHandler))
	if c.Action == nil {
		c.Action = func(ctx context.Context, in *cas.Instance, action cas.Digest) (*repb.Action, error) {
			a := &repb.Action{}
			return a, cas.ReadProto(ctx, in.Store, action, a)
		}
	}
	if c.Caller == nil {
		c.Caller = func(context.Context) string { return "" }
	}
	c.Worker = response.OneLine(c.Worker)
	srv := &server{Config: c}
	repb.RegisterExecutionServer(s, srv)
	longrunningpb.RegisterOperationsServer(s, &operations{server: srv})
	return nil
}

// Capabilities returns the capabilities of the service; the caller adds the instance's digest functions.
func Capabilities() *repb.ExecutionCapabilities {
	return &repb.ExecutionCapabilities{
		ExecEnabled:             true,
		SupportedNodeProperties: tree.NodeProperties(),
		ExecutionPriorityCapabilities: &repb.PriorityCapabilities{
			Priorities: []*repb.PriorityCapabilities_PriorityRange{
				{MinPriority: math.MinInt32, MaxPriority: math.MaxInt32},
			},
		},
	}
}

type server struct {
	repb.UnimplementedExecutionServer
	Config
	streams atomic.Int64 // those that follow an operation
}

type stream = grpc.ServerStreamingServer[longrunningpb.Operation]

// Execute implements the API method.
func (s *server) Execute(req *repb.ExecuteRequest, to stream) error {
	in, err := s.Instances(req.InstanceName)
	if err != nil {
		return refusal(err)
	}
	fn, err := in.FunctionOf(req.DigestFunction, req.ActionDigest)
	if err != nil {
		return refusal(err)
	}
	action, err := cas.FromProto(fn, req.ActionDigest)
	if err != nil {
		return refusal(err)
	}
	task := worker.Task{Instance: req.InstanceName, Action: action, SkipCacheLookup: req.SkipCacheLookup, Trace: trace(to.Context())}
	task.SetMetadata(requestmetadata.Of(to.Context()))
	caller, invocation := nested.CallerOf(to.Context())
	if task.Caller = caller; caller.Depth > 0 {
		task.Invocation = invocation // an action shares the turns of its build, also of those that state no invocation
	}
	o, err := s.Queue.Submit(queue.Request{
		Task:     task,
		Caller:   s.Caller(to.Context()),
		Priority: req.GetExecutionPolicy().GetPriority(),
		Prepare: func(ctx context.Context, r *queue.Request) (*worker.Outcome, error) {
			return s.prepare(ctx, in, r)
		},
	})
	if err != nil {
		return response.FaultStatus(err).Err()
	}
	// The first message has the first stage of every operation, even if this one has progressed (rule 88).
	return s.follow(client{to, in.Store, req}, o, &queue.State{Stage: repb.ExecutionStage_CACHE_CHECK})
}

// WaitExecution implements the API method. Its request has no hints to inline blobs.
func (s *server) WaitExecution(req *repb.WaitExecutionRequest, to stream) error {
	o, ok := s.Queue.Operation(req.Name)
	if !ok {
		return unknown(req.Name)
	}
	return s.follow(client{stream: to}, o, nil)
}

// prepare does the work that needs no slot: it looks into the action cache and checks the inputs.
func (s *server) prepare(ctx context.Context, in *cas.Instance, r *queue.Request) (*worker.Outcome, error) {
	if !r.Task.SkipCacheLookup {
		result, err := s.lookup(results.State(ctx, r.Task.Target, r.Task.Mnemonic), in, r.Task.Action)
		if err != nil {
			return nil, err
		}
		switch {
		case proto.Size(result) > worker.MaxResult:
			// Another server recorded a result too large for a message. A run replaces it, or explains why not.
			r.Task.SkipCacheLookup = true
		case result != nil:
			return &worker.Outcome{Result: result, Cached: true}, nil
		}
	}
	a, err := s.Admit(ctx, &r.Task)
	r.Alone, r.Terms, r.Demands, r.Pull = a.DoNotMerge, a.MergeKey, a.Demands, a.Pull
	return nil, err
}

// lookup returns the action's cached result, or nil if there is none that may be served (rules 68, 94 and 96).
func (s *server) lookup(ctx context.Context, in *cas.Instance, action cas.Digest) (*repb.ActionResult, error) {
	if a, err := s.Action(ctx, in, action); err != nil || a.DoNotCache {
		return nil, nil // Admit reports the error
	}
	r, err := cas.LookupComplete(ctx, in, action)
	switch {
	case casstatus.Code(err) == codes.NotFound:
		return nil, nil
	case err != nil:
		return nil, &worker.Fault{Kind: worker.FaultUnavailable, Err: err}
	case r.ExitCode != 0:
		return nil, nil
	}
	return r, nil
}

// A client is the other end of a stream and its request.
type client struct {
	stream
	store cas.Store            // of the instance; nil without a request
	req   *repb.ExecuteRequest // nil for WaitExecution
}

// follow sends first, if it is not nil, and then each later state of o, including the last. It repeats the state after
// Config.KeepaliveInterval (rule 91), and during a pull about once a second. A client that hangs up ends only its own
// call (rule 93).
func (s *server) follow(c client, o *queue.Operation, first *queue.State) (err error) {
	s.streams.Add(1)
	defer s.streams.Add(-1)
	leave := o.Follow()
	defer func() { leave(c.cancelled(err)) }()
	var state queue.State
	seen := 0
	if first != nil {
		state, seen = *first, queue.FirstVersion
		if err := s.send(c, o, state); err != nil {
			return err
		}
	}
	for {
		ctx, cancel := context.WithTimeout(c.Context(), s.silence(state))
		var version int
		// An error means that ctx has ended: the client has left, or the state is to be repeated.
		state, version, _ = o.Wait(ctx, seen)
		cancel()
		if err := c.Context().Err(); err != nil {
			return status.FromContextError(err).Err()
		}
		if err := s.send(c, o, state); err != nil || state.Stage == repb.ExecutionStage_COMPLETED {
			return err
		}
		seen = version
	}
}

// silence returns the time after which a stream repeats this state.
func (s *server) silence(state queue.State) time.Duration {
	const (
		few     = 20_000 // streams that repeat at KeepaliveInterval
		longest = 2.5    // times KeepaliveInterval: 50 seconds, as many proxies end a stream after a minute
		rate    = 1000   // messages per second about pulls
	)
	streams := float64(s.streams.Load())
	silence := time.Duration(float64(s.KeepaliveInterval) * min(max(1, streams/few), longest))
	if state.Pulling != nil {
		silence = min(silence, time.Duration(float64(time.Second)*max(1, streams/rate)))
	}
	return silence
}

// cancelled reports whether err, with which a call ends, means that the client has cancelled it, as opposed to a
// connection that broke or a deadline that passed. Behind a proxy it cannot tell: proxies cancel the calls of clients
// that are gone.
func (c client) cancelled(err error) bool {
	if status.Code(err) != codes.Canceled {
		return false
	}
	const skew = time.Second // a client cancels the call itself when its deadline passes, and this may arrive earlier
	if deadline, ok := c.Context().Deadline(); ok && time.Until(deadline) < skew {
		return false
	}
	// gRPC ends the context in both cases, but only on a connection that is still open does a message fail with CANCELLED.
	// If a client cancels and disconnects at once, this is a lost connection, which keeps the action alive for longer.
	return status.Code(c.SendMsg(&longrunningpb.Operation{})) == codes.Canceled
}

// send sends the state of o.
func (s *server) send(c client, o *queue.Operation, state queue.State) error {
	m, err := s.message(o, state)
	if err != nil {
		return err
	}
	if state.Stage == repb.ExecutionStage_COMPLETED {
		if err := respond(m, s.response(c, o, state)); err != nil {
			return err
		}
	}
	return c.Send(m)
}

// message returns o as an operation without its response. The metadata include aux.
func (s *server) message(o *queue.Operation, state queue.State, aux ...*anypb.Any) (*longrunningpb.Operation, error) {
	partial := &repb.ExecutedActionMetadata{
		QueuedTimestamp:   timestamppb.New(o.Info().Queued),
		AuxiliaryMetadata: aux,
	}
	if !state.Began.IsZero() {
		partial.Worker = response.OneLine(state.Worker)
		partial.WorkerStartTimestamp = timestamppb.New(state.Began)
	}
	if state.Pulling != nil {
		if pull := state.Pulling(); pull != nil {
			packed, err := anypb.New(pull)
			if err != nil {
				return nil, err
			}
			partial.AuxiliaryMetadata = append(partial.AuxiliaryMetadata, packed)
		}
	}
	metadata, err := anypb.New(&repb.ExecuteOperationMetadata{
		Stage:                    state.Stage,
		ActionDigest:             o.Action().Proto(),
		DigestFunction:           o.Action().Function().Proto(),
		StdoutStreamName:         state.Stdout,
		StderrStreamName:         state.Stderr,
		PartialExecutionMetadata: partial,
	})
	if err != nil {
		return nil, err
	}
	return &longrunningpb.Operation{Name: o.Name(), Metadata: metadata}, nil
}

// respond completes m with r.
func respond(m *longrunningpb.Operation, r *repb.ExecuteResponse) error {
	packed, err := anypb.New(r)
	if err != nil {
		return status.Errorf(codes.Internal, "encode the result of operation %+q: %v", m.Name, err)
	}
	m.Done = true
	m.Result = &longrunningpb.Operation_Response{Response: packed}
	return nil
}
