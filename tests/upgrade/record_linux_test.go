// SPDX-License-Identifier: Apache-2.0

package upgrade_test

import (
	"bytes"
	"cmp"
	"context"
	"flag"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/casserver"
	"github.com/cloister-build/cloister/cas/castest"
	"github.com/cloister-build/cloister/cas/castest/faulty"
	"github.com/cloister-build/cloister/cas/remote"
	bepb "github.com/cloister-build/cloister/proto/bazel/buildeventstream"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/grpctest"
	"github.com/cloister-build/cloister/tests/internal/bazelrun"
	"github.com/cloister-build/cloister/tests/internal/containers"
	"github.com/cloister-build/cloister/tests/internal/loopback"
	"github.com/cloister-build/cloister/tests/must"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	bespb "google.golang.org/genproto/googleapis/devtools/build/v1"
	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"
)

var (
	record = flag.String("record", "", "name of a store to record in testdata")
	old    = flag.String("program", "", "cloister that writes the recorded store; the default is that of this tree")
)

// TestRecord records a store with -record and -program; see the package comment. It runs as root, since small inputs of
// others are copied.
func TestRecord(t *testing.T) {
	if *record == "" {
		return
	}
	dir := t.TempDir()
	contents := recordStore(t, cmp.Or(*old, built.Path(t)), dir)
	pack(t, archiveOf(*record), dir, contents)
}

// recordStore writes a store with content of every kind to a directory. The machine seems to have restarted since.
func recordStore(t *testing.T, program, dir string) *Contents {
	confined(t)
	r := &recorder{T: t, Contents: &Contents{From: time.Now().UTC()}, program: program, dir: filepath.Join(dir, storeName)}
	r.host = must.Get(os.Hostname())(t)
	if os.Geteuid() == 0 {
		r.host = "worker"
		// In a UTS namespace, since the store has the name of its host.
		r.program = filepath.Join(t.TempDir(), "cloister")
		script := "#!/bin/sh\nexec unshare --uts sh -c 'hostname worker; exec \"$0\" \"$@\"' " + program + ` "$@"` + "\n"
		must.Succeed(t, os.WriteFile(r.program, []byte(script), 0o755))
	}
	r.serve(r.execution, "--repro-sample", "100%")
	r.join()
	r.unsent()
	r.pending()
	r.interruptVerify()
	r.Until = time.Now().UTC()
	hideBoot(t, r.dir)
	r.Version = strings.TrimSpace(string(must.Get(os.ReadFile(filepath.Join(r.dir, "version")))(t)))
	return r.Contents
}

// A recorder fills the store of a server through the API and the commands.
type recorder struct {
	*testing.T
	*Contents
	program string
	host    string // name of the server's host
	dir     string // of the store
	address string // of the server
	ctx     context.Context
	conn    *grpc.ClientConn
}

// serve calls f while a server has the store.
func (r *recorder) serve(f func(), flags ...string) {
	s := must.Get(bazelrun.StartServer(r.Context(), bazelrun.ServerConfig{
		Binary: r.program, Dir: r.dir, Home: r.TempDir(), Listen: "127.0.0.1:0", MaxSize: "1GiB", Toolchain: "upgrade",
		Args: flags,
	}))(r.T)
	defer s.Kill()
	r.connect(s.Addr)
	f()
	must.Succeed(r.T, r.conn.Close())
	must.Succeed(r.T, s.Stop())
}

// run runs a command.
func (r *recorder) run(args ...string) {
	r.Helper()
	out, err := exec.CommandContext(r.Context(), r.program, args...).CombinedOutput()
	must.Be(r.T, err == nil, "cloister %q: %v\n%s", args, err, out)
}

// execution records what a server without an upstream writes.
func (r *recorder) execution() {
	for _, in := range []string{"", "main"} {
		for _, f := range cas.Functions() {
			r.fill(in, f)
		}
	}
	r.Executed, _ = r.execute("echo out > out")
	r.Violation, _ = r.execute("echo out > out; echo x > /etc/cloister-upgrade; exit 0")
	r.execute("echo failed >&2; exit 3")
	for message := ""; !strings.Contains(message, "not reproducible"); time.Sleep(100 * time.Millisecond) {
		r.Verdict, message = r.execute("pwd > out")
	}
	r.History = true
	r.image()
	r.build()
	r.Drain = "recorded drain"
	r.run("drain", r.host, "--reason", r.Drain, "--server", "grpc://"+r.address)
	r.run("drain", "--all", "--reason", r.Drain, "--server", "grpc://"+r.address)
}

// image loads an image.
func (r *recorder) image() {
	dir := filepath.Join(r.TempDir(), "image")
	at := must.Get(layout.Write(dir, empty.Index))(r.T)
	must.Succeed(r.T, at.AppendImage(containers.Image(r.T, "upgrade")))
	r.Image = "local/upgrade:v1"
	r.run("image", "load", dir, "--as", r.Image, "--instance", "main", "--dir", r.dir)
}

// build publishes the events of a build.
func (r *recorder) build() {
	r.Build = "5f1d6c0e-3b0a-4f7c-9d1e-2a3b4c5d6e7f"
	stream := must.Get(bespb.NewPublishBuildEventClient(r.conn).PublishBuildToolEventStream(r.ctx))(r.T)
	started := must.Get(proto.Marshal(&bepb.BuildEvent{Payload: &bepb.BuildEvent_Started{Started: &bepb.BuildStarted{
		Uuid: r.Build, Command: "build", BuildToolVersion: "9.0.0", WorkspaceDirectory: "/upgrade",
	}}}))(r.T)
	progress := must.Get(proto.Marshal(&bepb.BuildEvent{Payload: &bepb.BuildEvent_Progress{Progress: &bepb.Progress{Stderr: "upgrade\n"}}}))(r.T)
	for n, value := range [][]byte{started, progress, nil} {
		e := &bespb.BuildEvent{Event: &bespb.BuildEvent_ComponentStreamFinished{
			ComponentStreamFinished: &bespb.BuildEvent_BuildComponentStreamFinished{},
		}}
		if value != nil {
			e.Event = &bespb.BuildEvent_BazelEvent{BazelEvent: &anypb.Any{
				TypeUrl: "type.googleapis.com/build_event_stream.BuildEvent", Value: value,
			}}
		}
		must.Succeed(r.T, stream.Send(&bespb.PublishBuildToolEventStreamRequest{
			ProjectId: "main",
			OrderedBuildEvent: &bespb.OrderedBuildEvent{
				StreamId:       &bespb.StreamId{InvocationId: r.Build, BuildId: r.Build, Component: bespb.StreamId_TOOL},
				SequenceNumber: int64(n + 1), Event: e,
			},
		}))
	}
	must.Succeed(r.T, stream.CloseSend())
	for n := int64(1); ; n++ {
		answer, err := stream.Recv()
		if err == io.EOF {
			expect.Equal(r.T, n, 4, "acknowledged events, and the end")
			return
		}
		must.Succeed(r.T, err)
		expect.Equal(r.T, answer.SequenceNumber, n, "acknowledged event")
	}
}

// join uses the store for a worker of another server.
func (r *recorder) join() {
	address := must.Get(loopback.Address())(r.T)
	head := must.Get(bazelrun.StartServer(r.Context(), bazelrun.ServerConfig{
		Binary: r.program, Dir: r.TempDir(), Home: r.TempDir(), Listen: "127.0.0.1:0",
		Args: []string{"--jobs", "0", "--worker-listen", address},
	}))(r.T)
	defer head.Kill()
	worker := must.Get(bazelrun.StartServer(r.Context(), bazelrun.ServerConfig{
		Binary: r.program, Dir: r.dir, Home: r.TempDir(), MaxSize: "1GiB", Toolchain: "upgrade", Join: address,
	}))(r.T)
	defer worker.Kill()
	must.Succeed(r.T, worker.Stop())
}

// unsent uploads a blob that the upstream refuses.
func (r *recorder) unsent() {
	upstream := grpctest.Serve(r.T, func(g *grpc.Server) {
		memory := castest.NewMemory()
		full := faulty.New(memory, memory)
		full.Fail(cas.ErrInvalid, faulty.Put, faulty.PutAll) // clients repeat other errors
		_, err := casserver.Register(g, casserver.Config{Instances: func(name string) (*cas.Instance, error) {
			return &cas.Instance{Name: name, Store: full, Actions: full}, nil
		}})
		must.Succeed(r.T, err)
	})
	r.serve(func() {
		client := must.Get(remote.Dial(r.Context(), "grpc://"+r.address))(r.T)
		defer client.Close()
		content := bytes.Repeat([]byte("a blob that is too large for the upstream\n"), 50_000)
		d := cas.SHA256.Sum(content)
		expect.Message(r.T, must.Get(client.Store("main"))(r.T).Put(r.Context(), d, bytes.NewReader(content)), "invalid")
		r.Unsent = d.String()
	}, "--cas", "grpc://"+upstream)
}

// pending writes a blob and a result while the upstream is down.
func (r *recorder) pending() {
	r.serve(func() {
		r.Pending = r.put("main", cas.SHA256, []byte("a pending blob")).String()
		r.PendingResult = r.result("main", cas.SHA256, "pending")
	}, "--cas", "grpc://"+must.Get(loopback.Address())(r.T), "--cas-write", "back", "--drain-timeout", "1s")
}

// interruptVerify leaves the position of an interrupted verify.
func (r *recorder) interruptVerify() {
	must.Hold(r.T, "an interrupted verify has left its position", func() bool {
		cmd := exec.CommandContext(r.Context(), r.program, "cas", "verify", "--dir", r.dir, "--rate", "1KiB")
		must.Succeed(r.T, cmd.Start())
		time.Sleep(500 * time.Millisecond) // it may not have begun
		must.Succeed(r.T, cmd.Process.Signal(os.Interrupt))
		_ = cmd.Wait() // it was interrupted
		_, err := os.Stat(filepath.Join(r.dir, "verify"))
		return err == nil
	})
}

// hideBoot makes a store one of a machine that has restarted since: the boot IDs in it are no longer this one's.
func hideBoot(t *testing.T, store string) {
	boot := filepath.Join(store, "boot")
	id := bytes.TrimSpace(must.Get(os.ReadFile(boot))(t))
	other := []byte("00000000-0000-0000-0000-000000000000")
	for _, path := range []string{boot, filepath.Join(store, "checkpoint")} {
		text := must.Get(os.ReadFile(path))(t)
		must.Succeed(t, os.WriteFile(path, bytes.ReplaceAll(text, id, other), 0o600))
	}
}

func (r *recorder) connect(address string) {
	r.address, r.conn = address, grpctest.Dial(r.T, address)
	who := must.Get(proto.Marshal(&repb.RequestMetadata{
		ToolInvocationId: "upgrade", TargetId: "//upgrade:target", ActionMnemonic: "Upgrade",
	}))(r.T)
	r.ctx = metadata.AppendToOutgoingContext(r.Context(),
		"build.bazel.remote.execution.v2.requestmetadata-bin", string(who))
}

// put uploads a blob.
func (r *recorder) put(instance string, f cas.Function, content []byte) cas.Digest {
	r.Helper()
	d := f.Sum(content)
	answer, err := repb.NewContentAddressableStorageClient(r.conn).BatchUpdateBlobs(r.ctx, &repb.BatchUpdateBlobsRequest{
		InstanceName: instance, DigestFunction: f.Proto(),
		Requests: []*repb.BatchUpdateBlobsRequest_Request{{Digest: d.Proto(), Data: content}},
	})
	must.Succeed(r.T, err)
	if code := answer.Responses[0].Status.GetCode(); code != 0 {
		r.Fatalf("%v blob: %v", f, answer)
	}
	return d
}

// fill uploads a small and a large blob, one in chunks, and a result.
func (r *recorder) fill(instance string, f cas.Function) {
	small := []byte("a small blob of instance " + instance)
	large := bytes.Repeat([]byte("a large blob of instance "+instance+"\n"), 4000)
	for _, content := range [][]byte{small, large} {
		r.Blobs = append(r.Blobs, Blob{instance, r.put(instance, f, content).String(), false})
	}
	var chunks []*repb.Digest
	var whole []byte
	for _, text := range []string{"one\n", "two\n", "one\n"} {
		chunk := bytes.Repeat([]byte(text), 8<<10)
		chunks = append(chunks, r.put(instance, f, chunk).Proto())
		whole = append(whole, chunk...)
	}
	d := f.Sum(whole)
	must.Get(repb.NewContentAddressableStorageClient(r.conn).SpliceBlob(r.ctx, &repb.SpliceBlobRequest{
		InstanceName: instance, BlobDigest: d.Proto(), ChunkDigests: chunks, DigestFunction: f.Proto(),
	}))(r.T)
	r.Blobs = append(r.Blobs, Blob{instance, d.String(), true})
	r.Results = append(r.Results, r.result(instance, f, "result"))
}

// result uploads the result of an action with a salt.
func (r *recorder) result(instance string, f cas.Function, salt string) Result {
	r.Helper()
	action := r.put(instance, f, must.Get(proto.Marshal(&repb.Action{Salt: []byte(salt)}))(r.T))
	stdout := "stdout of " + instance
	must.Get(repb.NewActionCacheClient(r.conn).UpdateActionResult(r.ctx, &repb.UpdateActionResultRequest{
		InstanceName: instance, ActionDigest: action.Proto(), DigestFunction: f.Proto(),
		ActionResult: &repb.ActionResult{StdoutRaw: []byte(stdout), ExecutionMetadata: &repb.ExecutedActionMetadata{Worker: "upgrade"}},
	}))(r.T)
	return Result{instance, action.String(), stdout}
}

// execute executes a shell command in instance main, and returns its action and the message of the answer.
func (r *recorder) execute(script string) (action, message string) {
	r.Helper()
	encode := func(m proto.Message) cas.Digest {
		return r.put("main", cas.SHA256, must.Get(proto.MarshalOptions{Deterministic: true}.Marshal(m))(r.T))
	}
	command := encode(&repb.Command{
		Arguments: []string{"/bin/sh", "-c", script}, OutputPaths: []string{"out"}, OutputFiles: []string{"out"},
		EnvironmentVariables: []*repb.Command_EnvironmentVariable{{Name: "PATH", Value: "/usr/bin:/bin"}},
	})
	d := encode(&repb.Action{CommandDigest: command.Proto(), InputRootDigest: encode(&repb.Directory{}).Proto()})
	stream, err := repb.NewExecutionClient(r.conn).Execute(r.ctx, &repb.ExecuteRequest{InstanceName: "main", ActionDigest: d.Proto()})
	must.Succeed(r.T, err)
	for {
		operation := must.Get(stream.Recv())(r.T)
		if !operation.Done {
			continue
		}
		var answer repb.ExecuteResponse
		must.Succeed(r.T, operation.GetResponse().UnmarshalTo(&answer))
		if code := answer.Status.GetCode(); code != 0 {
			r.Fatalf("%s: %v", script, &answer)
		}
		return d.String(), answer.Message
	}
}
