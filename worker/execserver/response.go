// SPDX-License-Identifier: Apache-2.0

package execserver

import (
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"
	"unicode"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/worker"
	"github.com/cloister-build/cloister/worker/queue"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	statuspb "google.golang.org/genproto/googleapis/rpc/status"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/protoadapt"
	"google.golang.org/protobuf/types/known/durationpb"
)

const (
	// maxResponse is the largest ExecuteResponse, in bytes: what every gRPC client accepts, less room
	// for the Operation around it.
	maxResponse = 4<<20 - 64<<10
	// maxInlined is the size, in bytes, up to which a result may grow by inlining (rule 124).
	maxInlined = 3 << 20
	// maxText bounds, in bytes, what is quoted of an error or of one line of an outcome's message.
	maxText = 2000
	// maxLines is how many lines there are at most of an outcome's message, with how to reproduce it.
	maxLines = worker.MaxMessage + 1
	// retryDelay is what a client is asked to wait when there is no room.
	retryDelay = 5 * time.Second
)

// response returns the end of o, as c is to see it.
func (s *server) response(c client, o *queue.Operation, state queue.State) *repb.ExecuteResponse {
	if state.Fault != nil {
		return s.faultResponse(o, state.Fault)
	}
	out := state.Outcome
	text := out.Message
	if out.Reproduce != "" {
		text += "\ncloister: reproduce: " + out.Reproduce
	}
	text = lines(text)
	if s.Remark != nil {
		text = strings.TrimPrefix(text+remarkLine(s.Remark(o.Info().Instance, o.Action())), "\n")
	}
	r := &repb.ExecuteResponse{
		Result:       out.Result,
		CachedResult: out.Cached,
		Status:       &statuspb.Status{Code: int32(out.Code)},
		Message:      text,
	}
	if out.Code != codes.OK {
		r.Status.Message = text
	}
	if !out.AuditLog.IsZero() {
		r.ServerLogs = map[string]*repb.LogFile{worker.AuditLog: {Digest: out.AuditLog.Proto(), HumanReadable: true}}
	}
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
	if n := proto.Size(r); n > maxResponse {
		return s.faultResponse(o, &worker.Fault{Kind: worker.Unmet, Err: fmt.Errorf(
			"the result lists so many outputs that it takes %d bytes, of the %d that a client accepts; "+
				"declare directories instead of the files in them", n, maxResponse)})
	}
	return r
}

// remarkLine returns what is known of an action as one more line.
func remarkLine(remark string) string {
	if remark == "" {
		return ""
	}
	return "\ncloister: " + oneLine(remark)
}

// faultResponse returns the end of o by f. It has no result, so that no client takes a failure of
// ours for one of the action (rule 110).
func (s *server) faultResponse(o *queue.Operation, f *worker.Fault) *repb.ExecuteResponse {
	st := faultStatus(f)
	if st.Code() == codes.Internal {
		attrs := []any{"operation", o.Name(), "action", o.Action().String(), "err", st.Message()}
		if p, ok := errors.AsType[*queue.Panic](f.Err); ok {
			attrs = append(attrs, "stack", string(p.Stack))
		}
		s.Log.Error("execution failed", attrs...)
	}
	where := fmt.Sprintf("operation %s, action %s", oneLine(o.Name()), o.Action())
	if s.Worker != "" {
		where = "worker " + s.Worker + ", " + where
	}
	return &repb.ExecuteResponse{
		Status:  st.Proto(),
		Message: fmt.Sprintf("%s: %s (%s)", st.Code(), st.Message(), where),
	}
}

// faultStatus returns err, which should be a *worker.Fault, as a status of the API.
func faultStatus(err error) *status.Status {
	f, ok := errors.AsType[*worker.Fault](err)
	if !ok {
		f = &worker.Fault{Kind: worker.Internal, Err: err}
	}
	code, text := faultText(f)
	switch f.Kind {
	case worker.Missing:
		detail := missing(f.Blobs)
		if n := len(detail.Violations); n < len(f.Blobs) || n == queue.MaxBlobs {
			text += fmt.Sprintf(" (the first %d are listed; upload them and ask again for the others)", n)
		}
		return detailed(code, text, detail)
	case worker.Exhausted:
		return detailed(code, text, &errdetails.RetryInfo{RetryDelay: durationpb.New(retryDelay)})
	}
	return status.New(code, text)
}

// faultText returns the code of f and what it says. It is the one table from kinds to codes.
func faultText(f *worker.Fault) (codes.Code, string) {
	text := "no reason is known"
	if f.Err != nil && f.Err.Error() != "" {
		text = oneLine(f.Err.Error())
	}
	switch f.Kind {
	case worker.Invalid:
		return codes.InvalidArgument, text
	case worker.Missing, worker.Unmet:
		return codes.FailedPrecondition, text
	case worker.Exhausted:
		return codes.ResourceExhausted, text
	case worker.Unavailable:
		return codes.Unavailable, text
	case worker.Cancelled:
		return codes.Canceled, text
	}
	return codes.Internal, text
}

// missing returns the one detail that a status about missing blobs may have: Bazel uploads them only
// if there is no other (rule 72). It lists as many as fit into a message.
func missing(blobs []cas.Digest) *errdetails.PreconditionFailure {
	p := &errdetails.PreconditionFailure{}
	left := maxResponse - 4*maxText // the texts beside it, and what is around it
	for _, d := range blobs {
		v := &errdetails.PreconditionFailure_Violation{Type: "MISSING", Subject: d.Resource()}
		if left -= proto.Size(v) + 4; left < 0 { // and the tag and length of each
			break
		}
		p.Violations = append(p.Violations, v)
	}
	return p
}

// refusal returns err as the status with which a call fails at once.
func refusal(err error) error {
	st := status.Convert(cas.Status(err))
	return status.Error(st.Code(), oneLine(st.Message()))
}

func detailed(c codes.Code, text string, detail protoadapt.MessageV1) *status.Status {
	st := status.New(c, text)
	with, err := st.WithDetails(detail)
	if err != nil {
		return st
	}
	return with
}

// lines returns the lines of an outcome's message, each by itself as oneLine returns it, and not too many.
// Those that are empty are left out.
func lines(s string) string {
	var all []string
	for line := range strings.Lines(s) {
		if line = oneLine(line); line == "" {
			continue
		}
		if len(all) == maxLines {
			break
		}
		all = append(all, line)
	}
	return strings.Join(all, "\n")
}

// oneLine returns s without line breaks, in ASCII, which is what every client displays as it is, and
// not too long for a person to read. Other characters become Go's escapes.
func oneLine(s string) string {
	var line []byte
	space := false
	for _, r := range s {
		if unicode.IsSpace(r) {
			space = len(line) > 0
			continue
		}
		if len(line) >= maxText {
			return string(line) + "[cut]"
		}
		if space {
			line = append(line, ' ')
			space = false
		}
		if ' ' < r && r <= '~' {
			line = append(line, byte(r))
			continue
		}
		quoted := strconv.QuoteRuneToASCII(r)
		line = append(line, quoted[1:len(quoted)-1]...)
	}
	return string(line)
}
