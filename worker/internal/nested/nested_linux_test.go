// SPDX-License-Identifier: Apache-2.0

package nested_test

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"cloud.google.com/go/longrunning/autogen/longrunningpb"
	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/casserver"
	"github.com/cloister-build/cloister/cas/disk"
	"github.com/cloister-build/cloister/sandbox/namespace"
	"github.com/cloister-build/cloister/sandbox/policy"
	"github.com/cloister-build/cloister/sandbox/sandboxtest"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/grpctest"
	"github.com/cloister-build/cloister/tests/must"
	"github.com/cloister-build/cloister/worker"
	"github.com/cloister-build/cloister/worker/access"
	"github.com/cloister-build/cloister/worker/repro/manifest"
	"github.com/cloister-build/cloister/worker/service"
	bspb "google.golang.org/genproto/googleapis/bytestream"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"
)

// TestMain is also the program of the actions.
func TestMain(m *testing.M) {
	namespace.Init()
	if len(os.Args) > 2 && os.Args[1] == "call" {
		call(os.Args[2], os.Args[3:])
		return
	}
	os.Exit(m.Run())
}

// call calls remote APIs on a socket, and prints a line for each call: "METHOD INSTANCE DIGEST", or "token TEXT" and
// "invocation TEXT" for the credential and the build of the next ones.
func call(socket string, calls []string) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	conn, err := grpc.NewClient("unix:"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		fmt.Println(err)
		return
	}
	defer conn.Close()
	for _, text := range calls {
		var method, instance, hash string
		fmt.Sscan(text, &method, &instance, &hash)
		if method == "token" {
			ctx = metadata.AppendToOutgoingContext(ctx, "authorization", "Bearer "+instance)
			continue
		}
		if method == "invocation" {
			ctx = inBuild(ctx, instance)
			continue
		}
		var d *repb.Digest
		if of, err := cas.ParseDigest(hash); err == nil {
			d = of.Proto()
		}
		got, err := perform(ctx, conn, method, instance, d)
		if err != nil {
			s := status.Convert(err)
			got = fmt.Sprintf("%s: %s", s.Code(), s.Message())
		}
		fmt.Println(method, strings.ReplaceAll(strings.TrimSpace(got), "\n", "; "))
	}
}

// inBuild returns a context for calls of a build.
func inBuild(ctx context.Context, invocation string) context.Context {
	b, err := proto.Marshal(&repb.RequestMetadata{ToolInvocationId: invocation})
	if err != nil {
		panic(err)
	}
	return metadata.AppendToOutgoingContext(ctx, "build.bazel.remote.execution.v2.requestmetadata-bin", string(b))
}

// perform makes one call and returns what it got.
func perform(ctx context.Context, conn *grpc.ClientConn, method, instance string, d *repb.Digest) (string, error) {
	blobs := repb.NewContentAddressableStorageClient(conn)
	switch method {
	case "capabilities":
		c, err := repb.NewCapabilitiesClient(conn).GetCapabilities(ctx, &repb.GetCapabilitiesRequest{InstanceName: instance})
		return fmt.Sprint(c.GetExecutionCapabilities().GetExecEnabled()), err
	case "batch":
		r, err := blobs.BatchReadBlobs(ctx, &repb.BatchReadBlobsRequest{InstanceName: instance, Digests: []*repb.Digest{d}})
		if err != nil {
			return "", err
		}
		return string(r.Responses[0].Data), status.ErrorProto(r.Responses[0].Status)
	case "read":
		r, err := bspb.NewByteStreamClient(conn).Read(ctx, &bspb.ReadRequest{ResourceName: fmt.Sprintf("%s/blobs/%s/%d", instance, d.Hash, d.SizeBytes)})
		if err != nil {
			return "", err
		}
		m, err := r.Recv()
		return string(m.GetData()), err
	case "tree":
		r, err := blobs.GetTree(ctx, &repb.GetTreeRequest{InstanceName: instance, RootDigest: d})
		if err != nil {
			return "", err
		}
		m, err := r.Recv()
		return fmt.Sprint(len(m.GetDirectories())), err
	case "result":
		r, err := repb.NewActionCacheClient(conn).GetActionResult(ctx, &repb.GetActionResultRequest{InstanceName: instance, ActionDigest: d})
		return fmt.Sprint(r.GetExitCode()), err
	case "update":
		_, err := repb.NewActionCacheClient(conn).UpdateActionResult(ctx, &repb.UpdateActionResultRequest{
			InstanceName: instance, ActionDigest: d, ActionResult: &repb.ActionResult{},
		})
		return "ok", err
	case "operations":
		_, err := longrunningpb.NewOperationsClient(conn).ListOperations(ctx, &longrunningpb.ListOperationsRequest{Name: instance})
		return "ok", err
	case "execute", "wait":
		m, err := execute(ctx, conn, instance, d, func(stage repb.ExecutionStage_Value) {
			if method == "wait" {
				fmt.Println(stage)
			}
		})
		if err != nil {
			return "", err
		}
		if code := codes.Code(m.GetStatus().GetCode()); code != codes.OK {
			return fmt.Sprintf("%s: %s", code, m.Status.Message), nil
		}
		out, err := cas.FromProto(cas.SHA256, m.Result.StdoutDigest)
		if err != nil {
			return "", err
		}
		text, err := perform(ctx, conn, "batch", instance, out.Proto())
		return "[" + strings.TrimSpace(text) + "]", err
	}
	return "", status.Error(codes.InvalidArgument, "unknown method "+method)
}

func execute(
	ctx context.Context, conn grpc.ClientConnInterface, instance string, d *repb.Digest, report func(repb.ExecutionStage_Value),
) (*repb.ExecuteResponse, error) {
	r, err := repb.NewExecutionClient(conn).Execute(ctx, &repb.ExecuteRequest{InstanceName: instance, ActionDigest: d})
	if err != nil {
		return nil, err
	}
	for {
		o, err := r.Recv()
		if err != nil {
			return nil, err
		}
		var metadata repb.ExecuteOperationMetadata
		if err := o.GetMetadata().UnmarshalTo(&metadata); err != nil {
			return nil, err
		}
		report(metadata.Stage)
		if o.Done {
			m := &repb.ExecuteResponse{}
			return m, o.GetResponse().UnmarshalTo(m)
		}
	}
}

const socketPath = "sub/apis.sock"

// A rig is a server with one slot for the actions of clients.
type rig struct {
	t       *testing.T
	store   *disk.Cache
	conn    *grpc.ClientConn
	program *repb.Digest // of this test, in each of the instances
	server  *service.Server
}

// newRig returns one with a policy, and callers if the text is not "".
func newRig(t *testing.T, rules, callers string) *rig {
	t.Helper()
	backend := namespace.New(namespace.Config{})
	t.Cleanup(func() { backend.Close() })
	if _, err := backend.Probe(t.Context()); err != nil {
		sandboxtest.Unavailable(t, "namespaces", err)
	}
	r := &rig{t: t}
	r.store = must.Get(disk.Open(disk.Config{Dir: filepath.Join(t.TempDir(), "store"), MaxBytes: 1 << 30}))(t)
	t.Cleanup(func() { r.store.Close() })
	config := service.Config{Slots: 1, Worker: worker.Config{
		Name: "test", Instances: r.store.Instance, Backend: backend,
		Policy: must.Get(policy.Parse("policy.yaml", []byte(rules)))(t),
	}}
	if callers != "" {
		file := filepath.Join(t.TempDir(), "auth.yaml")
		must.Succeed(t, os.WriteFile(file, []byte(callers), 0o600))
		live := must.Get(access.NewLive(file, nil, nil))(t)
		t.Cleanup(live.Close)
		config.Access, config.Actions = live, live.Options()
	}
	r.server = must.Get(service.NewServer(t.Context(), config))(t)
	t.Cleanup(func() { must.Succeed(t, r.server.Close()) })
	g := grpc.NewServer(append(casserver.ServerOptions(nil), config.Actions...)...)
	must.Succeed(t, r.server.Register(g))
	r.conn = grpctest.Connect(t, g)
	program := must.Get(os.ReadFile(must.Get(os.Executable())(t)))(t)
	for _, instance := range []string{"main", "other"} {
		r.program = r.blob(instance, program)
	}
	return r
}

func (r *rig) in(instance string) cas.Store {
	r.t.Helper()
	return must.Get(r.store.Instance(instance))(r.t).Store
}

func (r *rig) blob(instance string, b []byte) *repb.Digest {
	r.t.Helper()
	return must.Get(cas.PutBytes(r.t.Context(), r.in(instance), cas.SHA256, b))(r.t).Proto()
}

func (r *rig) message(m proto.Message) *repb.Digest {
	r.t.Helper()
	return must.Get(cas.PutProto(r.t.Context(), r.in("main"), cas.SHA256, m))(r.t).Proto()
}

// action returns an action of the instance main with a command and the program, with properties NAME=VALUE.
func (r *rig) action(args []string, properties ...string) string {
	r.t.Helper()
	return r.timedAction(nil, args, properties...)
}

func (r *rig) timedAction(timeout *durationpb.Duration, args []string, properties ...string) string {
	r.t.Helper()
	c := &repb.Command{Arguments: args, Platform: &repb.Platform{}, OutputPaths: []string{"sub"}}
	for _, p := range properties {
		name, value, _ := strings.Cut(p, "=")
		c.Platform.Properties = append(c.Platform.Properties, &repb.Platform_Property{Name: name, Value: value})
	}
	d := r.message(&repb.Action{Timeout: timeout, CommandDigest: r.message(c), InputRootDigest: r.message(&repb.Directory{
		Files: []*repb.FileNode{{Name: "program", Digest: r.program, IsExecutable: true}},
	})})
	return fmt.Sprintf("%s/%d", d.Hash, d.SizeBytes)
}

// calls returns an action that calls remote APIs.
func (r *rig) calls(calls ...string) string {
	r.t.Helper()
	return r.action(append([]string{"./program", "call", socketPath}, calls...), "remoteApisSocketPath="+socketPath)
}

// run executes an action as a client, and returns the response and the lines of stdout.
func (r *rig) run(token, action string) (*repb.ExecuteResponse, []string) {
	r.t.Helper()
	ctx, cancel := context.WithTimeout(r.t.Context(), 2*time.Minute)
	defer cancel()
	if token != "" {
		ctx = metadata.AppendToOutgoingContext(ctx, "authorization", "Bearer "+token)
	}
	m, err := execute(ctx, r.conn, "main", must.Get(cas.ParseDigest(action))(r.t).Proto(), func(repb.ExecutionStage_Value) {})
	must.Succeed(r.t, err)
	if m.GetResult().GetStdoutDigest() == nil {
		return m, []string{fmt.Sprintf("%s: %s", codes.Code(m.GetStatus().GetCode()), m.GetStatus().GetMessage())}
	}
	text := must.Get(cas.ReadAll(r.t.Context(), r.in("main"), must.Get(cas.FromProto(cas.SHA256, m.Result.StdoutDigest))(r.t), 1<<20))(r.t)
	return m, strings.Split(strings.TrimSpace(string(text)), "\n")
}

// manifest returns the manifest of a result.
func (r *rig) manifest(m *repb.ExecuteResponse) *manifest.Manifest {
	r.t.Helper()
	d, _ := worker.RecordedManifest(m.Result)
	text := must.Get(cas.ReadAll(r.t.Context(), r.in("main"), d, manifest.MaxBytes))(r.t)
	return must.Get(manifest.Parse(text))(r.t)
}

const permits = "version: 1\nprofiles: {build: {remote_apis: {allow: true}}}\n"

// sameLines checks lines by their beginnings.
func sameLines(t *testing.T, got []string, want ...string) {
	t.Helper()
	ok := len(got) == len(want)
	for i := range min(len(got), len(want)) {
		ok = ok && strings.HasPrefix(got[i], want[i])
	}
	expect.That(t, ok, "got\n%s\nwant lines that begin with\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
}

// TestActionsExecuteActions: with one slot, actions execute others down to the maximum depth, which call nothing;
// everything that they fetch is in the manifest, and no result of theirs is cached.
func TestActionsExecuteActions(t *testing.T) {
	r := newRig(t, permits, "")
	leaf := r.action([]string{"/bin/echo", "leaf"})
	tooDeep := r.calls("capabilities main")
	deepest := r.calls("execute main "+leaf, "execute main "+tooDeep)
	deep := r.blob("main", []byte("a blob"))
	blob := fmt.Sprintf("%s/%d", deep.Hash, deep.SizeBytes)
	tree := r.message(&repb.Directory{})
	action := r.calls("execute main "+deepest, "capabilities main", "batch main "+blob, "read main "+blob,
		fmt.Sprintf("tree main %s/%d", tree.Hash, tree.SizeBytes), "result main "+leaf, "result main "+deepest, "operations main")
	m, lines := r.run("", action)
	sameLines(t, lines,
		"execute [execute [leaf]; execute FailedPrecondition: confine: action "+tooDeep+" needs remoteApisSocketPath="+socketPath+
			", but actions nest at most 2 deep",
		"capabilities true", "batch a blob", "read a blob", "tree 1", "result 0", "result NotFound: ", "operations Unimplemented: ")
	got := r.manifest(m)
	fetched := map[string]bool{} // by digest: whether it is a result
	for _, f := range got.RemoteAPIs.Fetched {
		fetched[f.Digest.String()] = f.Sum != ""
	}
	for d, result := range map[string]bool{blob: false, fmt.Sprintf("%s/%d", tree.Hash, tree.SizeBytes): false, leaf: true, deepest: true} {
		is, ok := fetched[d]
		expect.That(t, ok && is == result, "%s: got fetched %t, a result %t, want a result %t", d, ok, is, result)
	}
	expect.Equal(t, len(fetched), 5, "fetched: %v; one is stdout of the inner action", got.RemoteAPIs.Fetched)
	expect.That(t, !got.Configuration.Hermetic && strings.Contains(got.Spec, "socket \"/build/"+socketPath+"\" \"remote-apis\""), "got the manifest\n%s", got.Text())
	expect.Text(t, m.Message, "permits remote APIs", "message")
	var files []string
	for _, d := range m.Result.OutputDirectories {
		var made repb.Tree
		must.Succeed(t, cas.ReadProto(t.Context(), r.in("main"), must.Get(cas.FromProto(cas.SHA256, d.TreeDigest))(t), &made))
		for _, f := range made.GetRoot().GetFiles() {
			files = append(files, f.Name)
		}
	}
	expect.That(t, len(m.Result.OutputDirectories) == 1 && len(files) == 0, "the output has the files %q, want it without the socket", files)

	// The same run again has the same stable hash, and another without calls has another one.
	again, _ := r.run("", action)
	expect.That(t, !again.CachedResult, "the result was cached")
	expect.Equal(t, r.manifest(again).StableHash(), got.StableHash(), "stable hash of the same run")
	none, lines := r.run("", r.action([]string{"/bin/echo", "quiet"}, "remoteApisSocketPath=/tmp/s"))
	sameLines(t, lines, "quiet")
	expect.That(t, r.manifest(none).RemoteAPIs == nil, "an action that calls nothing fetched %+v", r.manifest(none).RemoteAPIs)
}

// TestActionsStayInTheirInstance: they have the rights of the client that requested them, whatever credentials they
// send.
func TestActionsStayInTheirInstance(t *testing.T) {
	token := func(name string) string {
		sum := sha256.Sum256([]byte(name))
		return hex.EncodeToString(sum[:])
	}
	r := newRig(t, permits, `version: 1
callers:
  - {name: low, token_sha256: `+token("low-token")+`, rights: [{execute: main}]}
  - {name: high, token_sha256: `+token("high-token")+`, rights: [read, write, cache, execute]}
`)
	secret := r.blob("other", []byte("secret"))
	foreign := fmt.Sprintf("%s/%d", secret.Hash, secret.SizeBytes)
	leaf := r.action([]string{"/bin/echo", "leaf"})
	calls := []string{"batch other " + foreign, "read other " + foreign, "execute other " + leaf, "result other " + leaf, "capabilities other"}
	want := []string{
		"batch PermissionDenied: an action can only use its own instance", "read PermissionDenied: an action can only",
		"execute PermissionDenied: an action can only", "result PermissionDenied: an action can only", "capabilities PermissionDenied: an action can only",
	}
	own := []string{"batch main " + leaf, "update main " + leaf}
	_, lines := r.run("high-token", r.calls(slices.Concat(calls, own)...))
	sameLines(t, lines, slices.Concat(want, []string{"batch ", "update ok"})...)
	expect.That(t, len(lines) != 7 || !strings.Contains(lines[5], "Denied"), "the client's rights: got %q", lines)

	_, lines = r.run("low-token", r.calls(slices.Concat([]string{"token high-token"}, calls, own)...))
	sameLines(t, lines, slices.Concat(want, []string{
		"batch PermissionDenied: caller low does not have the right read in instance \"main\"", "update PermissionDenied: caller low",
	})...)
}

// TestRemoteAPIsNeedPermission: the policy must permit the socket, and its path must be a possible one.
func TestRemoteAPIsNeedPermission(t *testing.T) {
	closed := newRig(t, "version: 1\n", "")
	_, got := closed.run("", closed.calls("capabilities main"))
	sameLines(t, got, "FailedPrecondition: ")
	expect.Text(t, got[0], "ask the operator for a profile with remote_apis: {allow: true}", "refusal")

	r := newRig(t, permits, "")
	for path, want := range map[string]string{
		"program": "is an input", "program/s": "is below an input", "sub": "is an output", "../s": "is neither", "/run/s": "is neither",
		"/dev/s": "is neither", "a/../b": "",
	} {
		m, _ := r.run("", r.action([]string{"/bin/true"}, "remoteApisSocketPath="+path))
		if want == "" {
			expect.Equal(t, m.GetStatus().GetCode(), 0, "%s: %v", path, m.GetStatus())
			continue
		}
		expect.Equal(t, codes.Code(m.GetStatus().GetCode()), codes.InvalidArgument, "%s: %v", path, m.GetStatus())
		expect.Text(t, m.GetStatus().GetMessage(), want, "%s", path)
	}
}

// TestCallsEndWithTheAction: nested actions end with the outer action, even if it exits without waiting for them or
// times out while it waits.
func TestCallsEndWithTheAction(t *testing.T) {
	for name, c := range map[string]struct {
		timeout *durationpb.Duration
		wait    string // command of the action after the call
		want    codes.Code
	}{
		"exits":     {nil, "until grep -q EXECUTING log; do sleep 0.05; done", codes.OK},
		"times out": {durationpb.New(5 * time.Second), "wait", codes.DeadlineExceeded},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, permits, "")
			sleep := r.action([]string{"/bin/sleep", "3600"})
			script := `./program call ` + socketPath + ` "wait main ` + sleep + `" > log & ` + c.wait
			m, _ := r.run("", r.timedAction(c.timeout, []string{"/bin/sh", "-c", script}, "remoteApisSocketPath="+socketPath))
			expect.Equal(t, codes.Code(m.GetStatus().GetCode()), c.want, "status: %s", m.GetMessage())
			expect.Equal(t, m.GetResult().GetExitCode() == 0, c.want == codes.OK, "exit code 0: %s", m.GetMessage())
			all, _ := r.server.Queue().Older(0, 10)
			must.Be(t, len(all) == 2, "got %d operations, want 2", len(all))
			for _, o := range all {
				expect.Equal(t, o.State().Stage, repb.ExecutionStage_COMPLETED, "stage of %s", o.Action())
			}
			// The slot for nested actions is free again.
			inner := r.action([]string{"/bin/echo", "next"})
			_, lines := r.run("", r.calls("execute main "+inner))
			sameLines(t, lines, "execute [next]")
			for _, w := range r.server.Queue().Workers() {
				for _, s := range w.Slots {
					expect.That(t, s.Action.IsZero(), "slot %s still has action %s", s.Name, s.Action)
				}
			}
		})
	}
}

// TestAbandonedExecutionEnds: an execution ends when its call does.
func TestAbandonedExecutionEnds(t *testing.T) {
	r := newRig(t, permits, "")
	sleep := r.action([]string{"/bin/sleep", "3600"})
	script := `./program call ` + socketPath + ` "wait main ` + sleep + `" > log & pid=$!
		until grep -q EXECUTING log; do sleep 0.05; done; kill $pid; ./program call ` + socketPath + ` "execute main ` + r.action([]string{"/bin/echo", "next"}) + `"`
	_, lines := r.run("", r.action([]string{"/bin/sh", "-c", script}, "remoteApisSocketPath="+socketPath))
	sameLines(t, lines, "execute [next]")
}

// TestActionsBelongToTheBuild of the outermost action, whatever invocation they state, even if its client states none.
func TestActionsBelongToTheBuild(t *testing.T) {
	r := newRig(t, permits, "")
	r.run("", r.calls("invocation forged", "execute main "+r.action([]string{"/bin/echo", "inner"})))
	all, _ := r.server.Queue().Older(0, 10)
	must.Be(t, len(all) == 2, "got %d operations, want 2", len(all))
	for _, o := range all {
		expect.Equal(t, o.Info().Invocation, "", "invocation of %s", o.Action())
	}
}
