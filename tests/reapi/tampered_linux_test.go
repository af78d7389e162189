// SPDX-License-Identifier: Apache-2.0

package reapi_test

import (
	"context"
	"path/filepath"
	"slices"
	"strconv"
	"sync/atomic"
	"testing"

	"cloud.google.com/go/longrunning/autogen/longrunningpb"
	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/tests/internal/bazelrun"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	statuspb "google.golang.org/genproto/googleapis/rpc/status"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"
)

// tampered is an Execution service of which each operation is altered on the way to the client: a server with a
// defect, as a client sees it.
type tampered struct {
	repb.ExecutionClient
	request func(*repb.ExecuteRequest)     // nil is none
	alter   func(*longrunningpb.Operation) // nil is none
	result  func(r *repb.ExecuteResponse)  // of the last operation; nil is none
}

func (t *tampered) Execute(ctx context.Context, req *repb.ExecuteRequest, opts ...grpc.CallOption) (repb.Execution_ExecuteClient, error) {
	if t.request != nil {
		req = proto.CloneOf(req)
		t.request(req)
	}
	s, err := t.ExecutionClient.Execute(ctx, req, opts...)
	return &tamperedStream{s, t}, err
}

func (t *tampered) WaitExecution(ctx context.Context, req *repb.WaitExecutionRequest, opts ...grpc.CallOption) (repb.Execution_WaitExecutionClient, error) {
	s, err := t.ExecutionClient.WaitExecution(ctx, req, opts...)
	return &tamperedStream{s, t}, err
}

type tamperedStream struct {
	repb.Execution_ExecuteClient
	by *tampered
}

func (s *tamperedStream) Recv() (*longrunningpb.Operation, error) {
	op, err := s.Execution_ExecuteClient.Recv()
	if err != nil {
		return nil, err
	}
	if s.by.result != nil && op.GetDone() {
		var r repb.ExecuteResponse
		if err := op.GetResponse().UnmarshalTo(&r); err != nil {
			return nil, err
		}
		s.by.result(&r)
		any, err := anypb.New(&r)
		if err != nil {
			return nil, err
		}
		op.Result = &longrunningpb.Operation_Response{Response: any}
	}
	if s.by.alter != nil {
		s.by.alter(op)
	}
	return op, nil
}

// metadataOf alters the metadata of an operation.
func metadataOf(op *longrunningpb.Operation, alter func(*repb.ExecuteOperationMetadata)) {
	m, err := stageOf(op)
	if err != nil {
		return
	}
	alter(m)
	if any, err := anypb.New(m); err == nil {
		op.Metadata = any
	}
}

// details alters the missing blobs of a status.
func details(s *statuspb.Status, alter func(*errdetails.PreconditionFailure)) {
	for i, d := range s.GetDetails() {
		var f errdetails.PreconditionFailure
		if d.UnmarshalTo(&f) != nil {
			continue
		}
		alter(&f)
		if any, err := anypb.New(&f); err == nil {
			s.Details[i] = any
		}
	}
}

// TestBrokenExecutionIsSeen: a check that cannot fail says nothing.
func TestBrokenExecutionIsSeen(t *testing.T) {
	c := connect(t, bazelrun.ServerConfig{Dir: filepath.Join(t.TempDir(), "store"), Jobs: 8})
	c.ours = true
	if err := c.know(t.Context()); err != nil {
		t.Fatal(err)
	}
	named := map[int]rule{}
	for _, r := range rules() {
		named[r.number] = r
	}
	var messages atomic.Int32
	files := func(alter func(*repb.OutputFile)) func(*repb.ExecuteResponse) {
		return func(r *repb.ExecuteResponse) {
			for _, f := range r.GetResult().GetOutputFiles() {
				alter(f)
			}
		}
	}
	for _, test := range []struct {
		what string
		by   tampered
		want []int // the rules that must fail
	}{
		{"as it is", tampered{}, nil},
		{"a name that changes", tampered{alter: func(op *longrunningpb.Operation) {
			op.Name += strconv.Itoa(int(messages.Add(1)))
		}}, []int{88, 92}},
		{"no metadata", tampered{alter: func(op *longrunningpb.Operation) { op.Metadata = nil }}, []int{88, 89, 90}},
		{"metadata of another kind", tampered{alter: func(op *longrunningpb.Operation) {
			op.Metadata, _ = anypb.New(&repb.Digest{})
		}}, []int{88, 89, 90}},
		{"another action", tampered{alter: func(op *longrunningpb.Operation) {
			metadataOf(op, func(m *repb.ExecuteOperationMetadata) { m.ActionDigest = unseen(1) })
		}}, []int{88, 89}},
		{"EXECUTING first", tampered{alter: func(op *longrunningpb.Operation) {
			metadataOf(op, func(m *repb.ExecuteOperationMetadata) {
				if m.Stage < repb.ExecutionStage_COMPLETED {
					m.Stage = repb.ExecutionStage_EXECUTING
				}
			})
		}}, []int{88}},
		{"no EXECUTING", tampered{alter: func(op *longrunningpb.Operation) {
			metadataOf(op, func(m *repb.ExecuteOperationMetadata) {
				if m.Stage < repb.ExecutionStage_COMPLETED {
					m.Stage = repb.ExecutionStage_CACHE_CHECK
				}
			})
		}}, []int{89}},
		{"never done", tampered{alter: func(op *longrunningpb.Operation) { op.Done = false }}, []int{90}},
		{"done from the start", tampered{alter: func(op *longrunningpb.Operation) { op.Done = true }}, []int{88, 90}},
		{"COMPLETED is told as EXECUTING", tampered{alter: func(op *longrunningpb.Operation) {
			metadataOf(op, func(m *repb.ExecuteOperationMetadata) { m.Stage = min(m.Stage, repb.ExecutionStage_EXECUTING) })
		}}, []int{89, 90}},
		{"an error in the place of a response", tampered{alter: func(op *longrunningpb.Operation) {
			if op.Done {
				op.Result = &longrunningpb.Operation_Error{Error: &statuspb.Status{Code: 3}}
			}
		}}, []int{90, 94}},
		{"no result at all", tampered{alter: func(op *longrunningpb.Operation) { op.Result = nil }}, []int{90, 113}},
		{"one of the missing blobs", tampered{result: func(r *repb.ExecuteResponse) {
			details(r.GetStatus(), func(f *errdetails.PreconditionFailure) { f.Violations = f.Violations[:1] })
		}}, []int{72}},
		{"names without blobs/", tampered{result: func(r *repb.ExecuteResponse) {
			details(r.GetStatus(), func(f *errdetails.PreconditionFailure) {
				for _, v := range f.Violations {
					v.Subject = v.Subject[len("blobs/"):]
				}
			})
		}}, []int{70, 71, 72}},
		{"a violation of another type", tampered{result: func(r *repb.ExecuteResponse) {
			details(r.GetStatus(), func(f *errdetails.PreconditionFailure) { f.Violations[0].Type = "ABSENT" })
		}}, []int{70, 72}},
		{"a detail for people", tampered{result: func(r *repb.ExecuteResponse) {
			if any, err := anypb.New(&errdetails.DebugInfo{Detail: "x"}); err == nil && r.GetStatus() != nil {
				r.Status.Details = append(r.Status.Details, any)
			}
		}}, []int{70, 72, 85}},
		{"INTERNAL for what is invalid", tampered{result: func(r *repb.ExecuteResponse) {
			if r.GetStatus().GetCode() == int32(codes.InvalidArgument) {
				r.Status.Code = int32(codes.Internal)
			}
		}}, []int{70, 71, 74, 75, 76, 77, 79, 80, 81, 82}},
		{"no reason", tampered{result: func(r *repb.ExecuteResponse) {
			if r.Status != nil {
				r.Status.Message = ""
			}
		}}, []int{74, 77, 80, 85, 117}},
		{"everything is from the cache", tampered{result: func(r *repb.ExecuteResponse) { r.CachedResult = true }}, []int{94, 96, 120}},
		{"nothing is from the cache", tampered{result: func(r *repb.ExecuteResponse) { r.CachedResult = false }}, []int{94, 122}},
		{"skip_cache_lookup is overlooked", tampered{request: func(r *repb.ExecuteRequest) { r.SkipCacheLookup = false }}, []int{94}},
		{"the last output is lost", tampered{result: func(r *repb.ExecuteResponse) {
			if f := r.GetResult().GetOutputFiles(); len(f) > 0 {
				r.Result.OutputFiles = f[:len(f)-1]
			}
		}}, []int{77, 78, 100, 101, 111, 113, 119, 120}},
		{"nothing is executable", tampered{result: files(func(f *repb.OutputFile) { f.IsExecutable = false })}, []int{113}},
		{"outputs have digests of nothing", tampered{result: files(func(f *repb.OutputFile) { f.Digest = unseen(10) })}, []int{101, 108, 113, 119}},
		{"contents in the place of digests", tampered{result: files(func(f *repb.OutputFile) { f.Digest = nil })}, []int{113, 124}},
		{"paths from the input root", tampered{result: files(func(f *repb.OutputFile) { f.Path = "w/" + f.Path })}, []int{77, 113}},
		{"symlinks are lost", tampered{result: func(r *repb.ExecuteResponse) {
			if r.Result != nil {
				r.Result.OutputSymlinks = nil
			}
		}}, []int{111, 114}},
		{"old clients see no symlinks", tampered{result: func(r *repb.ExecuteResponse) {
			if r.Result != nil {
				r.Result.OutputFileSymlinks = nil
			}
		}}, []int{114}},
		{"another Tree", tampered{result: func(r *repb.ExecuteResponse) {
			for _, d := range r.GetResult().GetOutputDirectories() {
				d.TreeDigest = c.putProto(&repb.Tree{Root: &repb.Directory{}})
			}
		}}, []int{101, 107, 115, 116}},
		{"a Tree with holes", tampered{result: func(r *repb.ExecuteResponse) {
			for _, d := range r.GetResult().GetOutputDirectories() {
				var tree repb.Tree
				if d.TreeDigest == nil {
					continue
				}
				if proto.Unmarshal([]byte(c.get(d.TreeDigest)), &tree) == nil && len(tree.Children) > 0 {
					tree.Children = tree.Children[1:]
					d.TreeDigest = c.putProto(&tree)
				}
			}
		}}, []int{115}},
		{"a Tree upside down", tampered{result: func(r *repb.ExecuteResponse) {
			for _, d := range r.GetResult().GetOutputDirectories() {
				var tree repb.Tree
				if d.TreeDigest == nil {
					continue
				}
				if proto.Unmarshal([]byte(c.get(d.TreeDigest)), &tree) == nil {
					slices.Reverse(tree.Children)
					d.TreeDigest = c.putProto(&tree)
				}
			}
		}}, []int{115}},
		{"another root directory", tampered{result: func(r *repb.ExecuteResponse) {
			for _, d := range r.GetResult().GetOutputDirectories() {
				if d.RootDirectoryDigest != nil {
					d.RootDirectoryDigest = c.putProto(&repb.Directory{})
				}
			}
		}}, []int{115}},
		{"exit codes are 1", tampered{result: func(r *repb.ExecuteResponse) {
			if r.GetResult().GetExitCode() != 0 {
				r.Result.ExitCode = 1
			}
		}}, []int{102, 109, 118, 120}},
		{"failures are told as successes", tampered{result: func(r *repb.ExecuteResponse) {
			if r.Result != nil {
				r.Result.ExitCode = 0
			}
		}}, []int{102, 109, 120}},
		{"a status without the result", tampered{result: func(r *repb.ExecuteResponse) {
			if r.GetStatus().GetCode() != 0 {
				r.Result = nil
			}
		}}, []int{108}},
		{"a timeout is an exit code", tampered{result: func(r *repb.ExecuteResponse) {
			if r.GetStatus().GetCode() == int32(codes.DeadlineExceeded) {
				r.Status, r.Result.ExitCode = nil, 143
			}
		}}, []int{108}},
		{"silence", tampered{result: func(r *repb.ExecuteResponse) {
			if r.Result != nil {
				r.Result.StdoutRaw, r.Result.StdoutDigest = nil, nil
			}
		}}, []int{98, 103, 104, 105, 106, 118, 124}},
		{"no messages", tampered{result: func(r *repb.ExecuteResponse) { r.Message = "" }}, []int{109, 126}},
		{"nobody's work", tampered{result: func(r *repb.ExecuteResponse) {
			if m := r.GetResult().GetExecutionMetadata(); m != nil {
				m.Worker = ""
			}
		}}, []int{108, 121}},
		{"times out of order", tampered{result: func(r *repb.ExecuteResponse) {
			if m := r.GetResult().GetExecutionMetadata(); m != nil {
				m.WorkerStartTimestamp, m.ExecutionStartTimestamp = m.ExecutionStartTimestamp, m.WorkerStartTimestamp
			}
		}}, []int{121}},
		{"no times", tampered{result: func(r *repb.ExecuteResponse) {
			if m := r.GetResult().GetExecutionMetadata(); m != nil {
				m.QueuedTimestamp = nil
			}
		}}, []int{121}},
		{"empty results", tampered{result: func(r *repb.ExecuteResponse) { r.Result = &repb.ActionResult{} }}, []int{113, 120, 121, 122, 123}},
		{"hits get new metadata", tampered{result: func(r *repb.ExecuteResponse) {
			if m := r.GetResult().GetExecutionMetadata(); m != nil && r.CachedResult {
				m.Worker += " again"
			}
		}}, []int{94, 122}},
		{"logs that are not there", tampered{result: func(r *repb.ExecuteResponse) {
			for _, l := range r.GetServerLogs() {
				l.Digest = unseen(10)
			}
		}}, []int{125}},
		{"logs for nobody", tampered{result: func(r *repb.ExecuteResponse) {
			for _, l := range r.GetServerLogs() {
				l.HumanReadable = false
			}
		}}, []int{125}},
	} {
		t.Run(test.what, func(t *testing.T) {
			t.Parallel() // most of a check is waiting
			numbers := test.want
			if numbers == nil {
				numbers = []int{70, 72, 74, 77, 85, 88, 90, 94, 101, 109, 113, 114, 115, 120, 122, 125}
			}
			for _, n := range numbers {
				d := c.in(t)
				by := test.by
				by.ExecutionClient = c.exec
				d.exec = &by
				if got := d.judge(t, named[n]); (got.outcome == fail) != (test.want != nil) {
					t.Errorf("rule %d: got %s, %s", n, got.outcome, got.reason)
				}
			}
		})
	}
}
