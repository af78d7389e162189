// SPDX-License-Identifier: Apache-2.0

package service_test

import (
	"context"
	"flag"
	"fmt"
	"log"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/casserver"
	"github.com/cloister-build/cloister/cas/disk"
	"github.com/cloister-build/cloister/cas/remote"
	"github.com/cloister-build/cloister/sandbox/namespace"
	"github.com/cloister-build/cloister/worker"
	"github.com/cloister-build/cloister/worker/execclient"
	"github.com/cloister-build/cloister/worker/service"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/health"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
)

// TestMain skips the examples that need a sandbox on hosts without namespaces.
func TestMain(m *testing.M) {
	namespace.Init()
	flag.Parse()
	b := namespace.New(namespace.Config{})
	if _, err := b.Probe(context.Background()); err != nil {
		fmt.Println("skipping examples: they need namespaces:", err)
		if slices.Contains(strings.Split(os.Getenv("CLOISTER_REQUIRE"), ","), "namespaces") {
			os.Exit(1)
		}
		_ = flag.Set("test.skip", "^(ExampleNewServer|ExampleNewWorker)$")
	}
	b.Close()
	os.Exit(m.Run())
}

// A server in fifteen lines: it executes actions in a sandbox and keeps what they need in a directory.
func ExampleNewServer() {
	ctx := context.Background()
	// main begins with namespace.Init.
	dir, err := os.MkdirTemp("", "")
	check(err)
	defer os.RemoveAll(dir)

	store, err := disk.Open(disk.Config{Dir: dir, MaxBytes: 1 << 30})
	check(err)
	defer store.Close()
	backend := namespace.New(namespace.Config{Hidden: []string{dir}})
	defer backend.Close()
	server, err := service.NewServer(ctx, service.Config{Worker: worker.Config{
		Name: "example", Instances: store.Instance, Backend: backend,
	}})
	check(err)
	defer server.Close()
	g := grpc.NewServer(casserver.ServerOptions(nil)...)
	check(server.Register(g))
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	check(err)
	go g.Serve(listener)
	defer g.GracefulStop()
	defer server.Drain(ctx)

	fmt.Println(execute(ctx, listener.Addr().String(), "echo hello"))
	// Output: exit code 0, stdout: hello
}

// The services on another program's gRPC server, beside its own: here a cache without execution and a health service.
func ExampleServer_Register() {
	ctx := context.Background()
	dir, err := os.MkdirTemp("", "")
	check(err)
	defer os.RemoveAll(dir)
	store, err := disk.Open(disk.Config{Dir: dir, MaxBytes: 1 << 30})
	check(err)
	defer store.Close()
	head, err := service.NewServer(ctx, service.Config{Worker: worker.Config{Name: "head", Instances: store.Instance}})
	check(err)
	defer head.Close()

	g := grpc.NewServer(casserver.ServerOptions(nil)...)
	healthpb.RegisterHealthServer(g, health.NewServer()) // the program's own service
	check(head.Register(g))
	names := slices.Sorted(func(yield func(string) bool) {
		for name := range g.GetServiceInfo() {
			if !yield(name) {
				return
			}
		}
	})
	fmt.Println(strings.Join(names, "\n"))
	// Output:
	// build.bazel.remote.execution.v2.ActionCache
	// build.bazel.remote.execution.v2.Capabilities
	// build.bazel.remote.execution.v2.ContentAddressableStorage
	// build.bazel.remote.execution.v2.Execution
	// build.bazel.remote.logstream.v1.LogStreamService
	// cloister.v1.Fleet
	// google.bytestream.ByteStream
	// google.longrunning.Operations
	// grpc.health.v1.Health
}

// A worker in ten lines: it executes the actions of a head, whose store it uses.
func ExampleNewWorker() {
	ctx := context.Background()
	clients, workers, stop := serveHead(ctx)
	defer stop()

	conn, err := grpc.NewClient(workers, grpc.WithTransportCredentials(insecure.NewCredentials()))
	check(err)
	defer conn.Close()
	store, err := remote.New("grpc://" + workers)
	check(err)
	defer store.Close()
	backend := namespace.New(namespace.Config{})
	defer backend.Close()
	w, err := service.NewWorker(ctx, conn, service.Config{Worker: worker.Config{
		Name: "example", Instances: store.Instance, Backend: backend,
	}})
	check(err)
	defer w.Close()
	ended := make(chan struct{})
	go func() { w.Run(ctx); close(ended) }()

	fmt.Println(execute(ctx, clients, "echo from a worker"))
	w.Drain()
	<-ended
	// Output: exit code 0, stdout: from a worker
}

// serveHead starts a server that executes nothing itself, and returns its addresses for clients and workers.
func serveHead(ctx context.Context) (clients, workers string, stop func()) {
	dir, err := os.MkdirTemp("", "")
	check(err)
	store, err := disk.Open(disk.Config{Dir: filepath.Join(dir, "store"), MaxBytes: 1 << 30})
	check(err)
	head, err := service.NewServer(ctx, service.Config{Worker: worker.Config{Name: "head", Instances: store.Instance}})
	check(err)
	var addresses []string
	var servers []*grpc.Server
	for _, register := range []func(grpc.ServiceRegistrar) error{head.Register, head.RegisterWorkers} {
		g := grpc.NewServer(casserver.ServerOptions(nil)...)
		check(register(g))
		listener, err := net.Listen("tcp", "127.0.0.1:0")
		check(err)
		go g.Serve(listener)
		addresses, servers = append(addresses, listener.Addr().String()), append(servers, g)
	}
	return addresses[0], addresses[1], func() {
		check(head.Drain(ctx))
		for _, g := range servers {
			g.GracefulStop()
		}
		check(head.Close())
		check(store.Close())
		check(os.RemoveAll(dir))
	}
}

// execute runs a shell command at a server, as a client does, and describes the result.
func execute(ctx context.Context, address, command string) string {
	client, err := remote.New("grpc://" + address)
	check(err)
	defer client.Close()
	store, err := client.Store("")
	check(err)
	root, err := cas.PutProto(ctx, store, cas.SHA256, &repb.Directory{})
	check(err)
	c, err := cas.PutProto(ctx, store, cas.SHA256, &repb.Command{Arguments: []string{"/bin/sh", "-c", command}})
	check(err)
	action, err := cas.PutProto(ctx, store, cas.SHA256, &repb.Action{CommandDigest: c.Proto(), InputRootDigest: root.Proto()})
	check(err)
	conn, err := grpc.NewClient(address, grpc.WithTransportCredentials(insecure.NewCredentials()))
	check(err)
	defer conn.Close()
	executor, err := execclient.New(conn, "")
	check(err)
	out, err := executor.Execute(ctx, &worker.Task{Action: action}, nil)
	check(err)
	stdout := out.Result.StdoutRaw
	if d := out.Result.StdoutDigest; len(stdout) == 0 && d != nil {
		digest, err := cas.FromProto(cas.SHA256, d)
		check(err)
		stdout, err = cas.ReadAll(ctx, store, digest, 1<<20)
		check(err)
	}
	return fmt.Sprintf("exit code %d, stdout: %s", out.Result.ExitCode, stdout)
}

func check(err error) {
	if err != nil {
		log.Panic(err)
	}
}
