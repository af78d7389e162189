// SPDX-License-Identifier: Apache-2.0

// Package response converts the outcome of an action to an ExecuteResponse of the Remote Execution API and back. It
// sends nothing, so that it serves every service that executes actions.
package response

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/worker"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	statuspb "google.golang.org/genproto/googleapis/rpc/status"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// MaxBytes bounds an ExecuteResponse: what every gRPC client accepts, minus room for the Operation around it.
const MaxBytes = 4<<20 - 64<<10

// prefix begins every line of a message that this project writes, and reproduce the line with the command that reruns
// the action.
const (
	prefix    = "cloister: "
	reproduce = prefix + "reproduce: "
)

// Of returns the response for an outcome. It shares the result, which the caller must not modify. A remark that is not
// "" becomes the last line of the message.
func Of(out *worker.Outcome, remark string) *repb.ExecuteResponse {
	text := out.Message
	if out.Reproduce != "" {
		text += "\n" + reproduce + out.Reproduce
	}
	text = Lines(text)
	if remark != "" {
		text = strings.TrimPrefix(text+"\n"+prefix+OneLine(remark), "\n")
	}
	r := &repb.ExecuteResponse{
		Result:       out.Result,
		CachedResult: out.Cached,
		Status:       &statuspb.Status{Code: int32(Code(out.Status))},
		Message:      text,
	}
	if out.Status != worker.StatusOK {
		r.Status.Message = text
	}
	if !out.AuditLog.IsZero() {
		log := &repb.LogFile{Digest: out.AuditLog.Proto(), HumanReadable: true}
		r.ServerLogs = map[string]*repb.LogFile{worker.AuditLogName: log}
	}
	return r
}

// OfFault returns the response for an execution without an outcome. It has no result, so that no client mistakes our
// failure for one of the action (rule 110). where says who executed what, for people.
func OfFault(f *worker.Fault, where string) *repb.ExecuteResponse {
	st := FaultStatus(f)
	return &repb.ExecuteResponse{
		Status:  st.Proto(),
		Message: fmt.Sprintf("%s: %s (%s)", st.Code(), st.Message(), where),
	}
}

// Parse converts the response of another worker, for an action with digests of the function fn, to an outcome or a
// fault. The outcome has the response's result, unchecked, and lacks what only the worker knows: Exceeded,
// OnViolation and Uncacheable.
//
// Some workers attach an empty result to each of their failures. So a result beside a code other than OK counts only if
// it says when the command began.
func Parse(r *repb.ExecuteResponse, fn cas.Function) (*worker.Outcome, *worker.Fault) {
	st := status.FromProto(r.GetStatus())
	code, ok := Status(st.Code())
	began := r.GetResult().GetExecutionMetadata().GetExecutionStartTimestamp()
	switch {
	case !ok, code != worker.StatusOK && (began == nil || len(st.Details()) > 0):
		return nil, parseFault(st, fn)
	case r.GetResult() == nil:
		return nil, &worker.Fault{Kind: worker.FaultInternal, Err: errors.New("the worker answered OK but sent no result")}
	}
	out := &worker.Outcome{Result: r.Result, Cached: r.CachedResult, Status: code}
	out.Message, out.Reproduce = parseMessage(r.Message)
	if out.Message == "" && st.Message() != "" {
		out.Message = Lines(st.Message())
	}
	if d, err := cas.FromProto(fn, r.ServerLogs[worker.AuditLogName].GetDigest()); err == nil {
		out.AuditLog = d
	}
	out.Manifest, out.StableHash = worker.RecordedManifest(r.Result)
	ended := r.Result.ExecutionMetadata.GetExecutionCompletedTimestamp()
	if began.IsValid() && ended.IsValid() && !out.Cached {
		out.Started, out.Ended = began.AsTime(), ended.AsTime()
	}
	return out, nil
}

// parseMessage splits a message into its lines and the command that reruns the action.
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

// parseFault is the inverse of FaultStatus. It also knows the codes of other workers.
func parseFault(st *status.Status, fn cas.Function) *worker.Fault {
	text := st.Message()
	if text == "" {
		text = fmt.Sprintf("the worker answered %v without a message", st.Code())
	}
	f := &worker.Fault{Kind: worker.FaultInternal, Err: errors.New(OneLine(text))}
	switch st.Code() {
	case codes.InvalidArgument:
		f.Kind = worker.FaultInvalid
	case codes.FailedPrecondition:
		f.Kind = worker.FaultUnmet
		if hasReason(st, unsupported) {
			f.Err = unsupportedError(f.Err.Error())
		}
		if blobs := parseMissing(st, fn); len(blobs) > 0 {
			f.Kind, f.Blobs = worker.FaultMissing, blobs
		}
	case codes.ResourceExhausted:
		f.Kind = worker.FaultExhausted
	case codes.Unavailable, codes.DeadlineExceeded: // of a call made on the way: an execution has no deadline
		f.Kind = worker.FaultUnavailable
	case codes.Canceled:
		f.Kind = worker.FaultCancelled
	}
	return f
}

// An unsupportedError is a sandbox.ErrUnsupported of another worker.
type unsupportedError string

func (e unsupportedError) Error() string      { return string(e) }
func (unsupportedError) Is(target error) bool { return target == sandbox.ErrUnsupported }

// parseMissing returns the missing blobs that a status lists. It skips malformed ones; a client learns about these when
// it retries.
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

// parseSubject parses [FUNCTION/]HASH/SIZE. The default function is fn.
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

// Reasons of an ErrorInfo, for schedulers of this project: the worker shuts down, or cannot enforce what the action
// demands.
const stopped, unsupported, domain = "WORKER_STOPPED", "WORKER_LACKS_SUPPORT", "cloister"

// Stopped returns the response of a worker that shuts down before the action has ended. Its code is UNAVAILABLE, so
// that a client retries, and it tells a scheduler of this project to run the action elsewhere.
func Stopped(where string) *repb.ExecuteResponse {
	const text = "the worker is shutting down: run the action again"
	st := detailed(codes.Unavailable, text, &errdetails.ErrorInfo{Reason: stopped, Domain: domain})
	return &repb.ExecuteResponse{
		Status:  st.Proto(),
		Message: fmt.Sprintf("%s: %s (%s)", st.Code(), text, where),
	}
}

// IsStopped reports whether r was made by Stopped.
func IsStopped(r *repb.ExecuteResponse) bool {
	return hasReason(status.FromProto(r.GetStatus()), stopped)
}

func hasReason(st *status.Status, reason string) bool {
	return slices.ContainsFunc(st.Details(), func(d any) bool {
		info, ok := d.(*errdetails.ErrorInfo)
		return ok && info.Reason == reason && info.Domain == domain
	})
}
