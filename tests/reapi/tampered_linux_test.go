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
	"github.com/cloister-build/cloister/tests/must"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	statuspb "google.golang.org/genproto/googleapis/rpc/status"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"
)

// A tampered service is an Execution service whose operations change on their way to the client, like those of a faulty
// server. Its functions may be nil.
type tampered struct {
	repb.ExecutionClient
	request   func(*repb.ExecuteRequest)
	operation func(*longrunningpb.Operation)
	response  func(*repb.ExecuteResponse)
}

func (t *tampered) Execute(
	ctx context.Context, req *repb.ExecuteRequest, opts ...grpc.CallOption,
) (repb.Execution_ExecuteClient, error) {
	if t.request != nil {
		req = proto.CloneOf(req)
		t.request(req)
	}
	s, err := t.ExecutionClient.Execute(ctx, req, opts...)
	return &tamperedStream{s, t}, err
}

func (t *tampered) WaitExecution(
	ctx context.Context, req *repb.WaitExecutionRequest, opts ...grpc.CallOption,
) (repb.Execution_WaitExecutionClient, error) {
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
	if s.by.response != nil && op.GetDone() {
		var r repb.ExecuteResponse
		if err := op.GetResponse().UnmarshalTo(&r); err != nil {
			return nil, err
		}
		s.by.response(&r)
		op.Result = &longrunningpb.Operation_Response{Response: packed(&r)}
	}
	if s.by.operation != nil {
		s.by.operation(op)
	}
	return op, nil
}

// packed returns m as an Any.
func packed(m proto.Message) *anypb.Any {
	a, err := anypb.New(m)
	if err != nil {
		panic(err) // only an invalid message fails
	}
	return a
}

// operations changes each operation.
func operations(change func(*longrunningpb.Operation)) tampered { return tampered{operation: change} }

// stages changes the metadata of each operation.
func stages(change func(*repb.ExecuteOperationMetadata)) tampered {
	return operations(func(op *longrunningpb.Operation) {
		if m, err := stageOf(op); err == nil {
			change(m)
			op.Metadata = packed(m)
		}
	})
}

// responses changes the response.
func responses(change func(*repb.ExecuteResponse)) tampered { return tampered{response: change} }

// results changes the result, if there is one.
func results(change func(*repb.ActionResult)) tampered {
	return responses(func(r *repb.ExecuteResponse) {
		if r.Result != nil {
			change(r.Result)
		}
	})
}

// metadataOfResults changes the metadata of the result, if there is any.
func metadataOfResults(change func(*repb.ExecutedActionMetadata)) tampered {
	return results(func(r *repb.ActionResult) {
		if r.ExecutionMetadata != nil {
			change(r.ExecutionMetadata)
		}
	})
}

// files changes each output file.
func files(change func(*repb.OutputFile)) tampered {
	return results(func(r *repb.ActionResult) {
		for _, f := range r.OutputFiles {
			change(f)
		}
	})
}

// directories changes each output directory.
func directories(change func(*repb.OutputDirectory)) tampered {
	return results(func(r *repb.ActionResult) {
		for _, d := range r.OutputDirectories {
			change(d)
		}
	})
}

// tamperedTrees changes the Tree of each output directory.
func (c *client) tamperedTrees(change func(*repb.Tree)) tampered {
	return directories(func(d *repb.OutputDirectory) {
		var tree repb.Tree
		if d.TreeDigest != nil && proto.Unmarshal([]byte(c.get(d.TreeDigest)), &tree) == nil {
			change(&tree)
			d.TreeDigest = c.putProto(&tree)
		}
	})
}

// missingBlobs changes the missing blobs of a status.
func missingBlobs(change func(*errdetails.PreconditionFailure)) tampered {
	return responses(func(r *repb.ExecuteResponse) {
		for i, d := range r.GetStatus().GetDetails() {
			var f errdetails.PreconditionFailure
			if d.UnmarshalTo(&f) == nil {
				change(&f)
				r.Status.Details[i] = packed(&f)
			}
		}
	})
}

// TestRulesDetectFaultyExecution checks that the rules fail on faulty servers, and only on those.
func TestRulesDetectFaultyExecution(t *testing.T) {
	t.Parallel()
	c := connect(t, bazelrun.ServerConfig{Dir: filepath.Join(t.TempDir(), "store"), Jobs: 8})
	c.ours = true
	must.Succeed(t, c.getCapabilities(t.Context()))
	named := map[int]rule{}
	for _, r := range rules() {
		named[r.number] = r
	}
	var messages atomic.Int32
	for _, test := range []struct {
		fault string
		by    tampered
		want  []int // the rules that must fail
	}{
		{"no fault", tampered{}, nil},
		{"the name changes", operations(func(op *longrunningpb.Operation) {
			op.Name += strconv.Itoa(int(messages.Add(1)))
		}), []int{88, 92}},
		{"no metadata", operations(func(op *longrunningpb.Operation) { op.Metadata = nil }), []int{88, 89, 90}},
		{"metadata of another type", operations(func(op *longrunningpb.Operation) {
			op.Metadata = packed(&repb.Digest{})
		}), []int{88, 89, 90}},
		{"another action", stages(func(m *repb.ExecuteOperationMetadata) { m.ActionDigest = absentDigest(1) }), []int{88, 89}},
		{"EXECUTING first", stages(func(m *repb.ExecuteOperationMetadata) {
			if m.Stage < repb.ExecutionStage_COMPLETED {
				m.Stage = repb.ExecutionStage_EXECUTING
			}
		}), []int{88}},
		{"no EXECUTING", stages(func(m *repb.ExecuteOperationMetadata) {
			if m.Stage < repb.ExecutionStage_COMPLETED {
				m.Stage = repb.ExecutionStage_CACHE_CHECK
			}
		}), []int{89}},
		{"never done", operations(func(op *longrunningpb.Operation) { op.Done = false }), []int{90}},
		{"done from the start", operations(func(op *longrunningpb.Operation) { op.Done = true }), []int{88, 90}},
		{"COMPLETED is reported as EXECUTING", stages(func(m *repb.ExecuteOperationMetadata) {
			m.Stage = min(m.Stage, repb.ExecutionStage_EXECUTING)
		}), []int{89, 90}},
		{"an error instead of a response", operations(func(op *longrunningpb.Operation) {
			if op.Done {
				op.Result = &longrunningpb.Operation_Error{Error: &statuspb.Status{Code: 3}}
			}
		}), []int{90, 94}},
		{"no result", operations(func(op *longrunningpb.Operation) { op.Result = nil }), []int{90, 113}},
		{"only one missing blob", missingBlobs(func(f *errdetails.PreconditionFailure) {
			f.Violations = f.Violations[:1]
		}), []int{72}},
		{"subjects without blobs/", missingBlobs(func(f *errdetails.PreconditionFailure) {
			for _, v := range f.Violations {
				v.Subject = v.Subject[len("blobs/"):]
			}
		}), []int{70, 71, 72}},
		{"another violation type", missingBlobs(func(f *errdetails.PreconditionFailure) {
			f.Violations[0].Type = "ABSENT"
		}), []int{70, 72}},
		{"an additional detail", responses(func(r *repb.ExecuteResponse) {
			if r.Status != nil {
				r.Status.Details = append(r.Status.Details, packed(&errdetails.DebugInfo{Detail: "x"}))
			}
		}), []int{70, 72, 85}},
		{"INTERNAL instead of INVALID_ARGUMENT", responses(func(r *repb.ExecuteResponse) {
			if r.GetStatus().GetCode() == int32(codes.InvalidArgument) {
				r.Status.Code = int32(codes.Internal)
			}
		}), []int{70, 71, 74, 75, 76, 77, 79, 80, 81, 82}},
		{"no reason", responses(func(r *repb.ExecuteResponse) {
			if r.Status != nil {
				r.Status.Message = ""
			}
		}), []int{74, 77, 80, 85, 117}},
		{"cached_result is always set", responses(func(r *repb.ExecuteResponse) { r.CachedResult = true }), []int{94, 96, 120}},
		{"cached_result is never set", responses(func(r *repb.ExecuteResponse) { r.CachedResult = false }), []int{94, 122}},
		{"skip_cache_lookup is ignored", tampered{request: func(r *repb.ExecuteRequest) { r.SkipCacheLookup = false }}, []int{94}},
		{"the last output is lost", results(func(r *repb.ActionResult) {
			r.OutputFiles = dropLast(r.OutputFiles)
		}), []int{77, 78, 100, 101, 111, 113, 119, 120}},
		{"no output is executable", files(func(f *repb.OutputFile) { f.IsExecutable = false }), []int{113}},
		{"outputs have digests of absent blobs", files(func(f *repb.OutputFile) {
			f.Digest = absentDigest(10)
		}), []int{101, 108, 113, 119}},
		{"outputs have no digests", files(func(f *repb.OutputFile) { f.Digest = nil }), []int{113, 124}},
		{"paths are relative to the input root", files(func(f *repb.OutputFile) { f.Path = "w/" + f.Path }), []int{77, 113}},
		{"output_symlinks is empty", results(func(r *repb.ActionResult) { r.OutputSymlinks = nil }), []int{111, 114}},
		{"output_file_symlinks is empty", results(func(r *repb.ActionResult) { r.OutputFileSymlinks = nil }), []int{114}},
		{"another Tree", directories(func(d *repb.OutputDirectory) {
			d.TreeDigest = c.putProto(&repb.Tree{Root: &repb.Directory{}})
		}), []int{101, 107, 115, 116}},
		{"a Tree lacks a child", c.tamperedTrees(func(t *repb.Tree) {
			if len(t.Children) > 0 {
				t.Children = t.Children[1:]
			}
		}), []int{115}},
		{"a Tree is not sorted topologically", c.tamperedTrees(func(t *repb.Tree) { slices.Reverse(t.Children) }), []int{115}},
		{"another root directory", directories(func(d *repb.OutputDirectory) {
			if d.RootDirectoryDigest != nil {
				d.RootDirectoryDigest = c.putProto(&repb.Directory{})
			}
		}), []int{115}},
		{"all failures have exit code 1", results(func(r *repb.ActionResult) {
			r.ExitCode = min(max(r.ExitCode, -r.ExitCode), 1)
		}), []int{102, 109, 118, 120}},
		{"failures have exit code 0", results(func(r *repb.ActionResult) { r.ExitCode = 0 }), []int{102, 109, 120}},
		{"a failed status has no result", responses(func(r *repb.ExecuteResponse) {
			if r.GetStatus().GetCode() != 0 {
				r.Result = nil
			}
		}), []int{108}},
		{"a timeout is an exit code", responses(func(r *repb.ExecuteResponse) {
			if r.GetStatus().GetCode() == int32(codes.DeadlineExceeded) {
				r.Status, r.Result.ExitCode = nil, 143
			}
		}), []int{108}},
		{"stdout is lost", results(func(r *repb.ActionResult) {
			r.StdoutRaw, r.StdoutDigest = nil, nil
		}), []int{98, 103, 104, 105, 106, 118, 124}},
		{"no message", responses(func(r *repb.ExecuteResponse) { r.Message = "" }), []int{109, 126}},
		{"no worker", metadataOfResults(func(m *repb.ExecutedActionMetadata) { m.Worker = "" }), []int{108, 121}},
		{"timestamps are out of order", metadataOfResults(func(m *repb.ExecutedActionMetadata) {
			m.WorkerStartTimestamp, m.ExecutionStartTimestamp = m.ExecutionStartTimestamp, m.WorkerStartTimestamp
		}), []int{121}},
		{"execution ends when it starts", metadataOfResults(func(m *repb.ExecutedActionMetadata) {
			m.ExecutionCompletedTimestamp, m.VirtualExecutionDuration = m.ExecutionStartTimestamp, nil
		}), []int{121}},
		{"a timestamp is missing", metadataOfResults(func(m *repb.ExecutedActionMetadata) { m.QueuedTimestamp = nil }), []int{121}},
		{"results are empty", responses(func(r *repb.ExecuteResponse) {
			r.Result = &repb.ActionResult{}
		}), []int{113, 120, 121, 122, 123}},
		{"cache hits have new metadata", responses(func(r *repb.ExecuteResponse) {
			if m := r.GetResult().GetExecutionMetadata(); m != nil && r.CachedResult {
				m.Worker += " again"
			}
		}), []int{94, 122}},
		{"server logs are absent", responses(func(r *repb.ExecuteResponse) {
			for _, l := range r.ServerLogs {
				l.Digest = absentDigest(10)
			}
		}), []int{125}},
		{"server logs are not human-readable", responses(func(r *repb.ExecuteResponse) {
			for _, l := range r.ServerLogs {
				l.HumanReadable = false
			}
		}), []int{125}},
	} {
		t.Run(test.fault, func(t *testing.T) {
			t.Parallel() // checks spend most of their time waiting
			numbers := test.want
			if numbers == nil {
				numbers = []int{70, 72, 74, 77, 85, 88, 90, 94, 101, 109, 113, 114, 115, 120, 122, 125}
			}
			for _, n := range numbers {
				d := c.in(t)
				by := test.by
				by.ExecutionClient = c.exec
				d.exec = &by
				if got := d.evaluate(t, named[n]); (got.outcome == fail) != (test.want != nil) {
					t.Errorf("rule %d: got %s, %s; want failure %v", n, got.outcome, got.reason, test.want != nil)
				}
			}
		})
	}
}
