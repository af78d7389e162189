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
	"github.com/cloister-build/cloister/tests/internal/bazelrun"
	"github.com/cloister-build/cloister/tests/interop/peers"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"
)

// buildbarn is a farm of Buildbarn's own parts: its scheduler, and a store behind it.
type buildbarn struct {
	store, scheduler *peers.Server
	metrics          string   // HOST:PORT of the scheduler's
	flags            []string // of the scheduler
}

// farm starts a farm without workers, with more flags of the scheduler; it ends with the test.
func farm(t *testing.T, flags ...string) *buildbarn {
	t.Helper()
	store := start(t, peers.BazelRemote)
	metrics, err := peers.FreeAddress()
	if err != nil {
		t.Fatal(err)
	}
	b := &buildbarn{store: store, metrics: metrics, flags: flags}
	b.schedule(t, "")
	return b
}

// schedule starts the scheduler at an address, "" for any; it ends with the test.
func (b *buildbarn) schedule(t *testing.T, addr string) {
	t.Helper()
	b.scheduler = launch(t, peers.BBScheduler, peers.Options{Listen: addr, Store: b.store.Addr, Metrics: b.metrics, Args: b.flags})
}

// worker starts a worker of Buildbarn for a scheduler and a store, which may be anybody's; it ends with the test. Unless
// the options name a runner, it has one of Buildbarn.
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

// worker starts a worker of Buildbarn in the farm, with more flags.
func (b *buildbarn) worker(t *testing.T, flags ...string) *peers.Server {
	t.Helper()
	return worker(t, peers.Options{Scheduler: b.scheduler.Addr, Store: b.store.Addr, Args: flags})
}

// action puts an action into a store that runs a script in a shell. It has an input, in/name, says "here" by $WHERE,
// may make the file out/copy, and demands the platform os=linux.
func action(t *testing.T, store *remote.Store, script string, timeout time.Duration) *repb.Digest {
	t.Helper()
	blob := func(b []byte) *repb.Digest {
		d := cas.SHA256.Sum(b)
		if err := store.Put(t.Context(), d, bytes.NewReader(b)); err != nil {
			t.Fatal(err)
		}
		return d.Proto()
	}
	message := func(m proto.Message) *repb.Digest {
		b, err := proto.Marshal(m)
		if err != nil {
			t.Fatal(err)
		}
		return blob(b)
	}
	platform := &repb.Platform{Properties: []*repb.Platform_Property{{Name: "os", Value: "linux"}}}
	return message(&repb.Action{
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
}

// execute has an action of an instance executed at an address and returns how that ended, however it did. Like other clients it asks
// again as long as the scheduler has not heard of its first worker.
func execute(ctx context.Context, addr, instance string, action *repb.Digest) (*repb.ExecuteResponse, error) {
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(50 * time.Millisecond) {
		response, err := executeOnce(ctx, addr, instance, action)
		if status.Code(err) != codes.Unavailable || time.Now().After(deadline) {
			return response, err
		}
	}
}

// executeOnce is execute without asking again.
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
	digest, err := cas.FromProto(cas.SHA256, d)
	if err != nil {
		t.Fatal(err)
	}
	r, err := store.Open(t.Context(), digest, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	b, err := io.ReadAll(r)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

// TestSchedulerPassesOn: what a client puts at the address of Buildbarn's scheduler is in the store behind it, and
// what is there comes back, so that a client needs no other address.
func TestSchedulerPassesOn(t *testing.T) {
	b := farm(t)
	front, behind := peer{dial(t, b.scheduler, "")}, peer{dial(t, b.store, "")}
	wantRead(t, behind, 1, put(t, front, 1))
	wantRead(t, front, 2, put(t, behind, 2))
	castest.TestActionCache(t, func(t *testing.T) cas.ActionCache { return front })
}

// TestBuildbarnAlone: an action goes through Buildbarn's scheduler, worker and runner, and comes back with its
// outputs; its result is in the store. So if the same fails with a part of Cloister among them, it is that part.
func TestBuildbarnAlone(t *testing.T) {
	for _, c := range []struct {
		name              string
		scheduler, worker []string // more flags
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

// wantExecutes fails the test unless actions for os=linux end at an address, in an instance, as they should: with outputs, which are in
// the store there as the result is, with an exit code, and at their timeout.
func wantExecutes(t *testing.T, addr, instance string) {
	t.Helper()
	store := dialAt(t, addr, instance)
	d := action(t, store, "cp in/name out/copy && echo $WHERE && echo there >&2", time.Minute)
	response, err := execute(t.Context(), addr, instance, d)
	if err != nil {
		t.Fatal(err)
	}
	result := response.GetResult()
	if response.GetStatus().GetCode() != 0 || result.GetExitCode() != 0 || len(result.GetOutputFiles()) != 1 {
		t.Fatalf("response is %v, want one output", response)
	}
	for _, c := range []struct {
		name, want string
		d          *repb.Digest
	}{
		{"output", "an input\n", result.OutputFiles[0].Digest},
		{"stdout", "here\n", result.StdoutDigest},
		{"stderr", "there\n", result.StderrDigest},
	} {
		if got := content(t, store, c.d); got != c.want {
			t.Errorf("%s is %q, want %q", c.name, got, c.want)
		}
	}
	digest, err := cas.FromProto(cas.SHA256, d)
	if err != nil {
		t.Fatal(err)
	}
	if recorded, err := store.Lookup(t.Context(), digest); err != nil || len(recorded.GetOutputFiles()) != 1 {
		t.Errorf("recorded is %v, %v, want the result", recorded, err)
	}

	response, err = execute(t.Context(), addr, instance, action(t, store, "exit 3", time.Minute))
	if err != nil || response.GetStatus().GetCode() != 0 || response.GetResult().GetExitCode() != 3 {
		t.Errorf("response is %v, %v, want the exit code 3", response, err)
	}
	for i := range 5 {
		response, err = execute(t.Context(), addr, instance, action(t, store, fmt.Sprintf("echo before; : %d; sleep 600", i), time.Second))
		if response.GetResult().GetExitCode() != -1 {
			break
		}
		// bb_runner is told of the timeout, too. If it is the first to notice, it says that the command was killed, and
		// bb_worker does not ask why.
	}
	if err != nil || codes.Code(response.GetStatus().GetCode()) != codes.DeadlineExceeded {
		t.Fatalf("response is %v, %v, want that the timeout is over", response, err)
	}
	if got := content(t, store, response.GetResult().GetStdoutDigest()); got != "before\n" {
		t.Errorf("before its timeout it said %q, want before", got)
	}
}

// scrape returns what is at /metrics of an address, of a process that may serve it a moment after all else.
func scrape(t *testing.T, addr string) []byte {
	t.Helper()
	r, err := http.Get("http://" + addr + "/metrics")
	for deadline := time.Now().Add(time.Minute); errors.Is(err, syscall.ECONNREFUSED) && time.Now().Before(deadline); {
		time.Sleep(20 * time.Millisecond)
		r, err = http.Get("http://" + addr + "/metrics")
	}
	if err != nil {
		t.Fatal(err)
	}
	defer r.Body.Close()
	text, err := io.ReadAll(r.Body)
	if err != nil || r.StatusCode != http.StatusOK {
		t.Fatalf("metrics are %s, %v", r.Status, err)
	}
	return text
}

// counted matches a line of Prometheus' text format of one of the scheduler's numbers of tasks.
var counted = regexp.MustCompile(`(?m)^buildbarn_builder_in_memory_build_queue_tasks_(\w+)\{.*\} (\S+)$`)

// tasks returns how many tasks are queued and how many are executed, by the expressions that Buildbarn's deployments
// record and that an autoscaler asks for: the scheduler has no gauge of either.
func (b *buildbarn) tasks(t *testing.T) (queued, executing float64) {
	t.Helper()
	sum := map[string]float64{}
	for _, m := range counted.FindAllSubmatch(scrape(t, b.metrics), -1) {
		v, err := strconv.ParseFloat(string(m[2]), 64)
		if err != nil {
			t.Fatal(err)
		}
		sum[string(m[1])] += v
	}
	return sum["scheduled_total"] - sum["queued_duration_seconds_count"],
		sum["queued_duration_seconds_count"] - sum["executing_duration_seconds_count"]
}

// wantTasks waits until so many tasks are queued and executed.
func (b *buildbarn) wantTasks(t *testing.T, queued, executing float64) {
	t.Helper()
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(50 * time.Millisecond) {
		q, e := b.tasks(t)
		if q == queued && e == executing {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("%v tasks are queued and %v executed, want %v and %v", q, e, queued, executing)
		}
	}
}

// TestSchedulerQueueDepth: from what the scheduler counts follows how many tasks wait and how many are executed, which
// is what the number of workers is scaled by.
func TestSchedulerQueueDepth(t *testing.T) {
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
	if err := os.WriteFile(gate, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for range n {
		if err := <-ended; err != nil {
			t.Error(err)
		}
	}
	b.wantTasks(t, 0, 0)
}

// TestSchedulerLosesWorker: when a worker ends without a word, the scheduler waits as long as its flag says, and then
// the client is told by whom it was executed, with a code at which it asks again.
func TestSchedulerLosesWorker(t *testing.T) {
	// The scheduler looks for lost workers only when something else happens: here, that the client is told of nothing new.
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
		t.Errorf("execution ends with %v, want that it is unavailable and names the worker", err)
	}
}

// state calls a method of the scheduler's BuildQueueState, with a request in JSON, and returns the response in JSON.
func (b *buildbarn) state(t *testing.T, method, request string) string {
	t.Helper()
	program, err := programs[peers.BBState.Name]()
	if err != nil {
		sandboxtest.Unavailable(t, "interop", err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	out, err := exec.CommandContext(ctx, program, b.scheduler.Addr, method, request).CombinedOutput()
	if err != nil {
		t.Fatalf("%s %s: %v: %s", method, request, err, out)
	}
	return string(out)
}

// TestSchedulerDrains: a worker that operators drain is given nothing until they end that, and they see the worker.
func TestSchedulerDrains(t *testing.T) {
	b := farm(t, "-declare", "-property", "os=linux")
	b.worker(t, "-property", "os=linux", "-id", "host=one")
	const queue = `{"platformQueueName": {"platform": {"properties": [{"name": "os", "value": "linux"}]}}}`
	const drain = `{"sizeClassQueueName": ` + queue + `, "workerIdPattern": {"host": "one"}}`
	b.state(t, "AddDrain", drain)
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(50 * time.Millisecond) {
		workers := b.state(t, "ListWorkers", `{"filter": {"all": `+queue+`}, "pageSize": 10}`)
		if strings.Contains(workers, `"one"`) {
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("workers are %s", workers)
		}
	}
	d := action(t, dial(t, b.scheduler, ""), "true", time.Minute)
	ended := make(chan error, 1)
	go func() {
		_, err := execute(t.Context(), b.scheduler.Addr, "", d)
		ended <- err
	}()
	b.wantTasks(t, 1, 0)
	// By the time that this is answered, a worker that is not drained has long since taken it.
	if drains := b.state(t, "ListDrains", `{"sizeClassQueueName": `+queue+`}`); !strings.Contains(drains, `"one"`) {
		t.Errorf("drains are %s", drains)
	}
	b.wantTasks(t, 1, 0)
	b.state(t, "RemoveDrain", drain)
	if err := <-ended; err != nil {
		t.Error(err)
	}
	b.wantTasks(t, 0, 0)
}

// TestBazelBuildsWithBuildbarn: Bazel takes the scheduler's address for all that it needs, and what it builds there
// runs. So if it does not with workers of Cloister, it is they.
func TestBazelBuildsWithBuildbarn(t *testing.T) {
	b := farm(t)
	b.worker(t, "-id", "host=one", "-threads", "2")
	wantBazel(t, b.scheduler.Addr)
}

// bazelFor returns a Bazel for a copy of the example, without an endpoint; it ends with the test.
func bazelFor(t *testing.T) *bazelrun.Bazel {
	t.Helper()
	if err := bazelrun.Find(); err != nil {
		sandboxtest.Unavailable(t, "bazel", err)
	}
	bazel := &bazelrun.Bazel{Workspace: filepath.Join(t.TempDir(), "workspace"), Root: t.TempDir()}
	if err := bazelrun.CopyWorkspace(bazel.Workspace, filepath.Join("..", "..")); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := bazel.Shutdown(); err != nil {
			t.Error(err)
		}
	})
	return bazel
}

// wantBazel fails the test unless Bazel builds and tests a part of the example remotely at an address.
func wantBazel(t *testing.T, addr string) {
	t.Helper()
	bazel := bazelFor(t)
	bazel.Endpoint = addr
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	build, err := bazel.Run(ctx, "test", "//examples/hash:adler32_test")
	if err != nil {
		t.Fatal(err)
	}
	if ways := build.Processes(); build.ExitCode != 0 || ways["remote"] == 0 {
		t.Errorf("bazel exits with %d, of its actions are %v, want that all succeed remotely:\n%s", build.ExitCode, ways, build.Output)
	}
}

// wholeTime bounds one build of all of the example.
const wholeTime = 5 * time.Minute

// wantAll fails the test unless Bazel builds and tests all of the example from nothing, every action remotely.
func wantAll(t *testing.T, bazel *bazelrun.Bazel) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), wholeTime)
	defer cancel()
	if err := bazel.Clean(ctx); err != nil {
		t.Fatal(err)
	}
	build, err := bazel.Run(ctx, "test", "//examples/...")
	if err != nil {
		t.Fatal(err)
	}
	ways := build.Processes()
	delete(ways, "internal")
	if build.ExitCode != 0 || ways["remote"] < 200 || len(ways) != 1 {
		t.Fatalf("bazel exits with %d, of its actions are %v, want that all succeed remotely:\n%s", build.ExitCode, ways, build.Output)
	}
}
