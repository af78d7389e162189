// SPDX-License-Identifier: Apache-2.0

package buildbarn

import (
	"context"
	"errors"
	"fmt"
	"strings"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	remoteworkerpb "github.com/cloister-build/cloister/proto/buildbarn/remoteworker"
	"github.com/cloister-build/cloister/worker"
	"github.com/cloister-build/cloister/worker/queue"
	"github.com/cloister-build/cloister/worker/response"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"
)

// assign makes of a run what a worker is told of it. It fails with a *worker.Fault, and then the run still needs its end.
func (s *Server) assign(w *session, run *queue.Run) (*assignment, error) {
	t := run.Task()
	in, err := s.Instances(t.Instance)
	if err != nil {
		return nil, &worker.Fault{Kind: worker.Unavailable, Err: err}
	}
	action, err := s.Action(s.ctx, in, t.Action)
	switch {
	case errors.Is(err, cas.ErrNotFound):
		return nil, &worker.Fault{Kind: worker.Missing, Err: err, Blobs: []cas.Digest{t.Action}}
	case err != nil:
		return nil, &worker.Fault{Kind: worker.Unavailable, Err: fmt.Errorf("read the action for worker %s: %w", w.name, err)}
	}
	if action.Timeout.AsDuration() <= 0 {
		action = proto.CloneOf(action)
		action.Timeout = durationpb.New(s.MaxTimeout)
	}
	aux, err := auxiliary(&t)
	if err != nil {
		return nil, &worker.Fault{Kind: worker.Internal, Err: err}
	}
	a := &assignment{
		run: run, in: in, action: t.Action, over: make(chan struct{}),
		desired: &remoteworkerpb.DesiredState_Executing{
			ActionDigest:       t.Action.Proto(),
			Action:             action,
			QueuedTimestamp:    timestamppb.New(t.Queued),
			AuxiliaryMetadata:  aux,
			InstanceNameSuffix: strings.TrimPrefix(strings.TrimPrefix(t.Instance, w.offer.Prefix), "/"),
			W3CTraceContext:    t.Trace,
			DigestFunction:     t.Action.Function().Proto(),
		},
	}
	if n := proto.Size(a.desired); n > response.MaxBytes {
		return nil, &worker.Fault{Kind: worker.Invalid, Err: fmt.Errorf(
			"what a worker is told of the action takes %d bytes, of the %d that a worker accepts: shorten its platform properties or its salt", n, response.MaxBytes)}
	}
	s.wg.Go(func() {
		defer close(a.over)
		<-run.Cancelled()
		// If it is not over, nobody waits any more, and whoever did knows why. The worker is told when it calls the next time.
		run.End(nil, &worker.Fault{Kind: worker.Cancelled, Err: errors.New("nobody waits for the action any more")})
	})
	return a, nil
}

// auxiliary returns what belongs into the metadata of a result: what the client said of itself, as Buildbarn has it, and
// what else the task has.
func auxiliary(t *worker.Task) ([]*anypb.Any, error) {
	who, err := anypb.New(&repb.RequestMetadata{
		ActionId: t.Action.Hash(), ActionMnemonic: t.Mnemonic, TargetId: t.Target,
		ToolInvocationId: t.Invocation, CorrelatedInvocationsId: t.Correlated,
	})
	if err != nil {
		return nil, err
	}
	return append([]*anypb.Any{who}, t.Auxiliary...), nil
}

// complete ends an assignment with what the worker says became of it. It fails only if the worker has gone meanwhile,
// which will say so once more.
func (s *Server) complete(ctx context.Context, w *session, a *assignment, r *repb.ExecuteResponse) error {
	if a.ended() {
		return nil // nobody wants it any more
	}
	out, f := response.Parse(r, a.action.Function())
	if f == nil {
		f = s.check(ctx, w, a, out)
	}
	if err := ctx.Err(); err != nil {
		return status.FromContextError(err).Err()
	}
	switch {
	case f == nil:
		a.run.End(out, nil)
	case response.IsStopped(r), f.Kind == worker.Cancelled:
		// It is for us to cancel, and nobody did: the worker shuts down, and could not wait for the action.
		a.run.GiveBack("it gave the action up: " + f.Error())
	default:
		a.run.End(nil, f)
	}
	return nil
}

// check holds a result against what clients rely on: it is well formed, fits into a message, names no path outside (rule
// 66), and all that it names is in the store (rule 119).
func (s *Server) check(ctx context.Context, w *session, a *assignment, out *worker.Outcome) *worker.Fault {
	refuse := func(k worker.Kind, format string, args ...any) *worker.Fault {
		why := fmt.Errorf(format, args...)
		s.Log.Warn("the result of a worker is not used", "worker", w.offer.Worker, "slot", w.offer.Slot, "action", a.action.String(), "err", why)
		return &worker.Fault{Kind: k, Err: fmt.Errorf("the result of worker %s is not used: %w", w.name, why)}
	}
	if n := proto.Size(out.Result); n > worker.MaxResult {
		return refuse(worker.Internal, "it takes %d bytes, more than the %d of a message", n, worker.MaxResult)
	}
	if err := errors.Join(cas.CheckOutputs(out.Result), cas.CheckInlined(a.action.Function(), out.Result)); err != nil {
		return refuse(worker.Internal, "%w", err)
	}
	blobs, err := cas.Closure(ctx, a.in.Store, a.action.Function(), out.Result)
	switch {
	case errors.Is(err, cas.ErrInvalid):
		return refuse(worker.Internal, "%w", err)
	case err != nil:
		return refuse(worker.Unavailable, "%w", err)
	}
	if !out.AuditLog.IsZero() {
		blobs = append(blobs, out.AuditLog)
	}
	missing, err := a.in.Store.Missing(ctx, blobs)
	switch {
	case err != nil:
		return refuse(worker.Unavailable, "%w", err)
	case len(missing) > 0:
		return refuse(worker.Unavailable, "%d of the %d blobs that it names are absent, first %s", len(missing), len(blobs), missing[0])
	}
	return nil
}
