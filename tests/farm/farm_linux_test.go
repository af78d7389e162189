// SPDX-License-Identifier: Apache-2.0

// Package farm_test has a head and workers execute, each worker a real cloister join in a network of its own with an address
// of its own, so that it can be cut off, killed and drained alone. It looks at what clients get and at the processes that
// the kernel has, and compares with that what workers say of themselves.
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
	"github.com/cloister-build/cloister/tests/internal/bazelrun"
	"github.com/cloister-build/cloister/tests/internal/program"
)

var (
	built program.Program
	// noNetwork is why there can be no network of the tests' own.
	noNetwork error
)

func TestMain(m *testing.M) {
	noNetwork = enterNetwork()
	os.Exit(built.Main(m))
}

// The port at which workers take actions, and that of their metrics.
const (
	workerPort  = ":8983"
	metricsPort = ":9090"
)

// A farm is a head, and workers that have joined it.
type farm struct {
	dir     string // of everything
	config  bazelrun.ServerConfig
	head    *bazelrun.Server
	workers []*farmWorker
	watch   *watch
}

// A farmWorker is a machine, and what it executes with. An action may demand it by host=NAME.
type farmWorker struct {
	name    string
	jobs    int
	farm    *farm
	machine *machine
	process *process
}

// newFarm starts a head without slots, with more flags, and no workers. All of it ends with the test.
func newFarm(t *testing.T, flags ...string) *farm {
	t.Helper()
	if noNetwork != nil {
		sandboxtest.Unavailable(t, "networks", noNetwork)
	}
	if err := bazelrun.Confines(t.Context(), built.Path(t), nil); err != nil {
		sandboxtest.Unavailable(t, "namespaces", err)
	}
	dir, err := bazelrun.TempDir(nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := bazelrun.Remove(dir); err != nil {
			t.Error(err)
		}
	})
	f := &farm{dir: dir, watch: newWatch(t, built.Path(t)), config: bazelrun.ServerConfig{
		Binary: built.Path(t), Dir: filepath.Join(dir, "head"), Home: dir, Listen: "127.0.0.1:0", Log: &lines{t: t, name: "head"},
		Args: append([]string{"--jobs", "0", "--worker-listen", headAddress + workerPort}, flags...),
	}}
	f.head = f.serve(t, f.config)
	return f
}

// serve starts a server, which ends with the test.
func (f *farm) serve(t *testing.T, config bazelrun.ServerConfig) *bazelrun.Server {
	t.Helper()
	ctx, cancel := context.WithTimeoutCause(t.Context(), 30*time.Second, errors.New("it takes too long"))
	defer cancel()
	s, err := bazelrun.StartServer(ctx, config)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Stop(); err != nil {
			t.Error(err)
		}
	})
	return s
}

// join starts a worker of so many slots on a machine of its own.
func (f *farm) join(t *testing.T, name string, jobs int) *farmWorker {
	t.Helper()
	w := &farmWorker{name: name, jobs: jobs, farm: f, machine: newMachine(t, name, len(f.workers)+1)}
	f.workers = append(f.workers, w)
	w.boot(t)
	return w
}

// boot starts the worker on its machine, perhaps again, with the directory that it had.
func (w *farmWorker) boot(t *testing.T) {
	t.Helper()
	w.process = w.machine.start(t, built.Path(t), "join", "grpc://"+headAddress+workerPort, "--name", w.name, "--jobs", strconv.Itoa(w.jobs),
		"--property", "host="+w.name, "--dir", filepath.Join(w.farm.dir, w.name), "--max-size", "10GiB",
		"--metrics", w.machine.address+metricsPort)
	w.farm.watch.add(w.name, w.process.pid)
}

// stops tells the worker to end. It must end well, and nothing of it may be alive then.
func (w *farmWorker) stops(t *testing.T) {
	t.Helper()
	w.process.wantAllEnd(t, func() {
		if err := w.process.stop(); err != nil {
			t.Error(err)
		}
	})
}

// until waits until a condition holds.
func until(t *testing.T, limit time.Duration, what string, condition func() bool) {
	t.Helper()
	for deadline := time.Now().Add(limit); !condition(); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("%s: not in %v", what, limit)
		}
	}
}
