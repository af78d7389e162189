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
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
)

// Policies of the runners that are attacked: with a small /tmp, and with small limits.
const (
	roomy = "version: 1\nprofiles:\n  build: {tmp: 16MiB, memory: 4GiB}\n"
	tight = "version: 1\nprofiles:\n  build: {memory: 64MiB, cpu: 1s, processes: 64, open_files: 64, output_bytes: 16MiB, output_files: 1000, tmp: 1GiB}\n"
)

// elsewhere are attacks that a runner is not asked to withstand, or that are another one for it, and why. The table in
// docs/runner.md has the same.
var elsewhere = map[string]string{
	"input-name-host": "no directory of a runner's input root is an input; those of the toolchain are, and input-name has one",
	"stubborn":        "a runner's time is its caller's: TestRunnerEndsWhatIsCancelled",
}

// A mouth is a cloister runner, with a build directory in the world's store.
type mouth struct {
	runnerpb.RunnerClient
	pid   int
	build string
	mu    sync.Mutex
	n     int
}

// newMouth starts a runner, which ends with the test.
func newMouth(t *testing.T, w *world, policy string, flags ...string) *mouth {
	t.Helper()
	dir, err := os.MkdirTemp("", "cl-") // short, for the address of a socket
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	m := &mouth{build: filepath.Join(w.store, "build")}
	rules, socket := filepath.Join(dir, "policy.yaml"), filepath.Join(dir, "runner")
	if err := errors.Join(os.MkdirAll(m.build, 0o755), os.WriteFile(rules, []byte(policy), 0o644)); err != nil {
		t.Fatal(err)
	}
	args := append([]string{"runner", "--socket", socket, "--build-dir", m.build, "--policy", rules, "--jobs", "4"}, flags...)
	cmd := exec.Command(cloister.Path(t), args...)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Signal(syscall.SIGTERM)
		err := cmd.Wait()
		if _, gone := os.Lstat(socket); err != nil || !errors.Is(gone, os.ErrNotExist) {
			t.Errorf("the runner ended with %v, its socket: %v\n%s", err, gone, &stderr)
		}
	})
	m.pid = cmd.Process.Pid
	banner := bufio.NewReader(stdout)
	for {
		line, err := banner.ReadString('\n')
		if err != nil {
			_ = cmd.Wait()
			t.Fatalf("the runner does not start: %s", &stderr)
		}
		if strings.HasPrefix(line, "runner ") {
			break
		}
	}
	go io.Copy(io.Discard, banner) // ends with the process
	conn, err := grpc.NewClient("unix://"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	m.RunnerClient = runnerpb.NewRunnerClient(conn)
	if _, err := m.CheckReadiness(t.Context(), &runnerpb.CheckReadinessRequest{}); err != nil {
		t.Fatal(err)
	}
	return m
}

// A trial is an attack through a runner.
type trial struct {
	dir     string // of the action
	request *runnerpb.RunRequest
}

// action lays out the input root of an attack as bb_worker does: with files that are links into its cache, here such as
// anybody may write.
func (m *mouth) action(w *world, attack []string) (*trial, error) {
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

// translate returns an attack with its paths as a runner's command has them: inputs in the input root, and where a
// directory must not be written to, one of the toolchain.
func (*mouth) translate(attack []string) []string {
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

// follow calls said for each line that a file gets until done is closed.
func follow(file string, done <-chan struct{}, said func(string)) {
	var told int
	for ended := false; !ended; {
		select {
		case <-done:
			ended = true
		case <-time.After(5 * time.Millisecond):
		}
		b, _ := os.ReadFile(file)
		for {
			line, _, whole := strings.Cut(string(b[told:]), "\n")
			if !whole {
				break
			}
			told += len(line) + 1
			said(line)
		}
	}
}

// run performs an attack.
func (m *mouth) run(ctx context.Context, a *trial, said func(string)) (*runnerpb.RunResponse, string, error) {
	done := make(chan struct{})
	var following sync.WaitGroup
	if said != nil {
		following.Go(func() { follow(filepath.Join(a.dir, "stdout"), done, said) })
	}
	resp, err := m.Run(ctx, a.request)
	close(done)
	following.Wait()
	stdout, _ := os.ReadFile(filepath.Join(a.dir, "stdout"))
	stderr, _ := os.ReadFile(filepath.Join(a.dir, "stderr"))
	return resp, string(stdout) + string(stderr), err
}

// attempt performs the attack of a guarantee through a runner and returns what escaped, "" if nothing did, and what the
// runner says of it to people.
func (m *mouth) attempt(t *testing.T, w *world, g *guarantee) (escaped, told string, err error) {
	if g.first != nil {
		a, err := m.action(w, g.first)
		if err != nil {
			return "", "", err
		}
		if _, text, err := m.run(t.Context(), a, nil); err != nil || !strings.HasPrefix(text, "held:") {
			return "", "", fmt.Errorf("%v, which comes first: %q, %w", g.first, text, err)
		}
	}
	ended := make(chan struct{})
	if g.beside != nil {
		a, err := m.action(w, g.beside)
		if err != nil {
			return "", "", err
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
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
			return "", "", fmt.Errorf("%v, which is to be alive meanwhile: %s", g.beside, failed)
		}
	}
	a, err := m.action(w, g.attack)
	if err != nil {
		return "", "", err
	}
	var said func(string)
	if g.said != nil {
		said = func(line string) { g.said(w, line) }
	}
	resp, text, err := m.run(t.Context(), a, said)
	w.knocks.Wait()
	// That the attack met a limit makes no result of it, whatever its exit code.
	if err != nil && !(status.Code(err) == codes.FailedPrecondition && strings.Contains(err.Error(), "hit a limit")) {
		return "", "", err
	}
	log, _ := os.ReadFile(filepath.Join(a.dir, "logs", "cloister.txt"))
	told = fmt.Sprintf("%s\n%v", log, err)
	var checked error
	if g.outputs != nil {
		out, err := os.OpenRoot(filepath.Join(a.dir, "root"))
		if err != nil {
			return "", "", err
		}
		checked = errors.Join(g.outputs(out), out.Close())
	}
	if g.beside != nil {
		select {
		case <-ended:
			checked = errors.Join(checked, errors.New("the run beside was ended"))
		default:
		}
	}
	if g.check != nil {
		checked = errors.Join(checked, g.check(w))
	}
	checked = errors.Join(checked, w.intact(), a.intact())
	verdict := text
	if i := strings.Index(text, "\ncloister: "); i >= 0 {
		verdict = text[:i] // what follows is the runner's own word
	}
	verdict = lastLine(verdict)
	switch {
	case strings.HasPrefix(verdict, "ESCAPED:"):
		return verdict, "", nil
	case checked != nil:
		return checked.Error(), "", nil
	case len(w.reach) > 0:
		return strings.Join(w.reach, ", "), "", nil
	case strings.HasPrefix(verdict, "held:") && (resp == nil || resp.ExitCode == 0), g.ends && resp != nil && resp.ExitCode == -1:
		return "", told, nil
	}
	return "", "", fmt.Errorf("%v: %.2000s", resp, text)
}

// intact returns what has happened to the inputs that are this action's alone.
func (a *trial) intact() error {
	for _, f := range []string{"file", "in/file", "in/dir/sub"} {
		b, err := os.ReadFile(filepath.Join(a.dir, "root", f))
		if err != nil || string(b) != "original" {
			return fmt.Errorf("the input %s holds %q: %w", f, b, err)
		}
	}
	return nil
}

// runnerWorld is a world whose store is a worker's cache, with its build directory in it.
func runnerWorld(t *testing.T) (*world, sandbox.Features) {
	w := newWorld(t)
	b := namespace.New(namespace.Config{})
	defer b.Close()
	f, err := b.Probe(t.Context())
	if err != nil || f.Tier != "full" {
		sandboxtest.Unavailable(t, "namespaces", fmt.Sprintf("tier %q, %v", f.Tier, err))
	}
	if err := w.stock(); err != nil {
		t.Fatal(err)
	}
	return w, f
}

// TestEscapesThroughRunner tries the attacks as commands of a bb_worker: what its process and its socket are in front of is
// confined as well. Those that the filter of system calls alone holds must succeed through a runner that has none.
func TestEscapesThroughRunner(t *testing.T) {
	w, features := runnerWorld(t)
	wide, narrow := newMouth(t, w, roomy), newMouth(t, w, tight)
	open := newMouth(t, w, "version: 1\nprofiles:\n  build: {tmp: 16MiB}\n", "--sandbox", "namespaces")
	all := guarantees(w)
	tried := 0
	for i := range all {
		g := &all[i]
		if elsewhere[g.name] != "" {
			continue
		}
		tried++
		t.Run(g.name, func(t *testing.T) {
			if g.limit != "" && !slices.Contains(features.Limits, g.limit) {
				sandboxtest.Unavailable(t, "limits", fmt.Sprintf("this worker cannot limit %s", g.limit))
			}
			// The store holds the build directory, so that it is only ever mended in part.
			mend := func() error {
				return errors.Join(inputFile(rewrite, os.Chmod, filepath.Join(w.store, "file")), inputFile(rewrite, os.Chmod, filepath.Join(w.store, "open", "sub")))
			}
			if err := mend(); err != nil {
				t.Fatal(err)
			}
			w.reach = nil
			m := wide
			if g.spec != nil {
				m = narrow
			}
			escaped, told, err := m.attempt(t, w, g)
			if err != nil || escaped != "" {
				t.Fatalf("%s\n%s%v", g.promise, escaped, err)
			}
			if g.limit != "" && !strings.Contains(told, string(g.limit)) {
				t.Errorf("nobody is told that the limit of %s was met: %s", g.limit, told)
			}
			for _, want := range g.events {
				subject := m.translate([]string{want.Subject})[0]
				if dir, isNew := strings.CutSuffix(want.Subject, "/new"); isNew {
					subject = m.translate([]string{dir})[0] + "/new"
				}
				if !slices.ContainsFunc(strings.Split(told, "\n"), func(line string) bool {
					return strings.HasPrefix(line, string(want.Kind)) && strings.Contains(line, subject)
				}) {
					t.Errorf("the log does not tell of %s %s:\n%s", want.Kind, subject, told)
				}
			}
			if !slices.Equal(g.without, []namespace.Layer{namespace.Seccomp}) {
				return
			}
			if escaped, told, err := open.attempt(t, w, g); err != nil || escaped == "" {
				t.Errorf("without its layer the attack fails all the same: %s, %v", told, err)
			}
		})
	}
	if tried < 40 {
		t.Errorf("%d attacks were tried", tried)
	}
}

// rewrite writes a file only if it has to: others may have it open.
func rewrite(name string, b []byte, mode os.FileMode) error {
	if got, err := os.ReadFile(name); err == nil && bytes.Equal(got, b) {
		return nil
	}
	return os.WriteFile(name, b, mode)
}

// TestRunnerEndsWhatIsCancelled: when its caller has gone, nothing of a command is left, also if it ignores signals; and
// nothing that it made gets to the build directory.
func TestRunnerEndsWhatIsCancelled(t *testing.T) {
	w, _ := runnerWorld(t)
	m := newMouth(t, w, roomy)
	a, err := m.action(w, []string{"stubborn", w.mark})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	_, text, err := m.run(ctx, a, func(line string) {
		if line == "ready" {
			if len(w.left()) == 0 {
				t.Error("the attack is not there: its mark proves nothing")
			}
			cancel()
		}
	})
	if status.Code(err) != codes.Canceled {
		t.Fatalf("%v: %s", err, text)
	}
	for deadline := time.Now().Add(30 * time.Second); noneLeft(w) != nil; time.Sleep(10 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal(noneLeft(w))
		}
	}
	if err := errors.Join(a.intact(), w.intact()); err != nil {
		t.Error(err)
	}
}
