// SPDX-License-Identifier: Apache-2.0

package execserver

import (
	"context"
	"encoding/base64"
	"encoding/binary"
	"errors"
	"strings"

	"cloud.google.com/go/longrunning/autogen/longrunningpb"
	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/worker"
	"github.com/cloister-build/cloister/worker/internal/requestmetadata"
	"github.com/cloister-build/cloister/worker/internal/response"
	"github.com/cloister-build/cloister/worker/queue"
	statuspb "google.golang.org/genproto/googleapis/rpc/status"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"
	"google.golang.org/protobuf/types/known/emptypb"
)

const (
	// defaultPage and maxPage are the default and the largest page_size.
	defaultPage = 100
	maxPage     = 1000
	// maxPageBytes is the size after which a page ends; another operation without outputs still fits into the message.
	maxPageBytes = 3 << 20
	// batch is the number of operations read while the queue is locked.
	batch = 1000
)

// operations serves google.longrunning.Operations: the operations of Execute, by name or as a list. A client with
// access to an instance may see, cancel and delete all its operations.
type operations struct {
	longrunningpb.UnimplementedOperationsServer
	server *server
}

// unknown returns the status for an unknown operation.
func unknown(name string) error {
	return status.Errorf(codes.NotFound,
		"operation %+.100q is unknown, or ended too long ago; execute the action again", name)
}

// GetOperation returns an operation's present state, with its complete result if it has ended.
func (s *operations) GetOperation(ctx context.Context, req *longrunningpb.GetOperationRequest) (*longrunningpb.Operation, error) {
	o, ok := s.server.Queue.Operation(req.Name)
	if !ok {
		return nil, unknown(req.Name)
	}
	return s.full(o, o.State())
}

// WaitOperation returns an operation when it has ended, or its state after the timeout, if there is one.
func (s *operations) WaitOperation(ctx context.Context, req *longrunningpb.WaitOperationRequest) (*longrunningpb.Operation, error) {
	o, ok := s.server.Queue.Operation(req.Name)
	if !ok {
		return nil, unknown(req.Name)
	}
	limit := ctx
	if req.Timeout != nil {
		if err := req.Timeout.CheckValid(); err != nil {
			return nil, status.Errorf(codes.InvalidArgument, "timeout: %s", response.OneLine(err.Error()))
		}
		var cancel context.CancelFunc
		limit, cancel = context.WithTimeout(ctx, req.Timeout.AsDuration())
		defer cancel()
	}
	leave := o.Follow()
	defer leave(false) // it may ask again
	state, seen, err := o.Wait(limit, 0)
	for err == nil && state.Stage != repb.ExecutionStage_COMPLETED {
		state, seen, err = o.Wait(limit, seen)
	}
	if err := ctx.Err(); err != nil {
		return nil, status.FromContextError(err).Err()
	}
	return s.full(o, state)
}

// CancelOperation ends an operation with CANCELLED, unless it has ended. The run continues if others wait for it.
func (s *operations) CancelOperation(ctx context.Context, req *longrunningpb.CancelOperationRequest) (*emptypb.Empty, error) {
	o, ok := s.server.Queue.Operation(req.Name)
	if !ok {
		return nil, unknown(req.Name)
	}
	by := "a client"
	if id := worker.Sanitize(requestmetadata.Of(ctx).ToolInvocationId); id != "" {
		by = "a client of invocation " + id
	}
	o.Cancel("cancelled by " + by + " (CancelOperation)")
	return &emptypb.Empty{}, nil
}

// DeleteOperation removes an operation that has ended.
func (s *operations) DeleteOperation(ctx context.Context, req *longrunningpb.DeleteOperationRequest) (*emptypb.Empty, error) {
	switch known, completed := s.server.Queue.Forget(req.Name); {
	case !known:
		return nil, unknown(req.Name)
	case !completed:
		return nil, status.Errorf(codes.FailedPrecondition, "operation %+.100q has not ended; cancel it first", req.Name)
	}
	return &emptypb.Empty{}, nil
}

// ListOperations returns the operations of an instance, newest first. The request's name is the instance name or
// {instance/}operations, or - for all instances in which the caller may execute (AIP-159). Results lack outputs and
// auxiliary metadata, which GetOperation returns. parseFilter describes the filter.
func (s *operations) ListOperations(ctx context.Context, req *longrunningpb.ListOperationsRequest) (*longrunningpb.ListOperationsResponse, error) {
	instance := req.Name
	if parent, ok := strings.CutSuffix(instance, "/operations"); ok && parent != "" {
		instance = parent
	} else if instance == "operations" {
		instance = ""
	}
	in := func(name string) bool { return name == instance }
	if instance == "-" {
		in = func(name string) bool { return s.server.mayExecute(ctx, name) }
	} else if _, err := s.server.Instances(instance); err != nil {
		return nil, refusal(err)
	}
	wanted, err := parseFilter(req.Filter)
	if err != nil {
		return nil, status.Errorf(codes.InvalidArgument, "filter: %s", response.OneLine(err.Error()))
	}
	seq, err := parseToken(req.PageToken)
	if err != nil || req.PageSize < 0 {
		return nil, status.Error(codes.InvalidArgument, "page_token is not from this list, or page_size is negative")
	}
	n := defaultPage
	if req.PageSize > 0 {
		n = int(min(req.PageSize, maxPage))
	}
	page := &longrunningpb.ListOperationsResponse{}
	for bytes := 0; ; {
		some, next := s.server.Queue.Older(seq, batch)
		if len(some) == 0 {
			return page, nil
		}
		for _, o := range some {
			state := o.State()
			if !in(o.Info().Instance) || !wanted.matches(o, state) {
				continue
			}
			m, err := s.brief(o, state)
			if err != nil {
				return nil, err
			}
			page.Operations = append(page.Operations, m)
			if bytes += proto.Size(m); len(page.Operations) == n || bytes > maxPageBytes {
				page.NextPageToken = token(o.Seq())
				return page, nil
			}
		}
		if seq = next; ctx.Err() != nil {
			return nil, status.FromContextError(ctx.Err()).Err()
		}
	}
}

// mayExecute reports whether the caller may execute actions in an instance.
func (s *server) mayExecute(ctx context.Context, instance string) bool {
	if s.Rights == nil {
		return true
	}
	execute, _ := s.Rights(ctx, instance)
	return execute
}

// full returns o with its complete result.
func (s *operations) full(o *queue.Operation, state queue.State) (*longrunningpb.Operation, error) {
	m, err := s.server.message(o, state, requester(o)...)
	if err == nil && state.Stage == repb.ExecutionStage_COMPLETED {
		err = respond(m, s.server.response(client{}, o, state))
	}
	return m, err
}

// brief returns o without the parts that may be large.
func (s *operations) brief(o *queue.Operation, state queue.State) (*longrunningpb.Operation, error) {
	m, err := s.server.message(o, state, requester(o)...)
	if err != nil || state.Stage != repb.ExecutionStage_COMPLETED {
		return m, err
	}
	r := &repb.ExecuteResponse{}
	if state.Fault != nil {
		code, text := response.FaultText(state.Fault)
		r.Status = &statuspb.Status{Code: int32(code), Message: text}
	} else {
		out := state.Outcome
		r.CachedResult = out.Cached
		r.Status = &statuspb.Status{Code: int32(response.Code(out.Status))}
		r.Message = response.Lines(out.Message)
		if out.Result != nil {
			r.Result = &repb.ActionResult{ExitCode: out.Result.ExitCode, ExecutionMetadata: times(out.Result.ExecutionMetadata)}
		}
	}
	return m, respond(m, r)
}

// times returns the worker and the timestamps of m.
func times(m *repb.ExecutedActionMetadata) *repb.ExecutedActionMetadata {
	if m == nil {
		return nil
	}
	return &repb.ExecutedActionMetadata{
		Worker:                         m.Worker,
		QueuedTimestamp:                m.QueuedTimestamp,
		WorkerStartTimestamp:           m.WorkerStartTimestamp,
		WorkerCompletedTimestamp:       m.WorkerCompletedTimestamp,
		InputFetchStartTimestamp:       m.InputFetchStartTimestamp,
		InputFetchCompletedTimestamp:   m.InputFetchCompletedTimestamp,
		ExecutionStartTimestamp:        m.ExecutionStartTimestamp,
		ExecutionCompletedTimestamp:    m.ExecutionCompletedTimestamp,
		VirtualExecutionDuration:       m.VirtualExecutionDuration,
		OutputUploadStartTimestamp:     m.OutputUploadStartTimestamp,
		OutputUploadCompletedTimestamp: m.OutputUploadCompletedTimestamp,
	}
}

// requester returns the request metadata of o as auxiliary metadata, as Buildbarn does; the API has no other place for
// it.
func requester(o *queue.Operation) []*anypb.Any {
	i := o.Info()
	if i.Target == "" && i.Mnemonic == "" && i.Invocation == "" {
		return nil
	}
	packed, err := anypb.New(&repb.RequestMetadata{
		ActionId: i.Action.Hash(), TargetId: i.Target, ActionMnemonic: i.Mnemonic, ToolInvocationId: i.Invocation,
	})
	if err != nil {
		panic(err) // only invalid UTF-8 fails to encode, and these texts are printable
	}
	return []*anypb.Any{packed}
}

// token returns the page_token to continue a list after the operation numbered seq.
func token(seq uint64) string {
	return base64.RawURLEncoding.EncodeToString(binary.BigEndian.AppendUint64([]byte(tokenKind), seq))
}

// tokenKind is the prefix of every token.
const tokenKind = "op1"

// parseToken is the inverse of token; "" means the start.
func parseToken(s string) (uint64, error) {
	if s == "" {
		return 0, nil
	}
	b, err := base64.RawURLEncoding.DecodeString(s)
	if err == nil && len(b) == len(tokenKind)+8 {
		if seq := binary.BigEndian.Uint64(b[len(tokenKind):]); token(seq) == s {
			return seq, nil
		}
	}
	return 0, errors.New("not a token from this list")
}
