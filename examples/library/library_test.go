// SPDX-License-Identifier: Apache-2.0

// Package library_test builds and runs the programs in the directories below. With CGO_ENABLED=1 they have the race
// detector, as its caller should. They need a sandbox.
package library_test

import (
	"bytes"
	"context"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/casserver"
	"github.com/cloister-build/cloister/cas/memory"
	"github.com/cloister-build/cloister/cas/remote"
	"github.com/cloister-build/cloister/worker"
	"github.com/cloister-build/cloister/worker/execclient"
	"github.com/cloister-build/cloister/worker/service"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
)

func TestRun(t *testing.T) {
	want(t, "run", "apple\npear\nexit code 3\ndenied: write to /in/words (read-only) by sh (openat)\n")
}

func TestDecorator(t *testing.T) {
	want(t, "decorator", "hello full: false\nworld full: true\nabc full: false\nsplices: true hidden: []\n")
}

func TestRepro(t *testing.T) {
	want(t, "repro", "echo hello > out: same\nhostname > out: differs\nout hostname [hostname]\n")
}

// The services execute an action, and the program's own service answers on the same server.
func TestServices(t *testing.T) {
	address := freeAddress(t)
	stop := start(t, "services", address, t.TempDir())
	if got := execute(t, address); got != "hello\n" {
		t.Errorf("action: got %q, want hello", got)
	}
	if _, err := healthpb.NewHealthClient(dial(t, address)).Check(t.Context(), &healthpb.HealthCheckRequest{}); err != nil {
		t.Errorf("the program's own service: %v", err)
	}
	stop()
}

// The embedded worker executes an action for a head without a sandbox.
func TestWorker(t *testing.T) {
	store := memory.New(1 << 30)
	head, err := service.NewServer(t.Context(), service.Config{Worker: worker.Config{
		Name: "head", Instances: func(string) (*cas.Instance, error) { return &cas.Instance{Store: store, Actions: store}, nil },
	}})
	if err != nil {
		t.Fatal(err)
	}
	clients, workers := serve(t, head.Register), serve(t, head.RegisterWorkers)
	stop := start(t, "worker", workers)
	if got := execute(t, clients); got != "hello\n" {
		t.Errorf("action: got %q, want hello", got)
	}
	stop()
	if err := head.Close(); err != nil {
		t.Error(err)
	}
}

// build compiles a program and returns its path.
func build(t *testing.T, name string) string {
	t.Helper()
	file := filepath.Join(t.TempDir(), name)
	args := []string{"build", "-o", file}
	if os.Getenv("CGO_ENABLED") == "1" {
		args = append(args, "-race")
	}
	if out, err := exec.CommandContext(t.Context(), "go", append(args, "./"+name)...).CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	return file
}

// want checks the output of a program.
func want(t *testing.T, name, text string) {
	t.Helper()
	var stderr bytes.Buffer
	cmd := exec.CommandContext(t.Context(), build(t, name))
	cmd.Stderr = &stderr
	if got, err := cmd.Output(); err != nil || string(got) != text {
		t.Errorf("%s printed %q, %v, want %q\n%s", name, got, err, text, stderr.Bytes())
	}
}

// start starts a program. The returned function interrupts it and checks that it exits without an error.
func start(t *testing.T, name string, args ...string) (stop func()) {
	t.Helper()
	var stderr bytes.Buffer
	cmd := exec.CommandContext(context.Background(), build(t, name), args...)
	cmd.Stderr = &stderr
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = cmd.Process.Kill() })
	return func() {
		t.Helper()
		_ = cmd.Process.Signal(os.Interrupt)
		if err := cmd.Wait(); err != nil {
			t.Errorf("%s: %v\n%s", name, err, stderr.Bytes())
		}
	}
}

// freeAddress returns an unused HOST:PORT. Outgoing connections may take ports of 127.0.0.1, not of others.
func freeAddress(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.35.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return l.Addr().String()
}

// serve starts a gRPC server and returns its address.
func serve(t *testing.T, register func(grpc.ServiceRegistrar) error) string {
	t.Helper()
	s := grpc.NewServer(casserver.ServerOptions(nil)...)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	if err := register(s); err != nil {
		t.Fatal(err)
	}
	go s.Serve(l)
	t.Cleanup(s.Stop)
	return l.Addr().String()
}

func dial(t *testing.T, address string) *grpc.ClientConn {
	t.Helper()
	conn, err := grpc.NewClient(address, grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithDefaultCallOptions(grpc.WaitForReady(true)))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	return conn
}

// execute executes echo hello at a server, once that is up, and returns its output.
func execute(t *testing.T, address string) string {
	t.Helper()
	conn := dial(t, address)
	if _, err := repb.NewCapabilitiesClient(conn).GetCapabilities(t.Context(), &repb.GetCapabilitiesRequest{}); err != nil {
		t.Fatal(err)
	}
	client, err := remote.New("grpc://" + address)
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	in, err := client.Instance("")
	if err != nil {
		t.Fatal(err)
	}
	put := func(d cas.Digest, err error) *repb.Digest {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		return d.Proto()
	}
	ctx, f := t.Context(), cas.SHA256
	action, err := cas.PutProto(ctx, in.Store, f, &repb.Action{
		CommandDigest:   put(cas.PutProto(ctx, in.Store, f, &repb.Command{Arguments: strings.Fields("/bin/echo hello")})),
		InputRootDigest: put(cas.PutProto(ctx, in.Store, f, &repb.Directory{})),
	})
	if err != nil {
		t.Fatal(err)
	}
	executor, err := execclient.New(conn, "")
	if err != nil {
		t.Fatal(err)
	}
	out, err := executor.Execute(ctx, &worker.Task{Action: action}, nil)
	if err != nil {
		t.Fatal(err)
	}
	stdout, err := cas.FromProto(f, out.Result.StdoutDigest)
	if err != nil {
		return string(out.Result.StdoutRaw)
	}
	b, err := cas.ReadAll(ctx, in.Store, stdout, 1000)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}
