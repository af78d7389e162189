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

	"cloud.google.com/go/longrunning/autogen/longrunningpb"
	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
	"github.com/cloister-build/cloister/worker"
	"github.com/cloister-build/cloister/worker/execserver"
	"github.com/cloister-build/cloister/worker/queue"
	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/testing/protocmp"
	"google.golang.org/protobuf/types/known/durationpb"
)

// metadataOf returns the metadata of m and the request metadata in them.
func metadataOf(t *testing.T, m *longrunningpb.Operation) (*repb.ExecuteOperationMetadata, *repb.RequestMetadata) {
	t.Helper()
	var md repb.ExecuteOperationMetadata
	if err := m.Metadata.UnmarshalTo(&md); err != nil {
		t.Fatalf("metadata: %v", err)
	}
	who := &repb.RequestMetadata{}
	for _, aux := range md.GetPartialExecutionMetadata().GetAuxiliaryMetadata() {
		if err := aux.UnmarshalTo(who); err != nil {
			t.Fatalf("auxiliary metadata: %v", err)
		}
	}
	return &md, who
}

// list returns every operation of a list, and the number of pages.
func (s *site) list(t *testing.T, req *longrunningpb.ListOperationsRequest) (all []*longrunningpb.Operation, pages int) {
	t.Helper()
	req = proto.CloneOf(req)
	for pages < 1000 {
		page, err := s.ops.ListOperations(t.Context(), req)
		must.Be(t, err == nil, "ListOperations: %v", err)
		all = append(all, page.Operations...)
		pages++
		if req.PageToken = page.NextPageToken; req.PageToken == "" {
			return all, pages
		}
	}
	t.Fatal("the list does not end")
	return nil, 0
}

func TestRule089_MetadataHasTimesAndWorker(t *testing.T) {
	e, open, _ := blocking()
	s := serve(t, e, nil)
	st := s.execute(t.Context(), t, s.action(t, "x"), nil)
	first, _ := metadataOf(t, recv(t, st))
	if p := first.GetPartialExecutionMetadata(); p.GetQueuedTimestamp() == nil || p.Worker != "" || p.WorkerStartTimestamp != nil {
		t.Errorf("first metadata are %v, want only the queued time", p)
	}
	began, _ := metadataOf(t, reach(t, st, repb.ExecutionStage_EXECUTING))
	open()
	ms := all(t, st)
	ended, _ := metadataOf(t, ms[len(ms)-1])
	for _, md := range []*repb.ExecuteOperationMetadata{began, ended} {
		p := md.GetPartialExecutionMetadata()
		if p.GetWorker() != "anvil" || p.GetWorkerStartTimestamp().AsTime().Before(p.GetQueuedTimestamp().AsTime()) ||
			!proto.Equal(p.QueuedTimestamp, first.PartialExecutionMetadata.QueuedTimestamp) {
			t.Errorf("metadata are %v, want worker and times in order", p)
		}
	}
}

func TestGetOperationEqualsWaitExecution(t *testing.T) {
	e, open, _ := blocking()
	s := serve(t, e, nil)
	ctx := withMetadata(t, &repb.RequestMetadata{TargetId: "//a:b", ActionMnemonic: "CppCompile", ToolInvocationId: "i-1"})
	a := s.action(t, "x")
	st := s.execute(ctx, t, a, nil)
	name := reach(t, st, repb.ExecutionStage_EXECUTING).Name
	get := func() *longrunningpb.Operation {
		t.Helper()
		return must.Get(s.ops.GetOperation(t.Context(), &longrunningpb.GetOperationRequest{Name: name}))(t)
	}
	m := get()
	md, who := metadataOf(t, m)
	if m.Name != name || m.Done || m.Result != nil || md.Stage != repb.ExecutionStage_EXECUTING || !proto.Equal(md.ActionDigest, a.Proto()) {
		t.Errorf("operation is %v, want %s, EXECUTING", m, name)
	}
	want := &repb.RequestMetadata{TargetId: "//a:b", ActionMnemonic: "CppCompile", ToolInvocationId: "i-1", ActionId: a.Hash()}
	expect.Equal(t, cmp.Diff(want, who, protocmp.Transform()), "", "request metadata (-want +got)")
	open()
	response := end(t, st)
	expect.Equal(t, cmp.Diff(response, responseOf(t, get()), protocmp.Transform()), "",
		"response (-Execute +GetOperation)")
}

func TestUnknownOperationIsNotFoundByEveryMethod(t *testing.T) {
	s := serve(t, succeed, nil)
	for _, name := range []string{"", "operations/0123", strings.Repeat("\u00e9", 1000)} {
		_, get := s.ops.GetOperation(t.Context(), &longrunningpb.GetOperationRequest{Name: name})
		_, wait := s.ops.WaitOperation(t.Context(), &longrunningpb.WaitOperationRequest{Name: name})
		_, cancel := s.ops.CancelOperation(t.Context(), &longrunningpb.CancelOperationRequest{Name: name})
		_, forget := s.ops.DeleteOperation(t.Context(), &longrunningpb.DeleteOperationRequest{Name: name})
		for i, err := range []error{get, wait, cancel, forget} {
			expect.Code(t, err, codes.NotFound, "method %d", i)
			wantReadable(t, status.Convert(err).Message())
		}
	}
}

func TestWaitOperationWaitsForTheEnd(t *testing.T) {
	e, open, _ := blocking()
	s := serve(t, e, nil)
	st := s.execute(t.Context(), t, s.action(t, "x"), nil)
	name := reach(t, st, repb.ExecutionStage_EXECUTING).Name
	wait := func(timeout *durationpb.Duration) (*longrunningpb.Operation, error) {
		return s.ops.WaitOperation(t.Context(), &longrunningpb.WaitOperationRequest{Name: name, Timeout: timeout})
	}
	for _, d := range []time.Duration{0, time.Millisecond} {
		if m, err := wait(durationpb.New(d)); err != nil || m.Done {
			t.Errorf("after a timeout of %v: %v, %v; want the present state", d, m, err)
		}
	}
	expect.Code(t, expect.Err(wait(&durationpb.Duration{Nanos: -1, Seconds: 1})), codes.InvalidArgument,
		"malformed timeout")
	ctx, leave := context.WithCancel(t.Context())
	leave()
	expect.Code(t, expect.Err(s.ops.WaitOperation(ctx, &longrunningpb.WaitOperationRequest{Name: name})),
		codes.Canceled, "after the client left")
	open()
	wantCode(t, responseOf(t, must.Get(wait(nil))(t)), codes.OK)
}

// TestCancelOperationLeavesTheRunToOthers and names the client that cancelled.
func TestCancelOperationLeavesTheRunToOthers(t *testing.T) {
	e, open, begun := blocking()
	s := serve(t, e, nil)
	a := s.action(t, "x")
	first, second := s.execute(t.Context(), t, a, nil), s.execute(t.Context(), t, a, nil)
	name := reach(t, first, repb.ExecutionStage_EXECUTING).Name
	reach(t, second, repb.ExecutionStage_EXECUTING)
	cancel := func() {
		t.Helper()
		ctx := withMetadata(t, &repb.RequestMetadata{ToolInvocationId: "i-2"})
		must.Get(s.ops.CancelOperation(ctx, &longrunningpb.CancelOperationRequest{Name: name}))(t)
	}
	cancel()
	r := end(t, first)
	if st := wantCode(t, r, codes.Canceled); !strings.Contains(st.Message(), "CancelOperation") || !strings.Contains(st.Message(), "i-2") {
		t.Errorf("status is %v, want the invocation that cancelled", st)
	}
	expect.That(t, r.Result == nil, "result is %v, want none", r.Result)
	open()
	wantCode(t, end(t, second), codes.OK)
	expect.Equal(t, begun(), 1, "runs began")
	cancel() // changes nothing
	wantCode(t, end(t, s.wait(t.Context(), t, name)), codes.Canceled)
}

func TestCancelOfTheLastOperationEndsTheRun(t *testing.T) {
	killed := make(chan struct{})
	s := serve(t, func(ctx context.Context, _ *worker.Task) (*worker.Outcome, error) {
		<-ctx.Done()
		close(killed)
		return nil, ctx.Err()
	}, nil)
	st := s.execute(t.Context(), t, s.action(t, "x"), nil)
	name := reach(t, st, repb.ExecutionStage_EXECUTING).Name
	must.Get(s.ops.CancelOperation(t.Context(), &longrunningpb.CancelOperationRequest{Name: name}))(t)
	wantCode(t, end(t, st), codes.Canceled)
	<-killed
}

func TestDeleteOperationRequiresTheEnd(t *testing.T) {
	e, open, _ := blocking()
	s := serve(t, e, nil)
	st := s.execute(t.Context(), t, s.action(t, "x"), nil)
	name := reach(t, st, repb.ExecutionStage_EXECUTING).Name
	forget := func() error {
		_, err := s.ops.DeleteOperation(t.Context(), &longrunningpb.DeleteOperationRequest{Name: name})
		return err
	}
	expect.Code(t, forget(), codes.FailedPrecondition, "running")
	open()
	wantCode(t, end(t, st), codes.OK)
	must.Succeed(t, forget())
	expect.Equal(t, codeOf(t, s.wait(t.Context(), t, name)), codes.NotFound,
		"WaitExecution after the deletion ended with")
}

// TestListOperationsFiltersAndPages the operations of one instance, newest first.
func TestListOperationsFiltersAndPages(t *testing.T) {
	s := serve(t, func(ctx context.Context, task *worker.Task) (*worker.Outcome, error) {
		if task.Mnemonic == "Hang" {
			<-ctx.Done()
			return nil, ctx.Err()
		}
		out, err := succeed(ctx, task)
		out.Result.OutputFiles = []*repb.OutputFile{{Path: "out", Digest: cas.SHA256.Sum(nil).Proto()}}
		out.Result.ExitCode, out.Message = 3, "exit code 3"
		return out, err
	}, func(_ *queue.Config, c *execserver.Config) {
		c.Rights = func(_ context.Context, instance string) (execute, update bool) { return instance != "secret", true }
	})
	secret := func(r *repb.ExecuteRequest) { r.InstanceName = "secret" }
	elsewhere := func(r *repb.ExecuteRequest) { r.InstanceName = "a/b" }
	var digests []cas.Digest
	for i, c := range []struct {
		mnemonic, target, invocation string
		change                       func(*repb.ExecuteRequest)
	}{
		{"CppCompile", "//a:a", "one", nil},
		{"CppLink", "//a:b", "one", nil},
		{"CppCompile", "//b:a b", "two", nil},
		{"CppCompile", "//a:a", "one", elsewhere},
		{"Hang", "//c", "two", nil},
		{"", "", "", nil},
		{"CppCompile", "//a:a", "one", secret},
	} {
		ctx := withMetadata(t, &repb.RequestMetadata{TargetId: c.target, ActionMnemonic: c.mnemonic, ToolInvocationId: c.invocation})
		a := s.action(t, fmt.Sprint(i))
		digests = append(digests, a)
		st := s.execute(ctx, t, a, c.change)
		if c.mnemonic == "Hang" {
			reach(t, st, repb.ExecutionStage_EXECUTING)
			continue
		}
		end(t, st)
	}
	for _, c := range []struct {
		name, filter string
		want         []int
	}{
		{"", "", []int{5, 4, 2, 1, 0}},
		{"operations", "", []int{5, 4, 2, 1, 0}},
		{"a/b", "", []int{3}},
		{"a/b/operations", "", []int{3}},
		{"a", "", nil},
		{"-", "", []int{5, 4, 3, 2, 1, 0}},
		{"-", "mnemonic=CppCompile", []int{3, 2, 0}},
		{"", "mnemonic=CppCompile", []int{2, 0}},
		{"", "mnemonic=Cpp*", []int{2, 1, 0}},
		{"", `target="//b:a b"`, []int{2}},
		{"", "target=//a*", []int{1, 0}},
		{"", "target=//a/...", []int{1, 0}},
		{"", "target=//...", []int{4, 2, 1, 0}},
		{"", "invocation=one AND mnemonic=CppLink", []int{1}},
		{"", "  invocation=one   mnemonic=CppLink ", []int{1}},
		{"", "invocation=none", nil},
		{"", "invocation=", []int{5}},
		{"", "stage=EXECUTING", []int{4}},
		{"", "stage=COMPLETED target=//a:b", []int{1}},
		{"", "action=" + digests[2].Hash(), []int{2}},
		{"", "action=" + digests[2].String(), []int{2}},
	} {
		for _, size := range []int32{0, 1, 2} {
			ops, pages := s.list(t, &longrunningpb.ListOperationsRequest{Name: c.name, Filter: c.filter, PageSize: size})
			var got []int
			for _, m := range ops {
				md, who := metadataOf(t, m)
				i := slices.IndexFunc(digests, func(d cas.Digest) bool { return proto.Equal(d.Proto(), md.ActionDigest) })
				got = append(got, i)
				if i == 4 && (m.Done || md.Stage != repb.ExecutionStage_EXECUTING) || who.TargetId == "" != (i == 5) {
					t.Errorf("%q %q: operation %d is %v", c.name, c.filter, i, m)
				}
				if i == 1 {
					// A list has exit codes and times, but no large parts.
					want := &repb.ActionResult{ExitCode: 3, ExecutionMetadata: result().ExecutionMetadata}
					r := responseOf(t, m)
					if diff := cmp.Diff(want, r.Result, protocmp.Transform()); diff != "" || r.Message != "exit code 3" {
						t.Errorf("result with message %q (-want +got):\n%s", r.Message, diff)
					}
				}
			}
			if !slices.Equal(got, c.want) || size == 1 && pages < len(got) {
				t.Errorf("%q %q in pages of %d: %v on %d pages, want %v", c.name, c.filter, size, got, pages, c.want)
			}
		}
	}
}

func TestInvalidListRequestsAreRefused(t *testing.T) {
	s := serve(t, succeed, nil)
	for i, req := range []*longrunningpb.ListOperationsRequest{
		{Name: "a/blobs"},
		{Name: "a//b"},
		{Name: "/"},
		{Name: "/operations"},
		{PageSize: -1},
		{PageToken: "x"},
		{PageToken: "b3Ax"},
		{PageToken: strings.Repeat("\u00e9", 5000)},
		{Filter: "color=red"},
		{Filter: "target"},
		{Filter: "AND"},
		{Filter: `target="//a`},
		{Filter: "stage=DONE"},
		{Filter: "target=a OR target=b"},
	} {
		_, err := s.ops.ListOperations(t.Context(), req)
		expect.Code(t, err, codes.InvalidArgument, "request %d", i)
		wantReadable(t, status.Convert(err).Message())
	}
}

// TestPagesFitIntoMessages of 4 MiB, which the client enforces.
func TestPagesFitIntoMessages(t *testing.T) {
	blobs := make([]cas.Digest, queue.MaxBlobs)
	for i := range blobs {
		blobs[i] = cas.SHA256.Sum(fmt.Append(nil, i))
	}
	missing := &worker.Fault{Kind: worker.FaultMissing, Err: errors.New("absent"), Blobs: blobs}
	s := serve(t, func(ctx context.Context, task *worker.Task) (*worker.Outcome, error) {
		if task.Mnemonic == "Missing" {
			return nil, missing
		}
		out, err := succeed(ctx, task)
		out.Message = strings.Repeat(strings.Repeat("x", 2000)+"\n", 9)
		out.Result.StdoutRaw = make([]byte, 10<<10)
		return out, err
	}, nil)
	const n = 400
	for i := range n {
		mnemonic := "Missing"
		if i > 1 {
			mnemonic = "Talk"
		}
		end(t, s.execute(withMetadata(t, &repb.RequestMetadata{ActionMnemonic: mnemonic}), t, s.action(t, fmt.Sprint(i)), nil))
	}
	ops, pages := s.list(t, &longrunningpb.ListOperationsRequest{PageSize: 100_000})
	expect.That(t, len(ops) == n && pages >= 3 && pages <= 10,
		"%d operations on %d pages, want %d on a few", len(ops), pages, n)
}
