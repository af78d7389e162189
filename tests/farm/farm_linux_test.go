// SPDX-License-Identifier: Apache-2.0

// Package farm_test tests a head with workers. Each worker is a real cloister join in a network namespace with its own
// address, so that it can be disconnected, killed and drained alone. The tests compare the answers to clients and the
// processes in the kernel with what workers report.
package farm_test

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strconv"
	"testing"
	"time"

	"github.com/cloister-build/cloister/sandbox/sandboxtest"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/internal/bazelrun"
	"github.com/cloister-build/cloister/tests/internal/program"
	"github.com/cloister-build/cloister/tests/must"
)

var (
	built program.Program
	// noNetwork is the reason why the tests have no network namespace; nil if they have.
	noNetwork error
)

func TestMain(m *testing.M) {
	noNetwork = enterNetwork()
	os.Exit(built.Main(m))
}

// The head's port for workers, and the workers' port for metrics.
const (
	workerPort  = ":8983"
	metricsPort = ":9090"
)

// A farm is a head and its workers.
type farm struct {
	dir     string // parent of all directories
	config  bazelrun.ServerConfig
	head    *bazelrun.Server
	workers []*farmWorker
	watch   *watch
}

// A farmWorker is a worker on a machine of its own. Actions demand it with host=NAME.
type farmWorker struct {
	name    string
	jobs    int
	farm    *farm
	machine *machine
	process *process
}

// newFarm starts a head without slots. It ends with the test.
func newFarm(t *testing.T, flags ...string) *farm {
	t.Helper()
	if noNetwork != nil {
		sandboxtest.Unavailable(t, "networks", noNetwork)
	}
	if err := bazelrun.Confines(t.Context(), built.Path(t), nil); err != nil {
		sandboxtest.Unavailable(t, "namespaces", err)
	}
	dir := must.Get(bazelrun.TempDir(nil))(t)
	t.Cleanup(func() { must.Succeed(t, bazelrun.Remove(dir)) })
	f := &farm{dir: dir, watch: newWatch(t, built.Path(t)), config: bazelrun.ServerConfig{
		Binary: built.Path(t), Dir: filepath.Join(dir, "head"), Home: dir, Listen: "127.0.0.1:0", Log: &lineLogger{t: t, name: "head"},
		Args: append([]string{"--jobs", "0", "--worker-listen", headAddress + workerPort}, flags...),
	}}
	f.head = f.serve(t, f.config)
	return f
}

// serve starts a server, which ends with the test.
func (f *farm) serve(t *testing.T, config bazelrun.ServerConfig) *bazelrun.Server {
	t.Helper()
	ctx, cancel := context.WithTimeoutCause(t.Context(), 3*time.Minute, errors.New("timeout"))
	defer cancel()
	s := must.Get(bazelrun.StartServer(ctx, config))(t)
	t.Cleanup(func() { must.Succeed(t, s.Stop()) })
	return s
}

// join starts a worker with that many slots on a new machine.
func (f *farm) join(t *testing.T, name string, jobs int) *farmWorker {
	t.Helper()
	w := &farmWorker{name: name, jobs: jobs, farm: f, machine: newMachine(t, name, len(f.workers)+1)}
	f.workers = append(f.workers, w)
	w.boot(t)
	return w
}

// boot starts or restarts the worker in its directory.
func (w *farmWorker) boot(t *testing.T) {
	t.Helper()
	w.process = w.machine.start(t, built.Path(t), "join", "grpc://"+headAddress+workerPort, "--name", w.name, "--jobs", strconv.Itoa(w.jobs),
		"--toolchain", "farm", "--property", "host="+w.name, "--dir", filepath.Join(w.farm.dir, w.name), "--max-size", "10GiB",
		"--metrics", w.machine.address+metricsPort)
	w.farm.watch.add(w.name, w.process.pid)
}

// stop stops the worker, which must succeed and leave no process behind.
func (w *farmWorker) stop(t *testing.T) {
	t.Helper()
	w.process.wantAllEnd(t, func() {
		expect.Error(t, w.process.stop(), nil)
	})
}

// until waits for a condition.
func until(t *testing.T, limit time.Duration, what string, condition func() bool) {
	t.Helper()
	must.Be(t, must.Poll(limit, condition), "timeout: %s, want it within %v", what, limit)
}
