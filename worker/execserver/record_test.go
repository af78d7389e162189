// SPDX-License-Identifier: Apache-2.0

package execserver_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	cloisterpb "github.com/cloister-build/cloister/proto/cloister/v1"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
	"github.com/cloister-build/cloister/worker"
	"github.com/cloister-build/cloister/worker/execserver"
	"github.com/cloister-build/cloister/worker/history"
	"github.com/cloister-build/cloister/worker/queue"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/protobuf/types/known/anypb"
	"google.golang.org/protobuf/types/known/timestamppb"
)

// withHistory starts a site with a history.
func withHistory(t *testing.T, e function) (*site, *history.Log) {
	t.Helper()
	l := must.Get(history.Open(history.Config{Dir: t.TempDir()}))(t)
	t.Cleanup(func() { l.Close() })
	return serve(t, e, func(q *queue.Config, c *execserver.Config) {
		q.Ended = execserver.RecordOperations(l, nil)
		c.Caller = func(ctx context.Context) string {
			return strings.Join(metadata.ValueFromIncomingContext(ctx, "caller"), "")
		}
	}), l
}

// recorded returns the entries of l, oldest first.
func recorded(t *testing.T, l *history.Log) []history.Entry {
	t.Helper()
	var all []history.Entry
	must.Succeed(t, l.Search(t.Context(), history.Filter{}, 1000, func(e *history.Entry) error { all = append(all, *e); return nil }))
	slices.Reverse(all)
	return all
}

// TestEndOfEachOperationIsRecorded with its request metadata, before its client learns of it.
func TestEndOfEachOperationIsRecorded(t *testing.T) {
	at := time.Unix(1_800_000_000, 0)
	text := fmt.Sprintf("%064d/7", 3)
	aux := must.Get(anypb.New(&cloisterpb.Execution{Manifest: text, StableHash: "5ab1e"}))(t)
	ran := &repb.ActionResult{ExitCode: 3, ExecutionMetadata: &repb.ExecutedActionMetadata{
		Worker: "w", WorkerStartTimestamp: timestamppb.New(at.Add(-time.Minute)), ExecutionStartTimestamp: timestamppb.New(at),
		ExecutionCompletedTimestamp: timestamppb.New(at.Add(time.Second)), OutputUploadCompletedTimestamp: timestamppb.New(at.Add(3 * time.Second)),
		AuxiliaryMetadata: []*anypb.Any{aux},
	}}
	ends := map[string]error{"bad": &worker.Fault{Kind: worker.FaultInternal, Err: errors.New("a defect")}}
	s, l := withHistory(t, func(_ context.Context, task *worker.Task) (*worker.Outcome, error) {
		if err := ends[task.Mnemonic]; err != nil {
			return nil, err
		}
		return &worker.Outcome{Result: ran}, nil
	})
	ctx := withMetadata(t, &repb.RequestMetadata{TargetId: "//a:b", ActionMnemonic: "Good", ToolInvocationId: "i-1", CorrelatedInvocationsId: "c-1"})
	known := s.action(t, "known")
	s.record(t, known, &repb.ActionResult{})
	end(t, s.execute(ctx, t, s.action(t, "x"), nil))
	if got := recorded(t, l); len(got) != 1 {
		t.Fatalf("%d entries after the first operation, want 1", len(got))
	}
	end(t, s.execute(withMetadata(t, &repb.RequestMetadata{ActionMnemonic: "bad"}), t, s.action(t, "y"), nil))
	end(t, s.execute(t.Context(), t, known, nil))
	absent := known.Function().Sum([]byte("absent"))
	end(t, s.execute(t.Context(), t, absent, nil))

	got := recorded(t, l)
	must.Be(t, len(got) == 4, "%d entries, want 4", len(got))
	if e := got[0]; e.How != history.Executed || e.Action != s.action(t, "x").String() || e.Target != "//a:b" || e.Mnemonic != "Good" || e.Invocation != "i-1" ||
		e.Correlated != "c-1" || e.Exit != 3 || e.Code != 0 || e.Worker != "w" || e.Ran != time.Second || e.Prepared != time.Minute || e.Stored != 2*time.Second || e.Manifest != text || e.StableHash != "5ab1e" ||
		e.Result != history.Identity(ran) || e.Time.IsZero() {
		t.Errorf("executed: %+v", e)
	}
	if e := got[1]; codes.Code(e.Code) != codes.Internal || e.Result != "" || e.Worker != "anvil" {
		t.Errorf("fault: %+v", e)
	}
	if e := got[2]; e.How != history.Cached || e.Action != known.String() || e.Result == "" {
		t.Errorf("cached: %+v", e)
	}
	if e := got[3]; codes.Code(e.Code) != codes.FailedPrecondition || e.Action != absent.String() {
		t.Errorf("absent: %+v", e)
	}
}

// TestOperationsOfASharedRunAreRecordedEach including a cancelled one.
func TestOperationsOfASharedRunAreRecordedEach(t *testing.T) {
	e, open, _ := blocking()
	s, l := withHistory(t, e)
	a := s.action(t, "x")
	first := s.execute(t.Context(), t, a, nil)
	second := s.execute(metadata.AppendToOutgoingContext(withMetadata(t, &repb.RequestMetadata{ToolInvocationId: "i-2"}), "caller", "ci"), t, a, nil)
	third := s.execute(t.Context(), t, a, nil)
	reach(t, first, repb.ExecutionStage_EXECUTING)
	reach(t, second, repb.ExecutionStage_EXECUTING)
	name := reach(t, third, repb.ExecutionStage_EXECUTING).Name
	o, ok := s.queue.Operation(name)
	must.Be(t, ok, "the operation is unknown")
	o.Cancel("a person says so")
	open()
	all(t, first)
	all(t, second)
	got := recorded(t, l)
	invocations := map[string]int{}
	for _, e := range got {
		invocations[e.Invocation+e.Caller+" "+codes.Code(e.Code).String()]++
	}
	if len(got) != 3 || codes.Code(got[0].Code) != codes.Canceled || invocations["i-2ci OK"] != 1 || invocations[" OK"] != 1 {
		t.Errorf("recorded are %+v", got)
	}
}

// TestLookupsAndUploadsOfBuildsAreRecorded but not those of other clients.
func TestLookupsAndUploadsOfBuildsAreRecorded(t *testing.T) {
	s, l := withHistory(t, succeed)
	who := "ci"
	caller := func(context.Context) string { return who }
	ask, upload := execserver.RecordLookups(l, caller), execserver.RecordUploads(l, caller)
	incoming := func(m *repb.RequestMetadata) context.Context {
		md, _ := metadata.FromOutgoingContext(withMetadata(t, m))
		return metadata.NewIncomingContext(t.Context(), md)
	}
	a := s.action(t, "x")
	ask(t.Context(), "", a, nil)
	ask(incoming(&repb.RequestMetadata{TargetId: "//a:b"}), "", a, nil)
	ask(incoming(&repb.RequestMetadata{ToolInvocationId: "i", TargetId: "//a:b", ActionMnemonic: "M", CorrelatedInvocationsId: "c"}), "", a, nil)
	ask(incoming(&repb.RequestMetadata{ToolInvocationId: "i"}), "", a, &repb.ActionResult{})
	upload(incoming(&repb.RequestMetadata{TargetId: "//a:b"}), "", a, &repb.ActionResult{})
	who = "recorder" // which adds to the build of another caller
	upload(incoming(&repb.RequestMetadata{ToolInvocationId: "i", TargetId: "//a:b", ActionMnemonic: "M"}), "", a, &repb.ActionResult{})
	got := recorded(t, l)
	if e := got[len(got)-1]; e.How != history.Uploaded || e.Target != "//a:b" || e.Mnemonic != "M" || e.Result == "" || e.Action != a.String() {
		t.Errorf("upload is recorded as %+v", e)
	}
	expect.Slices(t, []string{got[0].Caller, got[1].Caller, got[2].Caller}, []string{"ci", "ci", "recorder"},
		"callers are")
	if len(got) != 3 || got[0].How != history.Absent || got[0].Target != "//a:b" || got[0].Mnemonic != "M" || got[0].Correlated != "c" || got[0].Result != "" ||
		got[1].How != history.Found || got[1].Result == "" || got[1].Action != a.String() {
		t.Errorf("recorded are %+v", got)
	}
}
