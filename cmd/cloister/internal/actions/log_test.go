// SPDX-License-Identifier: Apache-2.0

package actions

import (
	"context"
	"errors"
	"strings"
	"testing"

	"cloud.google.com/go/longrunning/autogen/longrunningpb"
	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cmd/cloister/internal/client"
	"github.com/cloister-build/cloister/cmd/internal/exit"
	"github.com/cloister-build/cloister/tests/grpctest"
	"github.com/cloister-build/cloister/tests/must"
	bspb "google.golang.org/genproto/googleapis/bytestream"
	statuspb "google.golang.org/genproto/googleapis/rpc/status"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"
)

// A farm is a server with operations, results and texts that are what the test says.
type farm struct {
	repb.UnimplementedExecutionServer
	repb.UnimplementedActionCacheServer
	longrunningpb.UnimplementedOperationsServer
	bspb.UnimplementedByteStreamServer
	states  map[string][]*longrunningpb.Operation // of operations, in order
	lists   map[string]string                     // filter and instance to the name of an operation
	results map[string]*repb.ActionResult
	texts   map[string]string
}

func (f *farm) WaitExecution(req *repb.WaitExecutionRequest, to repb.Execution_WaitExecutionServer) error {
	for _, op := range f.states[req.Name] {
		if err := to.Send(op); err != nil {
			return err
		}
	}
	if f.states[req.Name] == nil {
		return status.Error(codes.NotFound, "no such operation")
	}
	return nil
}

func (f *farm) ListOperations(_ context.Context, req *longrunningpb.ListOperationsRequest) (*longrunningpb.ListOperationsResponse, error) {
	if f.lists == nil {
		return nil, status.Error(codes.Unimplemented, "no lists")
	}
	r := &longrunningpb.ListOperationsResponse{}
	if name := f.lists[req.Filter+" in "+req.Name]; name != "" {
		ops := f.states[name]
		r.Operations = append(r.Operations, ops[0])
	}
	return r, nil
}

func (f *farm) GetActionResult(_ context.Context, req *repb.GetActionResultRequest) (*repb.ActionResult, error) {
	if r := f.results[req.InstanceName+" "+req.ActionDigest.Hash]; r != nil {
		return r, nil
	}
	return nil, status.Error(codes.NotFound, "no result")
}

func (f *farm) Read(req *bspb.ReadRequest, to bspb.ByteStream_ReadServer) error {
	text, ok := f.texts[req.ResourceName]
	if !ok {
		return status.Error(codes.NotFound, "no such resource")
	}
	for _, c := range []byte(text) {
		if err := to.Send(&bspb.ReadResponse{Data: []byte{c}}); err != nil {
			return err
		}
	}
	return nil
}

// serve returns the address of f, which ends with the test.
func (f *farm) serve(t *testing.T) string {
	t.Helper()
	s := grpc.NewServer()
	repb.RegisterExecutionServer(s, f)
	repb.RegisterActionCacheServer(s, f)
	longrunningpb.RegisterOperationsServer(s, f)
	bspb.RegisterByteStreamServer(s, f)
	return "grpc://" + grpctest.Listen(t, s)
}

func packed(t *testing.T, m proto.Message) *anypb.Any {
	t.Helper()
	return must.Get(anypb.New(m))(t)
}

func TestLogFindsOutput(t *testing.T) {
	text := func(s string) *repb.Digest { return cas.SHA256.Sum([]byte(s)).Proto() }
	names := func(s string) string { return cas.SHA256.Sum([]byte(s)).Resource() }
	at := func(name string, stage repb.ExecutionStage_Value, stdout string) *longrunningpb.Operation {
		return &longrunningpb.Operation{Name: name, Metadata: packed(t, &repb.ExecuteOperationMetadata{
			Stage: stage, StdoutStreamName: stdout, DigestFunction: repb.DigestFunction_SHA256,
		})}
	}
	ended := func(name string, r *repb.ExecuteResponse) *longrunningpb.Operation {
		op := at(name, repb.ExecutionStage_COMPLETED, "")
		op.Done, op.Result = true, &longrunningpb.Operation_Response{Response: packed(t, r)}
		return op
	}
	failed := &repb.ExecuteResponse{Result: &repb.ActionResult{ExitCode: 1, StdoutDigest: text("it failed"), StderrRaw: []byte("why")}}
	known, running, broken := cas.SHA256.Sum([]byte("known")), cas.SHA256.Sum([]byte("running")), cas.SHA256.Sum([]byte("broken"))
	f := &farm{
		states: map[string][]*longrunningpb.Operation{
			"waits":         {at("waits", repb.ExecutionStage_QUEUED, ""), at("waits", repb.ExecutionStage_EXECUTING, "logstreams/1")},
			"silent":        {at("silent", repb.ExecutionStage_EXECUTING, ""), ended("silent", failed)},
			"failed":        {ended("failed", failed)},
			"i/operations/": {ended("i/operations/", failed)},
			"lost":          {ended("lost", &repb.ExecuteResponse{Status: &statuspb.Status{Code: 14, Message: "the worker died"}})},
			"unsaid":        {at("unsaid", repb.ExecutionStage_EXECUTING, "")},
			"other":         {at("other", repb.ExecutionStage_EXECUTING, "logstreams/2")},
		},
		lists: map[string]string{
			"action=" + known.String() + " stage=EXECUTING in ":   "other",
			"action=" + running.String() + " in i":                "waits",
			"action=" + broken.String() + " in ":                  "failed",
			"action=" + broken.String() + " stage=EXECUTING in i": "",
		},
		results: map[string]*repb.ActionResult{
			" " + known.Hash():  {StdoutDigest: text("recorded"), StderrDigest: text("")},
			"i " + known.Hash(): {StdoutDigest: text("in i")},
		},
		texts: map[string]string{
			"logstreams/1": "live", "logstreams/2": "again", names("recorded"): "recorded", names("it failed"): "it failed",
			"i/" + names("in i"): "in i", "i/" + names("it failed"): "failed in i",
		},
	}
	address := f.serve(t)
	for _, c := range []struct {
		name           string
		follow, stderr bool
		instance       string
		want           string
		code           int
	}{
		{"waits", true, false, "", "live", 0},
		{"waits", false, false, "", "", exit.No},
		{"silent", true, false, "", "it failed", 0}, // a server without streams
		{"failed", false, false, "", "it failed", 0},
		{"failed", true, true, "", "why", 0},
		{"i/operations/", false, false, "", "failed in i", 0},
		{"lost", true, false, "", "", exit.No},
		{"unsaid", true, false, "", "", exit.Unreachable},
		{"unknown", true, false, "", "", exit.Absent},
		{known.String(), false, false, "", "recorded", 0},
		{known.String(), false, true, "", "", 0},
		{known.String(), true, false, "", "again", 0}, // it runs once more
		{known.String(), false, false, "i", "in i", 0},
		{running.String(), true, false, "i", "live", 0},
		{running.String(), false, false, "i", "", exit.No},
		{running.String(), true, false, "", "", exit.Absent},
		{broken.String(), false, false, "", "it failed", 0},
		{broken.String(), true, true, "", "why", 0},
	} {
		l := Log{From: client.Server{Address: address, Instance: c.instance}, Follow: c.follow, Stderr: c.stderr}
		var out strings.Builder
		err := l.Print(t.Context(), c.name, &out)
		code := 0
		if e, ok := errors.AsType[*exit.Error](err); ok {
			code = e.Code
		}
		if out.String() != c.want || code != c.code || (err == nil) != (c.code == 0) {
			t.Errorf("%s, follow %v, stderr %v, instance %q: %q and %v with code %d, want %q and code %d",
				c.name, c.follow, c.stderr, c.instance, out.String(), err, code, c.want, c.code)
		}
	}
	f.lists = nil
	l := Log{From: client.Server{Address: address + "/i"}, Follow: true}
	var out strings.Builder
	if err := l.Print(t.Context(), known.String(), &out); err != nil || out.String() != "in i" {
		t.Errorf("without lists: %q, %v", out.String(), err)
	}
}
