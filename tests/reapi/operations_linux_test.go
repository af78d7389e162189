// SPDX-License-Identifier: Apache-2.0

package reapi_test

import (
	"context"
	"testing"

	"cloud.google.com/go/longrunning/autogen/longrunningpb"
	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/sandbox/sandboxtest"
	"github.com/cloister-build/cloister/tests/must"
	"google.golang.org/grpc/codes"
	headers "google.golang.org/grpc/metadata"
	"google.golang.org/protobuf/proto"
)

// building returns a context with request metadata.
func (c *client) building(m *repb.RequestMetadata) context.Context {
	c.Helper()
	b := must.Get(proto.Marshal(m))(c)
	return headers.AppendToOutgoingContext(c.Context(), "build.bazel.remote.execution.v2.requestmetadata-bin", string(b))
}

// TestOperations checks that a running operation is found by its target and cancelled with all its processes, and that
// completed ones are listed with exit code and times.
func TestOperations(t *testing.T) {
	c := serve(t)
	ops := longrunningpb.NewOperationsClient(c.conn)
	const mark = "1073.25" // unique among the processes
	d := c.prepare(job{script: "setsid sleep " + mark + " & sleep " + mark + "; true"})
	st := must.Get(c.exec.Execute(c.building(&repb.RequestMetadata{
		TargetId: "//a:endless", ActionMnemonic: "Genrule",
		ToolInvocationId: "one",
	}),
		&repb.ExecuteRequest{ActionDigest: d}))(t)
	must.Hold(t, "running", func() bool { return len(sandboxtest.Running(t, mark)) >= 3 })
	list := func(filter string) []*longrunningpb.Operation {
		t.Helper()
		page := must.Get(ops.ListOperations(t.Context(), &longrunningpb.ListOperationsRequest{Filter: filter}))(t)
		return page.Operations
	}
	running := list("target=//a:* stage=EXECUTING")
	must.Be(t, len(running) == 1, "got %d running operations, want one: %v", len(running), running)
	must.Get(ops.CancelOperation(t.Context(),
		&longrunningpb.CancelOperationRequest{Name: running[0].Name}))(t)
	a := answered(st, nil)
	if a.code() != codes.Canceled || a.response.GetResult() != nil || a.name() != running[0].Name {
		t.Errorf("got operation %q, %v, %v, want CANCELLED of %q", a.name(), a.response, a.err, running[0].Name)
	}
	must.Hold(t, "ended", func() bool { return len(sandboxtest.Running(t, mark)) == 0 })

	failed := c.run(job{script: "exit 3"})
	var ended repb.ExecuteResponse
	newest := list("stage=COMPLETED")[0]
	if err := newest.GetResponse().UnmarshalTo(&ended); err != nil {
		t.Fatalf("operation %v: %v", newest, err)
	}
	m := ended.GetResult().GetExecutionMetadata()
	if ended.Result.GetExitCode() != 3 || m.GetWorker() == "" ||
		m.ExecutionCompletedTimestamp.AsTime().Before(m.ExecutionStartTimestamp.AsTime()) {
		t.Errorf("listed operation: got %v, of %v", &ended, failed)
	}
	if got := list("invocation=one"); len(got) != 1 || got[0].Name != a.name() {
		t.Errorf("operations of the invocation: got %v, want the cancelled one", got)
	}
}
