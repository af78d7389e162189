// SPDX-License-Identifier: Apache-2.0

// Package response turns what became of an action into the ExecuteResponse of the Remote Execution API, and such a
// response of another worker back into that. It sends nothing and waits for nothing: who asks, and how, is for those that
// use it.
package response

import (
	"errors"
	"fmt"
	"strconv"
	"strings"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/worker"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	statuspb "google.golang.org/genproto/googleapis/rpc/status"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// MaxBytes is the largest ExecuteResponse, in bytes: what every gRPC client accepts, less room for the Operation around
// it.
const MaxBytes = 4<<20 - 64<<10

// reproduce begins the line of a message that says how a person runs an action again, and own every other line of ours.
const (
	own       = "cloister: "
	reproduce = own + "reproduce: "
)

// Of returns the response for an outcome. It shares the result, which the caller must not change. A remark, if it is not
// "", is one more line of the message.
func Of(out *worker.Outcome, remark string) *repb.ExecuteResponse {
	text := out.Message
	if out.Reproduce != "" {
		text += "\n" + reproduce + out.Reproduce
	}
	text = Lines(text)
	if remark != "" {
		text = strings.TrimPrefix(text+"\n"+own+OneLine(remark), "\n")
	}
	r := &repb.ExecuteResponse{
		Result:       out.Result,
		CachedResult: out.Cached,
		Status:       &statuspb.Status{Code: int32(Code(out.Status))},
		Message:      text,
	}
	if out.Status != worker.OK {
		r.Status.Message = text
	}
	if !out.AuditLog.IsZero() {
		r.ServerLogs = map[string]*repb.LogFile{worker.AuditLogName: {Digest: out.AuditLog.Proto(), HumanReadable: true}}
	}
	return r
}

// OfFault returns the response for an execution that has no outcome. It has no result, so that no client takes a failure
// of ours for one of the action (rule 110). Where names for a person who executed what.
func OfFault(f *worker.Fault, where string) *repb.ExecuteResponse {
	st := FaultStatus(f)
	return &repb.ExecuteResponse{
		Status:  st.Proto(),
		Message: fmt.Sprintf("%s: %s (%s)", st.Code(), st.Message(), where),
	}
}

// Parse returns what a response of another worker says, of an action whose digests are of fn: an outcome, or why there is
// none. The outcome has the result of r, of which nobody has checked anything. What only the worker knows is not in it:
// Exceeded and OneOff.
//
// A result alone does not make an outcome. Some workers send an empty one with every failure of theirs, so that beside a
// code other than OK it counts only if it says when the command began.
func Parse(r *repb.ExecuteResponse, fn cas.Function) (*worker.Outcome, *worker.Fault) {
	st := status.FromProto(r.GetStatus())
	began := r.GetResult().GetExecutionMetadata().GetExecutionStartTimestamp()
	switch st.Code() {
	case codes.OK:
		if r.GetResult() == nil {
			return nil, &worker.Fault{Kind: worker.Internal, Err: errors.New("the worker answered OK, and sent no result")}
		}
	case codes.DeadlineExceeded, codes.FailedPrecondition:
		if began == nil || len(st.Details()) > 0 {
			return nil, parseFault(st, fn)
		}
	default:
		return nil, parseFault(st, fn)
	}
	out := &worker.Outcome{Result: r.Result, Cached: r.CachedResult}
	out.Status, _ = Status(st.Code())
	out.Message, out.Reproduce = parseMessage(r.Message)
	if out.Message == "" && st.Message() != "" {
		out.Message = Lines(st.Message())
	}
	if d, err := cas.FromProto(fn, r.ServerLogs[worker.AuditLogName].GetDigest()); err == nil {
		out.AuditLog = d
	}
	out.Manifest, out.StableHash = worker.RecordedManifest(r.Result)
	if ended := r.Result.ExecutionMetadata.GetExecutionCompletedTimestamp(); began.IsValid() && ended.IsValid() && !out.Cached {
		out.Started, out.Ended = began.AsTime(), ended.AsTime()
	}
	return out, nil
}

// parseMessage returns the lines of a message, and of them the one by which a person runs the action again.
func parseMessage(text string) (message, command string) {
	var rest []string
	for line := range strings.Lines(text) {
		if again, ok := strings.CutPrefix(line, reproduce); ok && command == "" {
			command = OneLine(again)
			continue
		}
		rest = append(rest, line)
	}
	return Lines(strings.Join(rest, "")), command
}

// parseFault returns the Fault that a status is of. It is FaultStatus backwards, and knows the codes of other workers.
func parseFault(st *status.Status, fn cas.Function) *worker.Fault {
	text := st.Message()
	if text == "" {
		text = "the worker said " + st.Code().String() + ", and not why"
	}
	f := &worker.Fault{Kind: worker.Internal, Err: errors.New(OneLine(text))}
	switch st.Code() {
	case codes.InvalidArgument:
		f.Kind = worker.Invalid
	case codes.FailedPrecondition:
		f.Kind = worker.Unmet
		if blobs := parseMissing(st, fn); len(blobs) > 0 {
			f.Kind, f.Blobs = worker.Missing, blobs
		}
	case codes.ResourceExhausted:
		f.Kind = worker.Exhausted
	case codes.Unavailable, codes.DeadlineExceeded: // of something on the way: an execution has no deadline
		f.Kind = worker.Unavailable
	case codes.Canceled:
		f.Kind = worker.Cancelled
	}
	return f
}

// parseMissing returns the blobs that a status says are missing. What cannot be read of it is left out: a client is told
// of the rest when it asks again.
func parseMissing(st *status.Status, fn cas.Function) []cas.Digest {
	var blobs []cas.Digest
	for _, detail := range st.Details() {
		p, ok := detail.(*errdetails.PreconditionFailure)
		if !ok {
			continue
		}
		for _, v := range p.Violations {
			if name, ok := strings.CutPrefix(v.Subject, "blobs/"); ok && v.Type == "MISSING" {
				if d, ok := parseSubject(name, fn); ok {
					blobs = append(blobs, d)
				}
			}
		}
	}
	return blobs
}

// parseSubject reads [FUNCTION/]HASH/SIZE. A function that is not named is fn.
func parseSubject(name string, fn cas.Function) (cas.Digest, bool) {
	if function, rest, ok := strings.Cut(name, "/"); ok && strings.Contains(rest, "/") {
		named, err := cas.ParseFunction(function)
		if err != nil {
			return cas.Digest{}, false
		}
		fn, name = named, rest
	}
	hash, size, _ := strings.Cut(name, "/")
	n, err := strconv.ParseInt(size, 10, 64)
	if err != nil {
		return cas.Digest{}, false
	}
	d, err := cas.NewDigest(fn, hash, n)
	return d, err == nil
}

// stopped is the reason, of ErrorInfo, by which a response says that its worker stopped.
const stopped, domain = "WORKER_STOPPED", "cloister"

// Stopped returns the response of a worker that ends before the action has. It is UNAVAILABLE, so that a client asks
// again, and says to a scheduler that can that the action is to run elsewhere.
func Stopped(where string) *repb.ExecuteResponse {
	text := "the worker is shutting down: run the action again"
	st := detailed(codes.Unavailable, text, &errdetails.ErrorInfo{Reason: stopped, Domain: domain})
	return &repb.ExecuteResponse{Status: st.Proto(), Message: fmt.Sprintf("%s: %s (%s)", st.Code(), text, where)}
}

// IsStopped reports whether r is what Stopped returns.
func IsStopped(r *repb.ExecuteResponse) bool {
	for _, d := range status.FromProto(r.GetStatus()).Details() {
		if info, ok := d.(*errdetails.ErrorInfo); ok && info.Reason == stopped && info.Domain == domain {
			return true
		}
	}
	return false
}
