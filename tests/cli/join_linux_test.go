// SPDX-License-Identifier: Apache-2.0

package cli_test

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

// A worker is a running cloister join.
type joinedWorker struct {
	cmd  *exec.Cmd
	done chan error
	mu   sync.Mutex
	log  bytes.Buffer // guarded by mu
}

func (w *joinedWorker) Write(p []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.log.Write(p)
}

func (w *joinedWorker) text() string {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.log.String()
}

// signal sends the worker a signal.
func (w *joinedWorker) signal(t *testing.T, s syscall.Signal) {
	t.Helper()
	if err := w.cmd.Process.Signal(s); err != nil {
		t.Error(err)
	}
}

// joining starts a worker of a head, which ends with the test.
func joining(t *testing.T, head, name string, flags ...string) *joinedWorker {
	t.Helper()
	dir := t.TempDir()
	w := &joinedWorker{done: make(chan error, 1)}
	args := append([]string{"join", "grpc://" + head, "--name", name, "--dir", filepath.Join(dir, "store"), "--max-size", "1GiB", "--jobs", "2"}, flags...)
	w.cmd = exec.Command(built.Path(t), args...)
	w.cmd.Env = append(os.Environ(), "HOME="+dir)
	w.cmd.Stdout, w.cmd.Stderr = w, w
	if err := w.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	go func() { w.done <- w.cmd.Wait() }()
	t.Cleanup(func() {
		w.cmd.Process.Signal(syscall.SIGTERM)
		select {
		case err := <-w.done:
			if err != nil {
				t.Errorf("%s: got %v, want no error:\n%s", name, err, w.text())
			}
		case <-time.After(30 * time.Second):
			w.cmd.Process.Kill()
			t.Errorf("%s did not end:\n%s", name, w.text())
		}
		w.done <- nil
	})
	until(t, name+" has joined", func() bool { return strings.Contains(w.text(), "joins    grpc://"+head+" as "+name) })
	return w
}

// TestJoinedWorkersExecute checks that a head and two workers look like one server, that results name the worker, and that a
// worker finishes its action after SIGTERM and gives it back after a second one.
func TestJoinedWorkersExecute(t *testing.T) {
	port := unused(t)
	r := serving(t, "main", "--jobs", "0", "--worker-listen", port)
	metrics := unused(t)
	first := joining(t, port, "first", "--metrics", metrics)
	_, response := r.execute(t, "cat input >out; echo said")
	if response.Result.GetExitCode() != 0 || response.Status.GetCode() != 0 || response.Result.ExecutionMetadata.Worker != "first" {
		t.Fatalf("got response %v", response)
	}
	if text := r.read(t, response.Result.OutputFiles[0].Digest); text != "an input\n" {
		t.Errorf("got output %q", text)
	}
	if _, again := r.execute(t, "cat input >out; echo said"); !again.CachedResult {
		t.Error("got no recorded result, want that of the worker")
	}
	if code, text := get(t, metrics, "/ready"); code != 200 {
		t.Errorf("/ready: got %d %s", code, text)
	}
	if _, text := get(t, metrics, "/metrics"); !strings.Contains(text, "cloister_scheduler_up 1") || !strings.Contains(text, "cloister_slots 2") {
		t.Errorf("got metrics\n%s", text)
	}
	// A failure names the worker and the command that runs it again.
	_, response = r.execute(t, "exit 5")
	if response.Result.GetExitCode() != 5 || !strings.Contains(response.Message, "reproduce: cloister run --action") || !strings.Contains(response.Message, "--cas grpc://"+port) {
		t.Errorf("got response %v", response)
	}

	// While it drains, it finishes its action and takes no other.
	ended := make(chan string, 1)
	go func() {
		_, response := r.execute(t, "sleep 3; echo drained >out")
		ended <- response.Result.GetExecutionMetadata().GetWorker()
	}()
	running := func() bool {
		_, text := get(t, metrics, "/metrics")
		return strings.Contains(text, "cloister_actions_running 1")
	}
	until(t, "the action runs", running)
	first.signal(t, syscall.SIGTERM)
	second := joining(t, port, "second")
	if got := <-ended; got != "first" {
		t.Errorf("got worker %q", got)
	}
	if err := <-first.done; err != nil {
		t.Errorf("worker: got %v at its end:\n%s", err, first.text())
	}
	first.done <- nil
	_, response = r.execute(t, "echo elsewhere >out")
	if response.Result.GetExecutionMetadata().GetWorker() != "second" {
		t.Errorf("got response %v", response)
	}
	if text := second.text(); strings.Contains(text, "level=WARN") {
		t.Errorf("got log\n%s", text)
	}
}

// TestJoinedWorkerGivesItsActionBack checks that after a second signal another worker runs the action and no process remains.
func TestJoinedWorkerGivesItsActionBack(t *testing.T) {
	port := unused(t)
	r := serving(t, "", "--jobs", "0", "--worker-listen", port)
	metrics := unused(t)
	first := joining(t, port, "first", "--metrics", metrics)
	mark := fmt.Sprint("86", os.Getpid())
	ended := make(chan string, 1)
	go func() {
		_, response := r.execute(t, "if test -n \"$(cat input)\"; then timeout 5 sleep "+mark+"; echo $? >out; fi; true")
		ended <- response.Result.GetExecutionMetadata().GetWorker()
	}()
	until(t, "the action runs", func() bool {
		_, text := get(t, metrics, "/metrics")
		return strings.Contains(text, "cloister_actions_running 1")
	})
	joining(t, port, "second")
	first.signal(t, syscall.SIGTERM)
	until(t, "it drains", func() bool { return strings.Contains(first.text(), "draining 1 running") })
	first.signal(t, syscall.SIGTERM)
	if err := <-first.done; err != nil {
		t.Errorf("worker: got %v at its end:\n%s", err, first.text())
	}
	first.done <- nil
	if got := <-ended; got != "second" {
		t.Errorf("got worker %q", got)
	}
}

// TestJoinedTwiceByOneName checks that a second worker of the same name reports the conflict and takes nothing.
func TestJoinedTwiceByOneName(t *testing.T) {
	port := unused(t)
	r := serving(t, "main", "--jobs", "0", "--worker-listen", port)
	joining(t, port, "twin", "--instance", "main")
	until(t, "the first is there", func() bool {
		s := fleet(t, "--cas", r.cas)
		return len(s.Workers) == 1 && s.Workers[0].Slots == 2
	})
	h := r.hold(t, "held")
	until(t, "it runs", func() bool { return len(h.running(t)) > 0 })
	second := joining(t, port, "twin")
	until(t, "the second says why it takes nothing", func() bool {
		return strings.Contains(second.text(), "another process, with another store, is worker") && strings.Contains(second.text(), "another name")
	})
	if s := fleet(t, "--cas", r.cas); s.Running != 1 || len(s.Workers) != 1 || s.Workers[0].Name != "twin" || s.Workers[0].Slots != 2 {
		t.Errorf("got status %+v of the head", s)
	}
	if response := h.release(t); response.GetResult().GetExitCode() != 0 || response.GetStatus().GetCode() != 0 {
		t.Errorf("action of the first worker: got %v", response)
	}
	if _, response := r.execute(t, "echo more >out"); response.GetResult().GetExecutionMetadata().GetWorker() != "twin" {
		t.Errorf("next action: got %v", response)
	}
}

// TestJoinWithoutASchedulerWaits checks that join retries and reports what is missing.
func TestJoinWithoutASchedulerWaits(t *testing.T) {
	confined(t)
	metrics := unused(t)
	w := joining(t, unused(t), "lonely", "--metrics", metrics)
	until(t, "it says what is missing", func() bool { return strings.Contains(w.text(), "not ready for actions") })
	if code, text := get(t, metrics, "/ready"); code != 503 || !strings.Contains(text, "upstream grpc://") {
		t.Errorf("/ready: got %d %s", code, text)
	}
}
