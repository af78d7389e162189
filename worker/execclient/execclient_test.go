// SPDX-License-Identifier: Apache-2.0

package execclient_test

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"cloud.google.com/go/longrunning/autogen/longrunningpb"
	"github.com/bazelbuild/remote-apis-sdks/go/pkg/retry"
	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/memory"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/grpctest"
	"github.com/cloister-build/cloister/tests/must"
	"github.com/cloister-build/cloister/worker"
	"github.com/cloister-build/cloister/worker/execclient"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"
)

func TestNewRefusesMistakes(t *testing.T) {
	expect.That(t, expect.Err(execclient.New(nil, "")) != nil, "New accepted a nil connection")
	expect.That(t, expect.Err(execclient.New(&grpc.ClientConn{}, "blobs")) != nil,
		"New accepted a reserved word as an instance")
}

// TestNilTaskIsAFault that names the Task.
func TestNilTaskIsAFault(t *testing.T) {
	_, err := must.Get(execclient.New(&grpc.ClientConn{}, ""))(t).Execute(t.Context(), nil, nil)
	if f, ok := errors.AsType[*worker.Fault](err); !ok || f.Kind != worker.FaultInvalid || !strings.Contains(err.Error(), "the Task is missing") {
		t.Errorf("got %v, want a fault that names the Task", err)
	}
}

// A server answers the calls of Execution in order. Each answer is a list of operations, and the error that ends the
// stream.
type server struct {
	repb.UnimplementedExecutionServer
	answers []answer
	calls   []string
}

type answer struct {
	ops  []*longrunningpb.Operation
	err  error
	open bool // the stream does not end after ops
}

func (s *server) next(call string, to grpc.ServerStreamingServer[longrunningpb.Operation]) error {
	s.calls = append(s.calls, call)
	if len(s.answers) == 0 {
		return status.Error(codes.Internal, "unexpected call")
	}
	a := s.answers[0]
	s.answers = s.answers[1:]
	for _, op := range a.ops {
		if err := to.Send(op); err != nil {
			return err
		}
	}
	if a.open {
		<-to.Context().Done()
	}
	return a.err
}

func (s *server) Execute(req *repb.ExecuteRequest, to grpc.ServerStreamingServer[longrunningpb.Operation]) error {
	var described repb.RequestMetadata
	for _, m := range metadata.ValueFromIncomingContext(to.Context(), "build.bazel.remote.execution.v2.requestmetadata-bin") {
		if err := proto.Unmarshal([]byte(m), &described); err != nil {
			return err
		}
	}
	if described.TargetId != "//a:b" || described.ActionMnemonic != "Make" {
		return status.Error(codes.Internal, "the request does not name target and mnemonic, which select a rule of the policy")
	}
	if !req.SkipCacheLookup || req.DigestFunction != repb.DigestFunction_BLAKE3 {
		return status.Error(codes.Internal, "wrong request")
	}
	return s.next("Execute in "+req.InstanceName, to)
}

func (s *server) WaitExecution(req *repb.WaitExecutionRequest, to grpc.ServerStreamingServer[longrunningpb.Operation]) error {
	return s.next("WaitExecution of "+req.Name, to)
}

// execute executes an action on a server with these answers, and returns the calls that the server received.
func execute(t *testing.T, answers ...answer) (*worker.Outcome, []string, error) {
	t.Helper()
	now := make(chan time.Time)
	close(now)
	return executeIn(context.WithValue(t.Context(), retry.TimeAfterContextKey, func(time.Duration) <-chan time.Time { return now }), t, answers...)
}

func executeIn(ctx context.Context, t *testing.T, answers ...answer) (*worker.Outcome, []string, error) {
	t.Helper()
	g, s := grpc.NewServer(), &server{answers: answers}
	repb.RegisterExecutionServer(g, s)
	c := must.Get(execclient.New(grpctest.Connect(t, g), "main"))(t)
	out, err := c.Execute(ctx, &worker.Task{Action: cas.BLAKE3.Sum([]byte("x")), Target: "//a:b", Mnemonic: "Make"}, nil)
	g.Stop() // the calls have ended
	return out, s.calls, err
}

// running and exited are states of an operation.
var running = &longrunningpb.Operation{Name: "op"}

func exited(t *testing.T, r *repb.ExecuteResponse) *longrunningpb.Operation {
	t.Helper()
	response := must.Get(anypb.New(r))(t)
	return &longrunningpb.Operation{Name: "op", Done: true, Result: &longrunningpb.Operation_Response{Response: response}}
}

// TestExecute: a failed action is an Outcome. After a lost connection, a running action is not executed again, and one
// that the server has forgotten is.
func TestExecute(t *testing.T) {
	ended := answer{ops: []*longrunningpb.Operation{running, exited(t, &repb.ExecuteResponse{Result: &repb.ActionResult{ExitCode: 7}})}}
	begun := answer{ops: []*longrunningpb.Operation{running}}
	broken := answer{ops: begun.ops, err: status.Error(codes.Unavailable, "connection lost")}
	busy := answer{err: status.Error(codes.ResourceExhausted, "queue is full")}
	full := answer{ops: []*longrunningpb.Operation{exited(t, &repb.ExecuteResponse{Status: status.New(codes.ResourceExhausted, "disk is full").Proto()})}}
	lost := answer{err: status.Error(codes.NotFound, "no such operation")}
	late := answer{ops: ended.ops, err: status.Error(codes.Unavailable, "connection lost after the end")}
	empty := answer{}
	const start, wait = "Execute in main", "WaitExecution of op"
	for name, c := range map[string]struct {
		answers []answer
		calls   []string
	}{
		"once":                   {[]answer{ended}, []string{start}},
		"busy server":            {[]answer{busy, full, ended}, []string{start, start, start}},
		"lost connection":        {[]answer{broken, broken, ended}, []string{start, wait, wait}},
		"restarted server":       {[]answer{broken, lost, ended}, []string{start, wait, start}},
		"stream without its end": {[]answer{begun, ended}, []string{start, wait}},
		"empty stream":           {[]answer{empty, ended}, []string{start, start}},
		"lost after the end":     {[]answer{late}, []string{start}},
		"open after the end":     {[]answer{{ops: ended.ops, open: true}}, []string{start}},
	} {
		t.Run(name, func(t *testing.T) {
			out, calls, err := execute(t, c.answers...)
			expect.That(t, err == nil && out.Result.ExitCode == 7 && slices.Equal(calls, c.calls),
				"got %+v, %v, after %q; want exit code 7 after %q", out, err, calls, c.calls)
		})
	}
}

// TestExecuteFails: without an outcome, Execute returns a Fault with the reason, after a bounded number of attempts.
func TestExecuteFails(t *testing.T) {
	huge := exited(t, &repb.ExecuteResponse{Message: strings.Repeat("x", 5<<20)})
	for want, answers := range map[string][]answer{
		`Internal: "broken"`:      {{err: status.Error(codes.Internal, "broken")}},
		`NotFound: "nothing"`:     slices.Repeat([]answer{{err: status.Error(codes.NotFound, "nothing")}}, 2),
		`the stream ended`:        slices.Repeat([]answer{{ops: []*longrunningpb.Operation{running}}}, 6),
		`Unavailable: "retry bud`: slices.Repeat([]answer{{err: status.Error(codes.Unavailable, "down")}}, 6),
		`larger than max`:         slices.Repeat([]answer{{ops: []*longrunningpb.Operation{huge}}}, 6),
		`from its cache`:          {{ops: []*longrunningpb.Operation{exited(t, &repb.ExecuteResponse{Result: &repb.ActionResult{}, CachedResult: true})}}},
	} {
		out, calls, err := execute(t, answers...)
		expect.That(t, err != nil && strings.Contains(err.Error(), want) && len(calls) == len(answers),
			"got %+v, %v, after %d calls; want %s after %d", out, err, len(calls), want, len(answers))
	}
}

// TestCancelledWhileBusy: a call that ends while the client waits to repeat it is cancelled, whatever the server said
// before.
func TestCancelledWhileBusy(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	ctx = context.WithValue(ctx, retry.TimeAfterContextKey, func(time.Duration) <-chan time.Time { cancel(); return nil })
	full := exited(t, &repb.ExecuteResponse{Status: status.New(codes.ResourceExhausted, "disk is full").Proto()})
	_, _, err := executeIn(ctx, t, answer{ops: []*longrunningpb.Operation{full}})
	if f, ok := errors.AsType[*worker.Fault](err); !ok || f.Kind != worker.FaultCancelled || !errors.Is(err, context.Canceled) {
		t.Errorf("got %v, want a fault of kind cancelled", err)
	}
}

// TestExecuteRefusesRoots: the server would ignore the root file system of a task.
func TestExecuteRefusesRoots(t *testing.T) {
	c := must.Get(execclient.New(&grpc.ClientConn{}, ""))(t)
	if _, err := c.Execute(t.Context(), &worker.Task{Action: cas.SHA256.Sum(nil), Root: cas.SHA256.Sum(nil)}, nil); err == nil {
		t.Error("a task with a root file system was executed")
	}
}

// TestUploadIsUncacheableAndComplete: the store has the command, the inputs and an action with do_not_cache.
func TestUploadIsUncacheableAndComplete(t *testing.T) {
	ctx, from, to := t.Context(), memory.New(0), memory.New(0)
	file := must.Get(cas.PutBytes(ctx, from, cas.SHA256, []byte("input")))(t)
	root, err := cas.PutProto(ctx, from, cas.SHA256, &repb.Directory{Files: []*repb.FileNode{{Name: "a", Digest: file.Proto()}}})
	must.Succeed(t, err)
	command := must.Get(cas.PutProto(ctx, from, cas.SHA256, &repb.Command{Arguments: []string{"true"}}))(t)
	action, err := cas.PutProto(ctx, from, cas.SHA256, &repb.Action{CommandDigest: command.Proto(), InputRootDigest: root.Proto()})
	must.Succeed(t, err)
	there := must.Get(execclient.Upload(ctx, from, to, action))(t)
	var a repb.Action
	if err := cas.ReadProto(ctx, to, there, &a); err != nil || !a.DoNotCache {
		t.Errorf("got action %v, %v, want do_not_cache", &a, err)
	}
	expect.Equal(t, len(must.Get(to.Missing(ctx, []cas.Digest{file, root, command}))(t)), 0)
}
