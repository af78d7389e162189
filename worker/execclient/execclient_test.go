// SPDX-License-Identifier: Apache-2.0

package execclient_test

import (
	"context"
	"net"
	"testing"

	"cloud.google.com/go/longrunning/autogen/longrunningpb"
	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/memory"
	"github.com/cloister-build/cloister/worker"
	"github.com/cloister-build/cloister/worker/execclient"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/test/bufconn"
	"google.golang.org/protobuf/types/known/anypb"
)

func TestNewRefusesMistakes(t *testing.T) {
	if _, err := execclient.New(nil, ""); err == nil {
		t.Error("New accepted a nil connection")
	}
	if _, err := execclient.New(&grpc.ClientConn{}, "blobs"); err == nil {
		t.Error("New accepted a reserved word as an instance")
	}
}

// exits is a server on which each action exits with 7.
type exits struct {
	repb.UnimplementedExecutionServer
}

func (exits) Execute(req *repb.ExecuteRequest, to grpc.ServerStreamingServer[longrunningpb.Operation]) error {
	response, err := anypb.New(&repb.ExecuteResponse{
		Result: &repb.ActionResult{ExitCode: 7, StdoutRaw: []byte(req.InstanceName)}, CachedResult: !req.SkipCacheLookup,
	})
	if err != nil {
		return err
	}
	if err := to.Send(&longrunningpb.Operation{}); err != nil {
		return err
	}
	return to.Send(&longrunningpb.Operation{Done: true, Result: &longrunningpb.Operation_Response{Response: response}})
}

// TestExecuteSkipsTheCache: the server executes the action in the instance of the Client, and a failed action is an
// Outcome.
func TestExecuteSkipsTheCache(t *testing.T) {
	listener, g := bufconn.Listen(1<<20), grpc.NewServer()
	repb.RegisterExecutionServer(g, exits{})
	done := make(chan struct{})
	go func() { _ = g.Serve(listener); close(done) }()
	defer func() { g.Stop(); <-done }()
	conn, err := grpc.NewClient("passthrough:///server", grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) { return listener.DialContext(ctx) }))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	c, err := execclient.New(conn, "main")
	if err != nil {
		t.Fatal(err)
	}
	out, err := c.Execute(t.Context(), &worker.Task{Action: cas.SHA256.Sum([]byte("x"))}, nil)
	if _, err := c.Execute(t.Context(), &worker.Task{Action: cas.SHA256.Sum(nil), Root: cas.SHA256.Sum(nil)}, nil); err == nil {
		t.Error("a task with a root file system, which the server would ignore, was executed")
	}
	if err != nil || out.Result.ExitCode != 7 || string(out.Result.StdoutRaw) != "main" {
		t.Errorf("got %+v, %v, want exit code 7 in instance main", out, err)
	}
}

// TestUploadIsUncacheableAndComplete: the store has the command, the inputs and an action with do_not_cache.
func TestUploadIsUncacheableAndComplete(t *testing.T) {
	ctx, from, to := t.Context(), memory.New(0), memory.New(0)
	file, err := cas.PutBytes(ctx, from, cas.SHA256, []byte("input"))
	if err != nil {
		t.Fatal(err)
	}
	root, err := cas.PutProto(ctx, from, cas.SHA256, &repb.Directory{Files: []*repb.FileNode{{Name: "a", Digest: file.Proto()}}})
	if err != nil {
		t.Fatal(err)
	}
	command, err := cas.PutProto(ctx, from, cas.SHA256, &repb.Command{Arguments: []string{"true"}})
	if err != nil {
		t.Fatal(err)
	}
	action, err := cas.PutProto(ctx, from, cas.SHA256, &repb.Action{CommandDigest: command.Proto(), InputRootDigest: root.Proto()})
	if err != nil {
		t.Fatal(err)
	}
	there, err := execclient.Upload(ctx, from, to, action)
	if err != nil {
		t.Fatal(err)
	}
	var a repb.Action
	if err := cas.ReadProto(ctx, to, there, &a); err != nil || !a.DoNotCache {
		t.Errorf("got action %v, %v, want do_not_cache", &a, err)
	}
	if missing, err := to.Missing(ctx, []cas.Digest{file, root, command}); err != nil || len(missing) > 0 {
		t.Errorf("got %v missing, %v, want none", missing, err)
	}
}
