// SPDX-License-Identifier: Apache-2.0

package execserver

import (
	"errors"
	"fmt"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/casstatus"
	"github.com/cloister-build/cloister/worker"
	"github.com/cloister-build/cloister/worker/internal/response"
	"github.com/cloister-build/cloister/worker/queue"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
)

// maxInlined bounds the bytes of a result with inlined blobs (rule 124).
const maxInlined = 3 << 20

// response returns the response of o for c.
func (s *server) response(c client, o *queue.Operation, state queue.State) *repb.ExecuteResponse {
	if state.Fault != nil {
		return s.faultResponse(o, state, state.Fault)
	}
	out, remark := state.Outcome, ""
	if s.Remark != nil {
		remark = s.Remark(o.Info().Instance, o.Action())
	}
	r := response.Of(out, remark)
	if c.req != nil && out.Result != nil {
		// Other clients share the outcome and have other hints.
		r.Result = proto.CloneOf(out.Result)
		if err := cas.Inline(c.Context(), c.store, r.Result, cas.Inlining{
			Function: o.Action().Function(),
			Hints:    c.req,
			MaxBytes: maxInlined,
		}); err != nil {
			// Inlining is optional: the client fetches the blob by its digest.
			s.Log.Warn("cannot inline outputs; the client fetches them", "operation", o.Name(), "action", o.Action().String(), "err", err)
		}
	}
	if n := proto.Size(r); n > response.MaxBytes {
		return s.faultResponse(o, state, &worker.Fault{Kind: worker.FaultUnmet, Err: fmt.Errorf(
			"the result lists too many outputs: it takes %d bytes, and clients accept %d; "+
				"declare output directories instead of files", n, response.MaxBytes)})
	}
	return r
}

// faultResponse returns the response of o with f, which names the worker that had the action, and logs defects.
func (s *server) faultResponse(o *queue.Operation, state queue.State, f *worker.Fault) *repb.ExecuteResponse {
	workerName := response.OneLine(state.Worker)
	if code, text := response.FaultText(f); code == codes.Internal {
		attrs := []any{"operation", o.Name(), "action", o.Action().String(), "worker", workerName, "err", text}
		if p, ok := errors.AsType[*queue.Panic](f.Err); ok {
			attrs = append(attrs, "stack", string(p.Stack))
		}
		s.Log.Error("execution failed", attrs...)
	}
	where := fmt.Sprintf("operation %s, action %s", response.OneLine(o.Name()), o.Action())
	switch {
	case workerName != "":
		where = "worker " + workerName + ", " + where
	case s.Worker != "":
		where = "server " + s.Worker + ", " + where
	}
	return response.OfFault(f, where)
}

// refusal returns err as the status of a refused call.
func refusal(err error) error {
	st := status.Convert(casstatus.Error(err))
	return status.Error(st.Code(), response.OneLine(st.Message()))
}
