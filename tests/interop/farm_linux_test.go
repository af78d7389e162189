// SPDX-License-Identifier: Apache-2.0

package interop_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/castest"
	"github.com/cloister-build/cloister/cas/remote"
	"github.com/cloister-build/cloister/sandbox/sandboxtest"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/internal/bazelrun"
	"github.com/cloister-build/cloister/tests/internal/loopback"
	"github.com/cloister-build/cloister/tests/interop/peers"
	"github.com/cloister-build/cloister/tests/must"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"
)

// buildbarn is a farm with Buildbarn's scheduler and a store behind it.
type buildbarn struct {
	store, scheduler *peers.Server
	metrics          string   // HOST:PORT of the scheduler's metrics
	flags            []string // of the scheduler
}

// farm starts a farm without workers, with flags for the scheduler.
func farm(t *testing.T, flags ...string) *buildbarn {
	t.Helper()
	store := start(t, peers.BazelRemote)
	metrics := must.Get(loopback.Address())(t)
	b := &buildbarn{store: store, metrics: metrics, flags: flags}
	b.schedule(t, "")
	return b
}

// schedule starts the scheduler at an address, "" for any.
func (b *buildbarn) schedule(t *testing.T, addr string) {
	t.Helper()
	b.scheduler = launch(t, peers.BBScheduler, peers.Options{Listen: addr, Store: b.store.Addr, Metrics: b.metrics, Args: b.flags})
}

// worker starts a Buildbarn worker for any scheduler and store. Unless the options name a runner, it has Buildbarn's.
func worker(t *testing.T, o peers.Options) *peers.Server {
	t.Helper()
	if o.Build == "" {
		o.Build = t.TempDir()
	}
	if o.Runner == "" {
		dir := t.TempDir()
		launch(t, peers.BBRunner, peers.Options{Dir: dir, Build: o.Build})
		o.Runner = "unix:" + filepath.Join(dir, peers.RunnerSocket)
	}
	return launch(t, peers.BBWorker, o)
}

// worker starts a Buildbarn worker in the farm, with further flags.
func (b *buildbarn) worker(t *testing.T, flags ...string) *peers.Server {
	t.Helper()
	return worker(t, peers.Options{Scheduler: b.scheduler.Addr, Store: b.store.Addr, Args: flags})
}

// action stores an action that runs a shell script, with input in/name, $WHERE set to "here", optional output out/copy
// and platform os=linux.
func action(t *testing.T, store *remote.Store, script string, timeout time.Duration) *repb.Digest {
	t.Helper()
	return must.Get(uploadAction(t.Context(), store, script, timeout))(t)
}

// uploadAction is action without a test.
func uploadAction(ctx context.Context, store *remote.Store, script string, timeout time.Duration) (*repb.Digest, error) {
	var all error
	blob := func(b []byte) *repb.Digest {
		d := cas.SHA256.Sum(b)
		all = errors.Join(all, store.Put(ctx, d, bytes.NewReader(b)))
		return d.Proto()
	}
	message := func(m proto.Message) *repb.Digest {
		b, err := proto.Marshal(m)
		all = errors.Join(all, err)
		return blob(b)
	}
	platform := &repb.Platform{Properties: []*repb.Platform_Property{{Name: "os", Value: "linux"}}}
	d := message(&repb.Action{
		CommandDigest: message(&repb.Command{
			Arguments:            []string{"/bin/sh", "-c", script},
			EnvironmentVariables: []*repb.Command_EnvironmentVariable{{Name: "PATH", Value: "/usr/bin:/bin"}, {Name: "WHERE", Value: "here"}},
			OutputPaths:          []string{"out/copy"},
			Platform:             platform,
		}),
		InputRootDigest: message(&repb.Directory{Directories: []*repb.DirectoryNode{{
			Name:   "in",
			Digest: message(&repb.Directory{Files: []*repb.FileNode{{Name: "name", Digest: blob([]byte("an input\n"))}}}),
		}}}),
		Platform: platform,
		Timeout:  durationpb.New(timeout),
	})
	return d, all
}

// execute executes an action and returns the response. Like other clients it retries while the scheduler has no worker.
func execute(ctx context.Context, addr, instance string, action *repb.Digest) (*repb.ExecuteResponse, error) {
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(50 * time.Millisecond) {
		response, err := executeOnce(ctx, addr, instance, action)
		if status.Code(err) != codes.Unavailable || time.Now().After(deadline) {
			return response, err
		}
	}
}

// executeOnce is execute without retries.
func executeOnce(ctx context.Context, addr, instance string, action *repb.Digest) (*repb.ExecuteResponse, error) {
	conn, err := grpc.NewClient(addr, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	s, err := repb.NewExecutionClient(conn).Execute(ctx, &repb.ExecuteRequest{InstanceName: instance, ActionDigest: action, SkipCacheLookup: true})
	if err != nil {
		return nil, err
	}
	for {
		op, err := s.Recv()
		if err != nil {
			return nil, err
		}
		if op.Done {
			response := &repb.ExecuteResponse{}
			return response, op.GetResponse().UnmarshalTo(response)
		}
	}
}

// content reads a blob of a store.
func content(t *testing.T, store *remote.Store, d *repb.Digest) string {
	t.Helper()
	digest := must.Get(cas.FromProto(cas.SHA256, d))(t)
	r := must.Get(store.Open(t.Context(), digest, 0))(t)
	defer r.Close()
	b := must.Get(io.ReadAll(r))(t)
	return string(b)
}

// TestSchedulerForwardsToTheStore so that clients need no other address.
func TestSchedulerForwardsToTheStore(t *testing.T) {
	b := farm(t)
	front, behind := peer{dial(t, b.scheduler, "")}, peer{dial(t, b.store, "")}
	wantRead(t, behind, 1, put(t, front, 1))
	wantRead(t, front, 2, put(t, behind, 2))
	castest.TestActionCache(t, func(t *testing.T) cas.ActionCache { return front })
}

// TestBuildbarnAlone executes actions with Buildbarn's scheduler, worker and runner, as the reference for tests that
// replace one of them.
func TestBuildbarnAlone(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name              string
		scheduler, worker []string // flags
	}{
		{"QueueOfItsWorkers", nil, nil},
		{"SizeClass", []string{"-declare", "-property", "os=linux", "-size-class", "8"}, []string{"-size-class", "8"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			b := farm(t, c.scheduler...)
			b.worker(t, append([]string{"-property", "os=linux", "-id", "host=one", "-threads", "2"}, c.worker...)...)
			wantExecutes(t, b.scheduler.Addr, "")
		})
	}
}

// wantExecutes checks actions for os=linux at an address and in an instance: outputs and the recorded result, a
// non-zero exit code, and a timeout.
func wantExecutes(t *testing.T, addr, instance string) {
	t.Helper()
	store := dialAt(t, addr, instance)
	d := action(t, store, "cp in/name out/copy && echo $WHERE && echo there >&2", time.Minute)
	response := must.Get(execute(t.Context(), addr, instance, d))(t)
	result := response.GetResult()
	must.Be(t, response.GetStatus().GetCode() == 0 && result.GetExitCode() == 0 && len(result.GetOutputFiles()) == 1,
		"response is %v, want one output", response)
	for _, c := range []struct {
		name, want string
		d          *repb.Digest
	}{
		{"output", "an input\n", result.OutputFiles[0].Digest},
		{"stdout", "here\n", result.StdoutDigest},
		{"stderr", "there\n", result.StderrDigest},
	} {
		expect.Equal(t, content(t, store, c.d), c.want, "%s", c.name)
	}
	digest := must.Get(cas.FromProto(cas.SHA256, d))(t)
	expect.Equal(t, len(must.Get(store.Lookup(t.Context(), digest))(t).GetOutputFiles()), 1, "recorded result")

	response, err := execute(t.Context(), addr, instance, action(t, store, "exit 3", time.Minute))
	expect.That(t, err == nil && response.GetStatus().GetCode() == 0 && response.GetResult().GetExitCode() == 3,
		"response is %v, %v, want exit code 3", response, err)
	for timeout := time.Second; timeout < time.Minute; timeout *= 2 {
		response, err = execute(t.Context(), addr, instance, action(t, store, fmt.Sprintf("echo before; : %v; sleep 600", timeout), timeout))
		if r := response.GetResult(); r.GetExitCode() != -1 && r.GetStdoutDigest().GetSizeBytes() > 0 {
			break
		}
		// A machine that stalls needs a longer one. And bb_runner enforces the timeout, too: if it is first, it reports a
		// killed command, and bb_worker no timeout.
	}
	must.Be(t, err == nil && codes.Code(response.GetStatus().GetCode()) == codes.DeadlineExceeded,
		"response is %v, %v, want DEADLINE_EXCEEDED", response, err)
	expect.Equal(t, content(t, store, response.GetResult().GetStdoutDigest()), "before\n", "stdout before the timeout")
}

// scrape returns /metrics of a process, which may serve it a moment after everything else.
func scrape(t *testing.T, addr string) []byte {
	t.Helper()
	r, err := http.Get("http://" + addr + "/metrics")
	for deadline := time.Now().Add(time.Minute); errors.Is(err, syscall.ECONNREFUSED) && time.Now().Before(deadline); {
		time.Sleep(20 * time.Millisecond)
		r, err = http.Get("http://" + addr + "/metrics")
	}
	must.Succeed(t, err)
	defer r.Body.Close()
	text, err := io.ReadAll(r.Body)
	must.Be(t, err == nil && r.StatusCode == http.StatusOK, "metrics: %s, %v", r.Status, err)
	return text
}

// counted matches the scheduler's task counters in Prometheus text format.
var counted = regexp.MustCompile(`(?m)^buildbarn_builder_in_memory_build_queue_tasks_(\w+)\{.*\} (\S+)$`)

// tasks returns the queued and the executing tasks, computed as in Buildbarn's deployments: the scheduler has no
// gauges.
func (b *buildbarn) tasks(t *testing.T) (queued, executing float64) {
	t.Helper()
	sum := map[string]float64{}
	for _, m := range counted.FindAllSubmatch(scrape(t, b.metrics), -1) {
		v := must.Get(strconv.ParseFloat(string(m[2]), 64))(t)
		sum[string(m[1])] += v
	}
	return sum["scheduled_total"] - sum["queued_duration_seconds_count"],
		sum["queued_duration_seconds_count"] - sum["executing_duration_seconds_count"]
}

// wantTasks waits for these numbers of queued and executing tasks.
func (b *buildbarn) wantTasks(t *testing.T, queued, executing float64) {
	t.Helper()
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(50 * time.Millisecond) {
		q, e := b.tasks(t)
		if q == queued && e == executing {
			return
		}
		must.Be(t, !time.Now().After(deadline),
			"%v tasks queued and %v executing, want %v and %v", q, e, queued, executing)
	}
}

// TestSchedulerReportsQueueDepth which autoscalers use.
func TestSchedulerReportsQueueDepth(t *testing.T) {
	const n = 3
	b := farm(t, "-declare", "-property", "os=linux")
	b.wantTasks(t, 0, 0)
	store := dial(t, b.scheduler, "")
	gate := filepath.Join(t.TempDir(), "gate")
	ended := make(chan error, n)
	for i := range n {
		d := action(t, store, fmt.Sprintf(": %d; until test -e %s; do sleep 0.05; done", i, gate), time.Minute)
		go func() {
			response, err := execute(t.Context(), b.scheduler.Addr, "", d)
			if err == nil && (response.GetStatus().GetCode() != 0 || response.GetResult().GetExitCode() != 0) {
				err = fmt.Errorf("response is %v", response)
			}
			ended <- err
		}()
	}
	b.wantTasks(t, n, 0)
	b.worker(t, "-property", "os=linux", "-id", "host=one")
	b.wantTasks(t, n-1, 1)
	must.Succeed(t, os.WriteFile(gate, nil, 0o600))
	for range n {
		must.Succeed(t, <-ended)
	}
	b.wantTasks(t, 0, 0)
}

// TestSchedulerReportsLostWorker by name and as UNAVAILABLE, so that clients retry.
func TestSchedulerReportsLostWorker(t *testing.T) {
	// The scheduler checks for lost workers only on other events; here, the updates of a waiting client.
	b := farm(t, "-declare", "-property", "os=linux", "-worker-timeout", "1s", "-busy", "500ms", "-update", "500ms")
	lost := b.worker(t, "-property", "os=linux", "-id", "host=one")
	d := action(t, dial(t, b.scheduler, ""), "sleep 600", time.Hour)
	ended := make(chan error, 1)
	go func() {
		response, err := execute(t.Context(), b.scheduler.Addr, "", d)
		if err == nil {
			err = status.ErrorProto(response.GetStatus())
		}
		ended <- err
	}()
	b.wantTasks(t, 0, 1)
	lost.Kill()
	if err := <-ended; status.Code(err) != codes.Unavailable || !strings.Contains(err.Error(), `{"host":"one"}`) {
		t.Errorf("execution: %v, want UNAVAILABLE with the worker's name", err)
	}
}

// state calls a method of the scheduler's BuildQueueState with a JSON request and returns the JSON response.
func (b *buildbarn) state(t *testing.T, method, request string) string {
	t.Helper()
	program, err := programs[peers.BBState.Name]()
	if err != nil {
		sandboxtest.Unavailable(t, "interop", err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	out, err := exec.CommandContext(ctx, program, b.scheduler.Addr, method, request).CombinedOutput()
	must.Be(t, err == nil, "%s %s: %v: %s", method, request, err, out)
	return string(out)
}

func TestSchedulerDrainsWorker(t *testing.T) {
	b := farm(t, "-declare", "-property", "os=linux")
	b.worker(t, "-property", "os=linux", "-id", "host=one")
	const queue = `{"platformQueueName": {"platform": {"properties": [{"name": "os", "value": "linux"}]}}}`
	const drain = `{"sizeClassQueueName": ` + queue + `, "workerIdPattern": {"host": "one"}}`
	b.state(t, "AddDrain", drain)
	must.Hold(t, "the worker is listed", func() bool {
		return strings.Contains(b.state(t, "ListWorkers", `{"filter": {"all": `+queue+`}, "pageSize": 10}`), `"one"`)
	})
	d := action(t, dial(t, b.scheduler, ""), "true", time.Minute)
	ended := make(chan error, 1)
	go func() {
		_, err := execute(t.Context(), b.scheduler.Addr, "", d)
		ended <- err
	}()
	b.wantTasks(t, 1, 0)
	// A worker that is not drained would have taken it before this is answered.
	expect.Text(t, b.state(t, "ListDrains", `{"sizeClassQueueName": `+queue+`}`), `"one"`, "drains (worker one)")
	b.wantTasks(t, 1, 0)
	b.state(t, "RemoveDrain", drain)
	must.Succeed(t, <-ended)
	b.wantTasks(t, 0, 0)
}

// TestBazelBuildsWithBuildbarn is the reference for builds with Cloister's workers.
func TestBazelBuildsWithBuildbarn(t *testing.T) {
	t.Parallel()
	b := farm(t)
	b.worker(t, "-id", "host=one", "-threads", "2")
	wantBazel(t, b.scheduler.Addr)
}

// bazelFor returns a Bazel for a copy of the examples, without an endpoint.
func bazelFor(t *testing.T) *bazelrun.Bazel {
	t.Helper()
	if err := bazelrun.Find(); err != nil {
		sandboxtest.Unavailable(t, "bazel", err)
	}
	bazel := &bazelrun.Bazel{Workspace: filepath.Join(t.TempDir(), "workspace"), Root: t.TempDir()}
	must.Succeed(t, bazelrun.CopyWorkspace(bazel.Workspace, filepath.Join("..", "..")))
	t.Cleanup(func() { must.Succeed(t, bazel.Shutdown()) })
	return bazel
}

// wantBazel checks that Bazel builds and tests a part of the examples remotely.
func wantBazel(t *testing.T, addr string) {
	t.Helper()
	bazel := bazelFor(t)
	bazel.Endpoint = addr
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	build := must.Get(bazel.Run(ctx, "test", "//examples/hash:adler32_test"))(t)
	if ways := build.Processes(); build.ExitCode != 0 || ways["remote"] == 0 {
		t.Errorf("bazel: exit %d, processes %v; want success and only remote ones:\n%s", build.ExitCode, ways, build.Output)
	}
}

// wholeTime limits a build of all examples.
const wholeTime = 5 * time.Minute

// wantAll checks that Bazel builds and tests all examples from scratch, every action remotely.
func wantAll(t *testing.T, bazel *bazelrun.Bazel) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), wholeTime)
	defer cancel()
	must.Succeed(t, bazel.Clean(ctx))
	build := must.Get(bazel.Run(ctx, "test", "//examples/..."))(t)
	ways := build.Processes()
	delete(ways, "internal")
	must.Be(t, build.ExitCode == 0 && ways["remote"] >= 200 && len(ways) == 1,
		"bazel: exit %d, processes %v; want success and only remote ones:\n%s", build.ExitCode, ways, build.Output)
}
