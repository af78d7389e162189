// SPDX-License-Identifier: Apache-2.0

package escape_test

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	runnerpb "github.com/cloister-build/cloister/proto/buildbarn/runner"
	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/sandbox/namespace"
	"github.com/cloister-build/cloister/sandbox/sandboxtest"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/grpctest"
	"github.com/cloister-build/cloister/tests/must"
	"github.com/cloister-build/cloister/worker"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// Policies of the attacked runners: one with a small /tmp, one with small limits.
const (
	roomy = "version: 1\nprofiles:\n  build: {tmp: 16MiB, memory: 4GiB}\n"
	tight = "version: 1\nprofiles:\n  build: {memory: 64MiB, cpu: 1s, processes: 64, open_files: 64, output_bytes: 16MiB, output_files: 1000, tmp: 1GiB}\n"
)

// notForRunners are attacks that do not apply to a runner, and why. The table in docs/runner.md lists them, too.
var notForRunners = map[string]string{
	"input-tree":          "each input file of a runner is a mount of its own",
	"input-tree-write":    "each input file of a runner is a mount of its own",
	"input-tree-metadata": "each input file of a runner is a mount of its own",
	"input-copy":          "each input file of a runner is a mount of its own",
	"output-files-tree":   "each input file of a runner is a mount of its own",
	"input-name-host":     "directories of a runner's input root are not inputs; input-name attacks one of the toolchain",
	"stubborn":            "the caller of a runner sets the timeout: TestRunnerKillsCancelledCommand",
}

// A runnerProcess is a running "cloister runner" with a build directory in the store.
type runnerProcess struct {
	runnerpb.RunnerClient
	pid   int
	build string
	mu    sync.Mutex
	n     int
}

// startRunner starts a runner for the duration of the test.
func startRunner(t *testing.T, w *fixture, policy string, flags ...string) *runnerProcess {
	t.Helper()
	dir, err := os.MkdirTemp("", "cl-") // short, for the address of a socket
	must.Succeed(t, err)
	t.Cleanup(func() { os.RemoveAll(dir) })
	m := &runnerProcess{build: filepath.Join(w.store, "build")}
	rules, socket := filepath.Join(dir, "policy.yaml"), filepath.Join(dir, "runner")
	must.Succeed(t, errors.Join(os.MkdirAll(m.build, 0o755), os.WriteFile(rules, []byte(policy), 0o644)))
	args := append([]string{"runner", "--socket", socket, "--build-dir", m.build, "--policy", rules, "--jobs", "4"}, flags...)
	cmd := exec.Command(cloister.Path(t), args...)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	stdout := must.Get(cmd.StdoutPipe())(t)
	must.Succeed(t, cmd.Start())
	t.Cleanup(func() {
		_ = cmd.Process.Signal(syscall.SIGTERM)
		err := cmd.Wait()
		if _, gone := os.Lstat(socket); err != nil || !errors.Is(gone, os.ErrNotExist) {
			t.Errorf("the runner exited with %v, its socket: %v\n%s", err, gone, &stderr)
		}
	})
	m.pid = cmd.Process.Pid
	banner := bufio.NewReader(stdout)
	for {
		line, err := banner.ReadString('\n')
		if err != nil {
			_ = cmd.Wait()
			t.Fatalf("the runner did not start: %s", &stderr)
		}
		if strings.HasPrefix(line, "runner ") {
			break
		}
	}
	go io.Copy(io.Discard, banner) // ends with the process
	conn := grpctest.Dial(t, "unix://"+socket)
	m.RunnerClient = runnerpb.NewRunnerClient(conn)
	must.Get(m.CheckReadiness(t.Context(), &runnerpb.CheckReadinessRequest{}))(t)
	return m
}

// A trial is an attack through a runner.
type trial struct {
	dir     string // of the action
	request *runnerpb.RunRequest
}

// action creates the input root of an attack as bb_worker does, with hard links to its cache, which are world-writable
// here.
func (m *runnerProcess) action(w *fixture, attack []string) (*trial, error) {
	m.mu.Lock()
	m.n++
	name := fmt.Sprintf("%d-%d", m.pid, m.n)
	m.mu.Unlock()
	dir := filepath.Join(m.build, name)
	root := filepath.Join(dir, "root")
	program, err := os.ReadFile(w.program)
	err = errors.Join(err, os.MkdirAll(filepath.Join(root, "in", "dir"), 0o777), os.Mkdir(filepath.Join(root, "in", "open"), 0o777),
		os.Mkdir(filepath.Join(dir, "tmp"), 0o777), os.Mkdir(filepath.Join(dir, "logs"), 0o777),
		os.WriteFile(filepath.Join(root, "hostile"), program, 0o755),
		os.Link(filepath.Join(w.store, "file"), filepath.Join(root, "in", "host")),
		os.Link(filepath.Join(w.store, "open", "sub"), filepath.Join(root, "in", "open", "sub")))
	for _, f := range []string{"file", "in/file", "in/dir/sub"} {
		err = errors.Join(err, inputFile(os.WriteFile, os.Chmod, filepath.Join(root, f)))
	}
	return &trial{dir, &runnerpb.RunRequest{
		Arguments:            append([]string{"./hostile"}, m.translate(attack)...),
		EnvironmentVariables: map[string]string{"A": "1", "PATH": "/usr/bin:/bin"},
		StdoutPath:           name + "/stdout", StderrPath: name + "/stderr", InputRootDirectory: name + "/root",
		TemporaryDirectory: name + "/tmp", ServerLogsDirectory: name + "/logs",
	}}, err
}

// translate converts the paths of an attack: inputs are in the input root, and a read-only directory is one of the
// toolchain.
func (*runnerProcess) translate(attack []string) []string {
	var to []string
	for _, a := range attack {
		switch {
		case slices.Contains([]string{"/in", "/in/dir", "/in/open"}, a):
			a = "/usr"
		case strings.HasPrefix(a, "/in/"):
			a = "/build" + a
		}
		to = append(to, a)
	}
	return to
}

// follow calls onLine for each new line of a file until done is closed.
func follow(file string, done <-chan struct{}, onLine func(string)) {
	var read int
	for ended := false; !ended; {
		select {
		case <-done:
			ended = true
		case <-time.After(5 * time.Millisecond):
		}
		b, _ := os.ReadFile(file)
		for {
			line, _, whole := strings.Cut(string(b[read:]), "\n")
			if !whole {
				break
			}
			read += len(line) + 1
			onLine(line)
		}
	}
}

// run runs an attack.
func (m *runnerProcess) run(ctx context.Context, a *trial, onLine func(string)) (*runnerpb.RunResponse, string, error) {
	done := make(chan struct{})
	var following sync.WaitGroup
	if onLine != nil {
		following.Go(func() { follow(filepath.Join(a.dir, "stdout"), done, onLine) })
	}
	resp, err := m.Run(ctx, a.request)
	close(done)
	following.Wait()
	stdout, _ := os.ReadFile(filepath.Join(a.dir, "stdout"))
	stderr, _ := os.ReadFile(filepath.Join(a.dir, "stderr"))
	return resp, string(stdout) + string(stderr), err
}

// attempt runs the attack of a guarantee through a runner. It returns what escaped, or "" and what the runner reports.
func (m *runnerProcess) attempt(t *testing.T, w *fixture, g *guarantee) (escaped, reported string, err error) {
	if g.before != nil {
		a, err := m.action(w, g.before)
		if err != nil {
			return "", "", err
		}
		if _, text, err := m.run(t.Context(), a, nil); err != nil || !strings.HasPrefix(text, "held:") {
			return "", "", fmt.Errorf("the preceding attack %v: %q, %w", g.before, text, err)
		}
	}
	ended := make(chan struct{})
	if g.concurrent != nil {
		a, err := m.action(w, g.concurrent)
		if err != nil {
			return "", "", err
		}
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
		ready, failed := make(chan struct{}), ""
		go func() {
			defer close(ended)
			_, text, err := m.run(ctx, a, func(line string) {
				if line == "ready" {
					close(ready)
				}
			})
			failed = fmt.Sprintf("%q, %v", text, err)
		}()
		defer func() { cancel(); <-ended }()
		select {
		case <-ready:
		case <-ended:
			return "", "", fmt.Errorf("the concurrent attack %v: %s", g.concurrent, failed)
		}
	}
	a, err := m.action(w, g.attack)
	if err != nil {
		return "", "", err
	}
	var onLine func(string)
	if g.onLine != nil {
		onLine = func(line string) { g.onLine(w, line) }
	}
	resp, text, err := m.run(t.Context(), a, onLine)
	w.connecting.Wait()
	// A run that hit a limit has no result.
	if err != nil && !(status.Code(err) == codes.FailedPrecondition && strings.Contains(err.Error(), "hit a limit")) {
		return "", "", err
	}
	log, _ := os.ReadFile(filepath.Join(a.dir, "logs", "cloister.txt"))
	reported = fmt.Sprintf("%s\n%v", log, err)
	var checked error
	if g.outputs != nil {
		out, err := os.OpenRoot(filepath.Join(a.dir, "root"))
		if err != nil {
			return "", "", err
		}
		checked = errors.Join(g.outputs(out), out.Close())
	}
	if g.concurrent != nil {
		select {
		case <-ended:
			checked = errors.Join(checked, errors.New("the concurrent run was killed"))
		default:
		}
	}
	if g.check != nil {
		checked = errors.Join(checked, g.check(w))
	}
	checked = errors.Join(checked, w.checkInputs(), a.checkInputs())
	verdict, _, _ := strings.Cut(text, "\ncloister: ") // the rest is from the runner
	verdict = lastLine(verdict)
	switch {
	case strings.HasPrefix(verdict, "ESCAPED:"):
		return verdict, "", nil
	case checked != nil:
		return checked.Error(), "", nil
	case len(w.reached) > 0:
		return strings.Join(w.reached, ", "), "", nil
	case strings.HasPrefix(verdict, "held:") && (resp == nil || resp.ExitCode == 0), g.kills && resp != nil && resp.ExitCode == -1:
		return "", reported, nil
	}
	return "", "", fmt.Errorf("%v: %.2000s", resp, text)
}

// checkInputs returns an error if an input of this action has changed.
func (a *trial) checkInputs() error {
	for _, f := range []string{"file", "in/file", "in/dir/sub"} {
		b, err := os.ReadFile(filepath.Join(a.dir, "root", f))
		if err != nil || string(b) != "original" {
			return fmt.Errorf("the input %s contains %q: %w", f, b, err)
		}
	}
	return nil
}

// newRunnerFixture returns a fixture whose store is the cache of a worker and contains its build directory.
func newRunnerFixture(t *testing.T) (*fixture, sandbox.Features) {
	t.Helper()
	w := newFixture(t)
	f := w.features[w.backend(t, nil)]
	if f.Tier != "full" && f.Tier != "partial" {
		sandboxtest.Unavailable(t, "namespaces", fmt.Sprintf("tier %q", f.Tier))
	}
	must.Succeed(t, w.resetStore())
	return w, f
}

// TestEscapesThroughRunner runs the attacks as commands of a bb_worker. Those that only the system call filter prevents
// must succeed through a runner without it.
func TestEscapesThroughRunner(t *testing.T) {
	w, features := newRunnerFixture(t)
	wide, narrow := startRunner(t, w, roomy), startRunner(t, w, tight)
	open := startRunner(t, w, "version: 1\nprofiles:\n  build: {tmp: 16MiB}\n", "--sandbox", "namespaces")
	all := guarantees(w)
	tried := 0
	for i := range all {
		g := &all[i]
		if notForRunners[g.name] != "" {
			continue
		}
		tried++
		t.Run(g.name, func(t *testing.T) {
			if g.limit != "" && !slices.Contains(features.Limits, g.limit) {
				sandboxtest.Unavailable(t, "limits", fmt.Sprintf("this worker cannot limit %s", g.limit))
			}
			// The store contains the build directory, so only the inputs are restored.
			restore := func() error {
				return errors.Join(inputFile(rewrite, os.Chmod, filepath.Join(w.store, "file")), inputFile(rewrite, os.Chmod, filepath.Join(w.store, "open", "sub")))
			}
			must.Succeed(t, restore())
			w.reached = nil
			m := wide
			if g.spec != nil {
				m = narrow
			}
			escaped, reported, err := m.attempt(t, w, g)
			must.Be(t, err == nil && escaped == "", "%s\n%s%v", g.promise, escaped, err)
			if g.limit != "" && !g.quiet && !strings.Contains(reported, string(g.limit)) {
				t.Errorf("the limit of %s is not reported: %s", g.limit, reported)
			}
			for _, want := range g.events {
				subject := m.translate([]string{want.Subject})[0]
				if dir, isNew := strings.CutSuffix(want.Subject, "/new"); isNew {
					subject = m.translate([]string{dir})[0] + "/new"
				}
				subject = strings.TrimPrefix(subject, worker.ExecRoot+"/")
				if name, ok := strings.CutPrefix(subject, "dns "); ok {
					subject = "lookup of " + name
				}
				if !slices.ContainsFunc(strings.Split(reported, "\n"), func(line string) bool {
					return strings.HasPrefix(line, string(want.Kind)) && strings.Contains(line, subject)
				}) {
					t.Errorf("the log lacks %s %s:\n%s", want.Kind, subject, reported)
				}
			}
			if !slices.Equal(g.without, []namespace.Layer{namespace.Seccomp}) {
				return
			}
			if escaped, reported, err := open.attempt(t, w, g); err != nil || escaped == "" {
				t.Errorf("without its layer the attack still fails: %s, %v", reported, err)
			}
		})
	}
	expect.That(t, tried >= 40, "got %d attacks, want at least 40", tried)
}

// rewrite writes a file only if its content differs, because others may have it open.
func rewrite(name string, b []byte, mode os.FileMode) error {
	if got, err := os.ReadFile(name); err == nil && bytes.Equal(got, b) {
		return nil
	}
	return os.WriteFile(name, b, mode)
}

// TestRunnerKillsCancelledCommand checks that a command that ignores signals leaves neither processes nor outputs.
func TestRunnerKillsCancelledCommand(t *testing.T) {
	w, _ := newRunnerFixture(t)
	m := startRunner(t, w, roomy)
	a := must.Get(m.action(w, []string{"stubborn", w.mark}))(t)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	_, text, err := m.run(ctx, a, func(line string) {
		if line == "ready" {
			expect.That(t, len(w.survivors()) != 0, "no process has the mark")
			cancel()
		}
	})
	must.Be(t, status.Code(err) == codes.Canceled, "%v: %s", err, text)
	must.Hold(t, "no process has the mark", func() bool { return noSurvivors(w) == nil })
	must.Succeed(t, errors.Join(a.checkInputs(), w.checkInputs()))
}
