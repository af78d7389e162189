// SPDX-License-Identifier: Apache-2.0

package load_test

import (
	"bytes"
	"context"
	"os"
	"os/exec"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	"cloud.google.com/go/longrunning/autogen/longrunningpb"
	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/casserver"
	"github.com/cloister-build/cloister/cas/castest"
	"github.com/cloister-build/cloister/cas/tree"
	"github.com/cloister-build/cloister/cmd/cloister-bench/internal/load"
	"github.com/cloister-build/cloister/sandbox/sandboxtest"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/grpctest"
	"github.com/cloister-build/cloister/tests/must"
	rpcpb "google.golang.org/genproto/googleapis/rpc/status"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"
	"google.golang.org/protobuf/types/known/timestamppb"
)

// A bareWorker executes actions in temporary directories without a sandbox.
type bareWorker struct {
	repb.UnimplementedExecutionServer
	t     *testing.T
	in    *cas.Instance
	spoil func(*repb.ExecuteResponse) // changes responses, unless nil

	mu       sync.Mutex
	executed []*repb.ExecuteRequest
}

// serveWorker serves a worker and its store at one address.
func serveWorker(t *testing.T, spoil func(*repb.ExecuteResponse), options ...grpc.ServerOption) (address string, w *bareWorker) {
	t.Helper()
	instances := castest.Instances()
	in := must.Get(instances("main"))(t)
	w = &bareWorker{t: t, in: in, spoil: spoil}
	address = grpctest.Serve(t, func(s *grpc.Server) {
		casserver.Register(s, casserver.Config{Instances: instances})
		repb.RegisterExecutionServer(s, w)
	}, options...)
	return "grpc://" + address + "/main", w
}

func (w *bareWorker) Execute(req *repb.ExecuteRequest, to grpc.ServerStreamingServer[longrunningpb.Operation]) error {
	w.mu.Lock()
	w.executed = append(w.executed, req)
	w.mu.Unlock()
	if err := to.Send(&longrunningpb.Operation{Name: "running"}); err != nil {
		return err
	}
	queued := timestamppb.Now()
	result, err := w.run(req.ActionDigest)
	if err != nil {
		return err
	}
	result.ExecutionMetadata = &repb.ExecutedActionMetadata{QueuedTimestamp: queued, WorkerStartTimestamp: timestamppb.Now()}
	response := &repb.ExecuteResponse{Result: result}
	if w.spoil != nil {
		w.spoil(response)
	}
	packed, err := anypb.New(response)
	if err != nil {
		return err
	}
	return to.Send(&longrunningpb.Operation{Name: "done", Done: true, Result: &longrunningpb.Operation_Response{Response: packed}})
}

// read reads a message from the store.
func (w *bareWorker) read(d *repb.Digest, m proto.Message) error {
	digest, err := cas.FromProto(cas.SHA256, d)
	if err != nil {
		return err
	}
	return cas.ReadProto(w.t.Context(), w.in.Store, digest, m)
}

func (w *bareWorker) run(action *repb.Digest) (*repb.ActionResult, error) {
	var a repb.Action
	var c repb.Command
	if err := w.read(action, &a); err != nil {
		return nil, err
	}
	if err := w.read(a.CommandDigest, &c); err != nil {
		return nil, err
	}
	dir, err := os.OpenRoot(w.t.TempDir())
	if err != nil {
		return nil, err
	}
	defer dir.Close()
	inputs := &repb.ActionResult{OutputDirectories: []*repb.OutputDirectory{{RootDirectoryDigest: a.InputRootDigest}}}
	if err := tree.Extract(w.t.Context(), w.in.Store, cas.SHA256, inputs, dir); err != nil {
		return nil, err
	}
	cmd := exec.CommandContext(w.t.Context(), c.Arguments[0], c.Arguments[1:]...)
	cmd.Dir = dir.Name()
	for _, v := range c.EnvironmentVariables {
		cmd.Env = append(cmd.Env, v.Name+"="+v.Value)
	}
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	result := &repb.ActionResult{}
	if result.StdoutRaw, err = cmd.Output(); cmd.ProcessState == nil {
		return nil, err
	}
	result.ExitCode, result.StderrRaw = int32(cmd.ProcessState.ExitCode()), stderr.Bytes()
	batch := cas.NewBatch(w.in.Store)
	if _, err := tree.Capture(w.t.Context(), batch, cas.SHA256, dir, tree.OutputSpec{Paths: c.OutputPaths}, result); err != nil {
		return nil, err
	}
	return result, batch.Flush(w.t.Context())
}

// tiny returns a short workload of a kind.
func tiny(kind load.Kind) load.Workload {
	w := load.Workload{Kind: kind, Actions: 5, Parallel: 2}
	if kind == load.Trees || kind == load.Mixed {
		w.Tree = load.Tree{Files: 12, Dirs: 5, Changed: 3, Read: true}
	}
	if kind == load.Outputs || kind == load.Mixed {
		w.Files, w.InDirectory = 3, 2
	}
	return w
}

func execute(t *testing.T, c load.ExecConfig, address string) (*load.ExecReport, error) {
	t.Helper()
	dir := t.TempDir()
	t.Setenv("TMPDIR", dir)
	c.Salt, c.LocalTime = "salt", time.Millisecond
	if c.Rounds == 0 {
		c.Rounds = 1
	}
	report, err := load.Execute(t.Context(), c, []*load.Server{dial(t, "one", address)})
	if left, readErr := os.ReadDir(dir); readErr != nil || len(left) > 0 {
		t.Errorf("got %d files left in the scratch directory, %v, want none", len(left), readErr)
	}
	return report, err
}

// TestExecuteRunsEveryWorkload checks that each action runs once, all of them differ, and none is from a cache.
func TestExecuteRunsEveryWorkload(t *testing.T) {
	address, w := serveWorker(t, nil)
	unread := tiny(load.Trees)
	unread.Tree.Read = false
	c := load.ExecConfig{
		Workloads: []load.Workload{tiny(load.Noop), tiny(load.Trees), unread, tiny(load.Outputs), tiny(load.Mixed), tiny(load.Compiles)},
		Rounds:    2,
		Platform:  []*repb.Platform_Property{{Name: "pool", Value: "b"}, {Name: "OSFamily", Value: "linux"}},
	}
	if last := len(c.Workloads) - 1; c.Workloads[last].Missing() != "" {
		t.Logf("compile is not tested: this machine lacks %s", c.Workloads[last].Missing())
		c.Workloads = c.Workloads[:last]
	}
	report := must.Get(execute(t, c, address))(t)
	digests := map[string]bool{}
	for _, req := range w.executed {
		digests[req.ActionDigest.Hash] = true
		var a repb.Action
		must.Succeed(t, w.read(req.ActionDigest, &a))
		p := a.Platform.GetProperties()
		expect.That(t, req.SkipCacheLookup && req.InstanceName == "main" && len(p) == 2 && p[0].Name == "OSFamily",
			"got request %v for action %v, want skip_cache_lookup, instance main and two sorted properties", req, &a)
	}
	// Two actions run before the clock starts.
	if want := c.Rounds * len(c.Workloads) * (5 + 2); len(w.executed) != want || len(digests) != want {
		t.Errorf("got %d executions of %d different actions, want %d", len(w.executed), len(digests), want)
	}
	for _, m := range report.Workloads {
		s := &m.Servers[0]
		expect.That(t, len(s.Rates) == 2 && len(m.Local.Rates) == 2 && len(m.Local.Spawns) == 2,
			"%s: got %+v and %+v, want two rounds", m.Kind, m.Local, s)
		first, next, _ := s.FirstExtra()
		if min(s.Rate(), m.Local.Spawn(), s.SpawnRatio(&m.Local), s.P50(), s.P50Ratio(&m.Local), first, next) <= 0 {
			t.Errorf("%s: got %+v and %+v, want positive rates and times", m.Kind, m.Local, s)
		}
	}
	var text strings.Builder
	must.Succeed(t, report.Text(&text))
	if got := text.String(); strings.Count(got, "fork+exec") != len(c.Workloads) || !strings.Contains(got, "first on the tree") {
		t.Errorf("got\n%s\nwant fork+exec once per workload and \"first on the tree\"", got)
	}
}

// TestExecuteAlternates checks that each round begins with another server, or with the bare machine.
func TestExecuteAlternates(t *testing.T) {
	var mu sync.Mutex
	var order []string
	note := func(name string) func(*repb.ExecuteResponse) {
		return func(*repb.ExecuteResponse) {
			mu.Lock()
			defer mu.Unlock()
			if len(order) == 0 || order[len(order)-1] != name {
				order = append(order, name)
			}
		}
	}
	one, _ := serveWorker(t, note("one"))
	two, _ := serveWorker(t, note("two"))
	c := load.ExecConfig{
		Salt: "salt", Workloads: []load.Workload{tiny(load.Noop)}, Rounds: 3, LocalTime: time.Millisecond,
		Progress: func(int, *load.Workload) { order = append(order, "round") },
	}
	must.Get(load.Execute(t.Context(), c, []*load.Server{dial(t, "one", one), dial(t, "two", two)}))(t)
	expect.Slices(t, order, []string{"round", "one", "two", "round", "one", "two", "round", "two", "one"})
}

// TestChangedFilesAreSpread checks that two actions differ in their changed files only, and share the other
// directories.
func TestChangedFilesAreSpread(t *testing.T) {
	address, w := serveWorker(t, nil)
	one := tiny(load.Trees)
	one.Tree.Changed = 2
	must.Get(execute(t, load.ExecConfig{Workloads: []load.Workload{one}}, address))(t)
	var dirs [2]map[string]string // digests by name
	var files [2]map[string]string
	for i := range dirs {
		dirs[i], files[i] = map[string]string{}, map[string]string{}
		var a repb.Action
		var root repb.Directory
		must.Succeed(t, w.read(w.executed[i].ActionDigest, &a))
		must.Succeed(t, w.read(a.InputRootDigest, &root))
		for _, sub := range root.Directories {
			dirs[i][sub.Name] = sub.Digest.Hash
			var d repb.Directory
			must.Succeed(t, w.read(sub.Digest, &d))
			for _, f := range d.Files {
				files[i][sub.Name+"/"+f.Name] = f.Digest.Hash
			}
		}
	}
	differ := func(of [2]map[string]string) (n int) {
		for name, digest := range of[0] {
			if of[1][name] != digest {
				n++
			}
		}
		return n
	}
	if len(dirs[0]) != 5 || len(files[0]) != 12 || differ(dirs) != 4 || differ(files) != 4 {
		t.Errorf("%d of %d directories and %d of %d files differ, want 4 of 5 and 4 of 12",
			differ(dirs), len(dirs[0]), differ(files), len(files[0]))
	}
}

// TestWrongResultsAreFound spoils one of several answers.
func TestWrongResultsAreFound(t *testing.T) {
	other := &repb.Digest{Hash: strings.Repeat("0", 64), SizeBytes: 1024}
	for _, c := range []struct {
		name  string
		kind  load.Kind
		spoil func(*repb.ExecuteResponse)
		want  string
	}{
		{"ExitCode", load.Noop, func(r *repb.ExecuteResponse) {
			r.Result.ExitCode, r.Result.StderrRaw = 7, []byte("oh")
		}, `exit code 7, stderr "oh"`},
		{"Status", load.Noop, func(r *repb.ExecuteResponse) {
			r.Status = &rpcpb.Status{Code: int32(codes.DeadlineExceeded), Message: "late"}
		}, "late"},
		{"Cached", load.Noop, func(r *repb.ExecuteResponse) { r.CachedResult = true }, "result is cached"},
		{"NoResult", load.Noop, func(r *repb.ExecuteResponse) { r.Result = nil }, "no result"},
		{"UnexpectedStdout", load.Noop, func(r *repb.ExecuteResponse) { r.Result.StdoutRaw = []byte("x") }, `stdout is "x"`},
		{"Stdout", load.Trees, func(r *repb.ExecuteResponse) { r.Result.StdoutRaw[0] ^= 1 }, "stdout is .* want"},
		{"StdoutDigest", load.Trees, func(r *repb.ExecuteResponse) {
			r.Result.StdoutRaw, r.Result.StdoutDigest = nil, other
		}, "stdout has digest 0000"},
		{"NoStdout", load.Trees, func(r *repb.ExecuteResponse) { r.Result.StdoutRaw = nil }, "stdout has digest"},
		{"OutputDigest", load.Outputs, func(r *repb.ExecuteResponse) { r.Result.OutputFiles[1].Digest = other }, "output f1 has digest 0000"},
		{"ObjectAbsent", load.Compiles, func(r *repb.ExecuteResponse) { r.Result.OutputFiles = nil }, "output out.o is absent"},
		{"OutputAbsent", load.Outputs, func(r *repb.ExecuteResponse) {
			r.Result.OutputFiles = r.Result.OutputFiles[1:]
		}, "output f0 is absent"},
		{"UnexpectedOutput", load.Outputs, func(r *repb.ExecuteResponse) {
			r.Result.OutputFiles = append(r.Result.OutputFiles, &repb.OutputFile{Path: "core", Digest: other})
		}, `unexpected output "core"`},
		{"OutputIsSymlink", load.Outputs, func(r *repb.ExecuteResponse) {
			r.Result.OutputSymlinks = []*repb.OutputSymlink{{Path: "l", Target: "t"}}
		}, "got 1 output symlinks"},
		{"NoDirectory", load.Outputs, func(r *repb.ExecuteResponse) { r.Result.OutputDirectories = nil }, "got output directories .*want only d"},
		{"UnexpectedDirectory", load.Noop, func(r *repb.ExecuteResponse) {
			r.Result.OutputDirectories = []*repb.OutputDirectory{{Path: "d", TreeDigest: other}}
		}, "got output directories .*want none"},
		{"TreeAbsent", load.Outputs, func(r *repb.ExecuteResponse) {
			r.Result.OutputDirectories[0].TreeDigest = other
		}, "output directory d, tree 0000"},
		{"OtherTree", load.Outputs, func(r *repb.ExecuteResponse) {
			r.Result.OutputDirectories[0].TreeDigest = cas.SHA256.Sum(nil).Proto()
		}, "output d/f0 is absent"},
	} {
		t.Run(c.name, func(t *testing.T) {
			w := tiny(c.kind)
			if program := w.Missing(); program != "" {
				sandboxtest.Unavailable(t, "tools", program+" is missing")
			}
			var mu sync.Mutex
			n := 0
			address, _ := serveWorker(t, func(r *repb.ExecuteResponse) {
				mu.Lock()
				defer mu.Unlock()
				if n++; n == 4 {
					c.spoil(r)
				}
			})
			_, err := execute(t, load.ExecConfig{Workloads: []load.Workload{w}}, address)
			pattern := "^one: " + string(c.kind) + ": action [0-9a-f]{64}/[0-9]+: .*" + c.want
			expect.That(t, err != nil && regexp.MustCompile(pattern).MatchString(err.Error()),
				"got %v, want %s", err, pattern)
		})
	}
}

// TestOutputsMustBeStored deletes an output of a correct result.
func TestOutputsMustBeStored(t *testing.T) {
	var w *bareWorker
	address, w := serveWorker(t, func(r *repb.ExecuteResponse) {
		d, err := cas.FromProto(cas.SHA256, r.Result.OutputFiles[0].Digest)
		expect.Error(t, err, nil)
		w.in.Store.(*castest.Memory).Delete(d)
	})
	_, err := execute(t, load.ExecConfig{Workloads: []load.Workload{tiny(load.Outputs)}}, address)
	expect.Message(t, err, "is absent from the store", "an output blob absent from the store")
}

// TestUploadRespectsBatchLimit checks that batches respect the limit of the server, and that streams send larger blobs.
func TestUploadRespectsBatchLimit(t *testing.T) {
	const most = 4000
	var mu sync.Mutex
	batches := 0
	intercept := func(ctx context.Context, req any, _ *grpc.UnaryServerInfo, next grpc.UnaryHandler) (any, error) {
		answer, err := next(ctx, req)
		switch m := req.(type) {
		case *repb.GetCapabilitiesRequest:
			answer.(*repb.ServerCapabilities).CacheCapabilities.MaxBatchTotalSizeBytes = most
		case *repb.BatchUpdateBlobsRequest:
			mu.Lock()
			defer mu.Unlock()
			if batches++; proto.Size(m) > most {
				t.Errorf("got a batch of %d bytes, want at most %d", proto.Size(m), most)
			}
		}
		return answer, err
	}
	address, w := serveWorker(t, nil, grpc.UnaryInterceptor(intercept))
	one := tiny(load.Trees)
	must.Get(execute(t, load.ExecConfig{Workloads: []load.Workload{one}}, address))(t)
	large := 0
	for _, d := range w.in.Store.(*castest.Memory).Digests() {
		if d.Size() > most {
			large++
		}
	}
	expect.That(t, batches >= 2 && large != 0,
		"got %d batches and %d large blobs, want at least 2 and 1", batches, large)
}

func TestSeparateStore(t *testing.T) {
	address, w := serveWorker(t, nil)
	other, _ := serveWorker(t, nil)
	server := dial(t, "one", address)
	c := load.ExecConfig{Salt: "salt", Workloads: []load.Workload{tiny(load.Noop)}, Rounds: 1, LocalTime: time.Millisecond}
	must.Succeed(t, server.DialStore(t.Context(), other))
	if _, err := load.Execute(t.Context(), c, []*load.Server{server}); err == nil || len(w.executed) != 1 {
		t.Errorf("got %v after %d requests, want the first to miss its blobs", err, len(w.executed))
	}
	if err := dial(t, "two", address).DialStore(t.Context(), "http://x"); err == nil {
		t.Error("DialStore of a malformed address: got no error")
	}
}
