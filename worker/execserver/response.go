// SPDX-License-Identifier: Apache-2.0

package execserver

import (
	"errors"
	"fmt"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/worker"
	"github.com/cloister-build/cloister/worker/queue"
	"github.com/cloister-build/cloister/worker/response"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
)

// maxInlined is the size, in bytes, up to which a result may grow by inlining (rule 124).
const maxInlined = 3 << 20

// response returns the end of o, as c is to see it.
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
		// The outcome is shared with other clients, which have hints of their own.
		r.Result = proto.CloneOf(out.Result)
		if err := cas.Inline(c.Context(), c.store, r.Result, cas.Inlining{
			Function: o.Action().Function(),
			Hints:    c.req,
			MaxBytes: maxInlined,
		}); err != nil {
			// A hint is no promise: the client finds the blob by its digest, or its absence.
			s.Log.Warn("inline outputs", "operation", o.Name(), "action", o.Action().String(), "err", err)
		}
	}
	if n := proto.Size(r); n > response.MaxBytes {
		return s.faultResponse(o, state, &worker.Fault{Kind: worker.Unmet, Err: fmt.Errorf(
			"the result lists so many outputs that it takes %d bytes, of the %d that a client accepts; "+
				"declare directories instead of the files in them", n, response.MaxBytes)})
	}
	return r
}

// faultResponse returns the end of o by f, and tells the log of a defect. It names the worker that had the action.
func (s *server) faultResponse(o *queue.Operation, state queue.State, f *worker.Fault) *repb.ExecuteResponse {
	had := response.OneLine(state.Worker)
	if code, text := response.FaultText(f); code == codes.Internal {
		attrs := []any{"operation", o.Name(), "action", o.Action().String(), "worker", had, "err", text}
		if p, ok := errors.AsType[*queue.Panic](f.Err); ok {
			attrs = append(attrs, "stack", string(p.Stack))
		}
		s.Log.Error("execution failed", attrs...)
	}
	where := fmt.Sprintf("operation %s, action %s", response.OneLine(o.Name()), o.Action())
	switch {
	case had != "":
		where = "worker " + had + ", " + where
	case s.Worker != "":
		where = "server " + s.Worker + ", " + where
	}
	return response.OfFault(f, where)
}

// refusal returns err as the status with which a call fails at once.
func refusal(err error) error {
	st := status.Convert(cas.Status(err))
	return status.Error(st.Code(), response.OneLine(st.Message()))
}
