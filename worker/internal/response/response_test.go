// SPDX-License-Identifier: Apache-2.0

package response_test

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/sandbox/policy"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
	"github.com/cloister-build/cloister/worker"
	"github.com/cloister-build/cloister/worker/internal/response"
	"github.com/google/go-cmp/cmp"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	statuspb "google.golang.org/genproto/googleapis/rpc/status"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/testing/protocmp"
	"google.golang.org/protobuf/types/known/timestamppb"
)

// sent encodes and decodes r.
func sent(t *testing.T, r *repb.ExecuteResponse) *repb.ExecuteResponse {
	t.Helper()
	data := must.Get(proto.Marshal(r))(t)
	again := &repb.ExecuteResponse{}
	must.Succeed(t, proto.Unmarshal(data, again))
	return again
}

// ran returns the result of a command with this exit code.
func ran(code int32) *repb.ActionResult {
	return &repb.ActionResult{
		ExitCode:    code,
		OutputFiles: []*repb.OutputFile{{Path: "o", Digest: cas.SHA256.Sum([]byte("o")).Proto()}},
		ExecutionMetadata: &repb.ExecutedActionMetadata{
			Worker:                      "w",
			ExecutionStartTimestamp:     timestamppb.New(time.Unix(5, 0)),
			ExecutionCompletedTimestamp: timestamppb.New(time.Unix(7, 0)),
		},
	}
}

func TestParseIsInverseOfOf(t *testing.T) {
	from, to := time.Unix(5, 0).UTC(), time.Unix(7, 0).UTC()
	log := cas.BLAKE3.Sum([]byte("log"))
	for name, out := range map[string]*worker.Outcome{
		"success":     {Result: ran(0), Started: from, Ended: to},
		"cached":      {Result: ran(0), Cached: true},
		"exit code":   {Result: ran(3), Message: "cloister: exit code 3", Reproduce: "cloister run --action x/1", Started: from, Ended: to},
		"timeout":     {Result: ran(143), Status: worker.StatusTimedOut, Message: "cloister: killed\ncloister: tried", AuditLog: log, Started: from, Ended: to},
		"output":      {Result: ran(0), Status: worker.StatusBadOutput, Message: "cloister: o is a socket", Started: from, Ended: to},
		"no metadata": {Result: &repb.ActionResult{}},
	} {
		got, f := response.Parse(sent(t, response.Of(out, "")), cas.BLAKE3)
		if f != nil {
			t.Errorf("%s: %v", name, f)
			continue
		}
		if diff := cmp.Diff(out, got, protocmp.Transform(), cmp.Comparer(func(a, b cas.Digest) bool { return a == b })); diff != "" {
			t.Errorf("%s: -sent +read\n%s", name, diff)
		}
	}
}

// A remark and the command that reruns the action survive being passed on.
func TestRemarkIsPassedOn(t *testing.T) {
	out := &worker.Outcome{Result: ran(1), Message: strings.Repeat("cloister: line\n", worker.MaxMessageLines), Reproduce: "cloister run"}
	first := response.Of(out, "see\nthere")
	must.Be(t, strings.HasSuffix(first.Message, "\ncloister: reproduce: cloister run\ncloister: see there"),
		"got %q", first.Message)
	read, f := response.Parse(sent(t, first), cas.SHA256)
	if f != nil {
		t.Fatal(f)
	}
	expect.That(t, read.Reproduce == "cloister run" && strings.HasSuffix(read.Message, "cloister: see there"),
		"got %q and %q", read.Message, read.Reproduce)
	if again := response.Of(read, "").Message; strings.Count(again, "\n") != strings.Count(first.Message, "\n") {
		t.Errorf("passed on: got %q, want the lines of %q", again, first.Message)
	}
}

// Parse restores the kind, the text and the blobs of a fault.
func TestParseIsInverseOfOfFault(t *testing.T) {
	blobs := []cas.Digest{cas.SHA256.Sum([]byte("a")), cas.BLAKE3.Sum([]byte("b"))}
	for kind := worker.FaultInvalid; kind <= worker.FaultCancelled; kind++ {
		f := &worker.Fault{Kind: kind, Err: errors.New("fetch: so it is")}
		if kind == worker.FaultMissing {
			f.Blobs = blobs
		}
		r := sent(t, response.OfFault(f, "worker w"))
		expect.That(t, r.Result == nil && strings.HasSuffix(r.Message, "fetch: so it is (worker w)"),
			"%v: got %v", kind, r)
		out, got := response.Parse(r, cas.SHA256)
		if out != nil || got == nil || got.Kind != kind || got.Error() != "fetch: so it is" || !cmp.Equal(got.Blobs, f.Blobs, cmp.Comparer(func(a, b cas.Digest) bool { return a == b })) {
			t.Errorf("kind %d: got %+v", kind, got)
		}
	}
}

// TestLackOfSupportIsParsed: a scheduler can tell what only this worker lacks from what the policy refuses.
func TestLackOfSupportIsParsed(t *testing.T) {
	for err, want := range map[error]bool{
		fmt.Errorf("worker w: confine: %w: no endpoints", sandbox.ErrUnsupported): true,
		fmt.Errorf("worker w: confine: %w", policy.ErrRefused):                    false,
	} {
		r := sent(t, response.OfFault(&worker.Fault{Kind: worker.FaultUnmet, Err: err}, "worker w"))
		_, got := response.Parse(r, cas.SHA256)
		if got == nil || errors.Is(got, sandbox.ErrUnsupported) != want || got.Kind != worker.FaultUnmet || got.Error() != err.Error() {
			t.Errorf("%v: got %+v, want ErrUnsupported %t", err, got, want)
		}
	}
}

// Buildbarn's workers send an empty result with each failure.
func TestParseFailuresOfOtherWorkers(t *testing.T) {
	empty := &repb.ActionResult{ExecutionMetadata: &repb.ExecutedActionMetadata{}}
	failed := func(c codes.Code, text string, details ...*errdetails.PreconditionFailure) *statuspb.Status {
		st := status.New(c, text)
		for _, d := range details {
			st = must.Get(st.WithDetails(d))(t)
		}
		return st.Proto()
	}
	missing := func(subjects ...string) *errdetails.PreconditionFailure {
		p := &errdetails.PreconditionFailure{}
		for _, s := range subjects {
			p.Violations = append(p.Violations, &errdetails.PreconditionFailure_Violation{Type: "MISSING", Subject: s})
		}
		return p
	}
	hash := strings.Repeat("a", 64)
	for name, c := range map[string]struct {
		r     *repb.ExecuteResponse
		kind  worker.FaultKind
		blobs int
		text  string
	}{
		"nothing":             {nil, worker.FaultInternal, 0, "no result"},
		"no result":           {&repb.ExecuteResponse{}, worker.FaultInternal, 0, "no result"},
		"unavailable":         {&repb.ExecuteResponse{Result: empty, Status: failed(codes.Unavailable, "down")}, worker.FaultUnavailable, 0, "down"},
		"late before a run":   {&repb.ExecuteResponse{Result: empty, Status: failed(codes.DeadlineExceeded, "late")}, worker.FaultUnavailable, 0, "late"},
		"refused":             {&repb.ExecuteResponse{Result: empty, Status: failed(codes.FailedPrecondition, "not here")}, worker.FaultUnmet, 0, "not here"},
		"missing":             {&repb.ExecuteResponse{Result: empty, Status: failed(codes.FailedPrecondition, "gone", missing("blobs/"+hash+"/5"))}, worker.FaultMissing, 1, "gone"},
		"missing after a run": {&repb.ExecuteResponse{Result: ran(0), Status: failed(codes.FailedPrecondition, "gone", missing("blobs/"+hash+"/5"))}, worker.FaultMissing, 1, "gone"},
		"unreadable missing":  {&repb.ExecuteResponse{Status: failed(codes.FailedPrecondition, "gone", missing("blobs/x/5", "x", "blobs/"+hash+"/-1", "blobs/md4/"+hash+"/1"))}, worker.FaultUnmet, 0, "gone"},
		"unknown code":        {&repb.ExecuteResponse{Result: ran(0), Status: &statuspb.Status{Code: 99}}, worker.FaultInternal, 0, "without a message"},
		"lines":               {&repb.ExecuteResponse{Status: failed(codes.Internal, "a\x1b[0m\nb")}, worker.FaultInternal, 0, `a\x1b[0m b`},
	} {
		out, f := response.Parse(c.r, cas.SHA256)
		if out != nil || f == nil || f.Kind != c.kind || len(f.Blobs) != c.blobs || !strings.Contains(f.Error(), c.text) {
			t.Errorf("%s: got %v, %+v", name, out, f)
		}
	}
}
