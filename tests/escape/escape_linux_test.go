// SPDX-License-Identifier: Apache-2.0

// Package escape_test attacks the sandbox: one attack per guarantee, against a worker of root and one of an ordinary
// user. Each attack is repeated without the layers that ensure the guarantee and must then succeed, since a test that
// cannot fail proves nothing.
package escape_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/sandbox/namespace"
	_ "github.com/cloister-build/cloister/sandbox/namespace/earlyinit" // as in the released program
	"github.com/cloister-build/cloister/sandbox/sandboxtest"
	"github.com/cloister-build/cloister/tests/internal/program"
	"github.com/cloister-build/cloister/tests/must"
	"golang.org/x/sys/unix"
)

// hostileVariable names the compiled hostile program, for tests that run as another user.
const hostileVariable = "CLOISTER_TEST_HOSTILE"

// cloister is the released program, for tests of its services.
var cloister program.Program

func TestMain(m *testing.M) {
	namespace.Init()
	// A run must not inherit these: a core file limit, and a variable.
	core := unix.Rlimit{}
	if err := unix.Getrlimit(unix.RLIMIT_CORE, &core); err == nil {
		core.Cur = min(64<<20, core.Max)
		_ = unix.Setrlimit(unix.RLIMIT_CORE, &core)
	}
	os.Setenv("CLOISTER_LEAK", "yes")
	code := cloister.Main(m)
	if built != "" {
		os.RemoveAll(filepath.Dir(built)) // contains only the program
	}
	os.Exit(code)
}

// built is the path of the program that build compiled, or "".
var built string

// build compiles the hostile program once and returns its path. It is static, so it runs in an empty sandbox.
var build = sync.OnceValues(func() (string, error) {
	if p := os.Getenv(hostileVariable); p != "" {
		return p, nil
	}
	dir, err := os.MkdirTemp("", "cloister-hostile-")
	if err != nil {
		return "", err
	}
	built = filepath.Join(dir, "hostile")
	cmd := exec.Command("go", "build", "-ldflags=-s -w", "-o", built, "./hostile")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("build hostile: %w\n%s", err, out)
	}
	// Another process read the sources; stat them so that the test cache depends on them.
	sources, err := filepath.Glob("hostile/*")
	for _, s := range sources {
		if _, err := os.Stat(s); err != nil {
			return "", err
		}
	}
	return built, err
})

// A fixture holds the targets of attacks on this host, the backends, and the last run.
type fixture struct {
	test    *testing.T // its cleanup ends everything
	program string     // the hostile program
	// store is a directory with a hidden path that contains two inputs. secret is a world-readable file that is not an
	// input.
	store, secret string
	listeners     []string // on this host's loopback
	abstract      string   // an abstract socket of this host
	mark          string   // in command lines of processes that must not outlive their run

	backends map[string]sandbox.Backend // by omitted layers
	features map[sandbox.Backend]sandbox.Features

	result     *sandbox.Result
	connecting sync.WaitGroup
	mu         sync.Mutex
	reached    []string // guarded by mu; ports of runs that were reached from outside
}

// newFixture sets everything up for one test. It skips the test if this host has no sandbox.
func newFixture(t *testing.T) *fixture {
	program := must.Get(build())(t)
	dir := must.Get(filepath.EvalSymlinks(t.TempDir()))(t)
	mark := fmt.Sprintf("escape-%d", os.Getpid())
	w := &fixture{
		test: t, program: program, store: filepath.Join(dir, "store-"+mark), secret: filepath.Join(dir, "secret"),
		abstract: "@" + mark, mark: mark, backends: map[string]sandbox.Backend{}, features: map[sandbox.Backend]sandbox.Features{},
	}
	must.Succeed(t, os.WriteFile(w.secret, []byte("secret"), 0o644))
	for _, l := range [][2]string{{"tcp", "127.0.0.1:0"}, {"tcp", "[::1]:0"}, {"unix", w.abstract}} {
		listener, err := net.Listen(l[0], l[1])
		if err != nil && l[1] == "[::1]:0" {
			continue // a host without IPv6
		}
		must.Succeed(t, err)
		t.Cleanup(func() { listener.Close() })
		if l[0] == "tcp" {
			w.listeners = append(w.listeners, listener.Addr().String())
		}
	}
	if _, err := w.newBackend(nil); err != nil {
		sandboxtest.Unavailable(t, "namespaces", err)
	}
	return w
}

// hostProcesses returns the process IDs of this process and its parent, which a run must not reach.
func (w *fixture) hostProcesses() []string {
	return []string{fmt.Sprint(os.Getpid()), fmt.Sprint(os.Getppid())}
}

// resetStore creates the content of the store before a run.
func (w *fixture) resetStore() error {
	return errors.Join(os.RemoveAll(w.store), os.MkdirAll(filepath.Join(w.store, "open"), 0o700),
		os.Chmod(filepath.Join(w.store, "open"), 0o777),
		inputFile(os.WriteFile, os.Chmod, filepath.Join(w.store, "file")),
		inputFile(os.WriteFile, os.Chmod, filepath.Join(w.store, "open", "sub")))
}

// inputFile creates a world-writable input, which only the sandbox protects.
func inputFile(write func(string, []byte, os.FileMode) error, chmod func(string, os.FileMode) error, name string) error {
	return errors.Join(write(name, []byte("original"), 0o666), chmod(name, 0o666))
}

// checkInputs returns an error if inputs on the host have changed.
func (w *fixture) checkInputs() error {
	for _, name := range []string{"file", "open/sub"} {
		b, err := os.ReadFile(filepath.Join(w.store, name))
		if err != nil || string(b) != "original" {
			return fmt.Errorf("the host's %s contains %q: %w", name, b, err)
		}
		if st, err := os.Stat(filepath.Join(w.store, name)); err != nil || st.Mode() != 0o666 {
			return fmt.Errorf("the mode of the host's %s changed: %v", name, err)
		}
	}
	if left, err := os.ReadDir(filepath.Join(w.store, "open")); err != nil || len(left) != 1 {
		return fmt.Errorf("the host's directory contains %v: %w", left, err)
	}
	return nil
}

// backend returns the backend without these layers, which it creates once.
func (w *fixture) backend(t *testing.T, without []namespace.Layer) sandbox.Backend {
	t.Helper()
	b, err := w.newBackend(without)
	must.Be(t, err == nil, "without %v: %v", without, err)
	return b
}

func (w *fixture) newBackend(without []namespace.Layer) (sandbox.Backend, error) {
	key := fmt.Sprint(without)
	if b := w.backends[key]; b != nil {
		return b, nil
	}
	if err := w.resetStore(); err != nil {
		return nil, err
	}
	b := namespace.New(namespace.Config{Without: without, Hidden: []string{w.store}})
	w.test.Cleanup(func() { b.Close() })
	f, err := b.Probe(w.test.Context())
	if err != nil {
		return nil, err
	}
	w.backends[key], w.features[b] = b, f
	return b, nil
}

// relax removes from spec what a backend without all layers cannot enforce, and would therefore refuse.
func relax(spec *sandbox.Spec, f sandbox.Features) {
	for _, l := range sandbox.AllLimits {
		if !slices.Contains(f.Limits, l) {
			spec.Limits.Set(l, sandbox.Unlimited)
		}
	}
	if !slices.Contains(f.Audits, spec.Audit) {
		spec.Audit = sandbox.AuditOff
	}
}

// huge is the size of a sparse input.
const huge int64 = 10 << 30

// workspace returns a workspace with the inputs of every run.
func workspace(ctx context.Context, b sandbox.Backend, l *sandbox.Limits) (sandbox.Workspace, error) {
	ws, err := b.Workspace(ctx, l.OutputBytes, l.OutputFiles)
	if err != nil {
		return nil, err
	}
	root := ws.Root()
	err = errors.Join(
		root.Mkdir("out", 0o777), root.Chmod("out", 0o777), root.Mkdir("in-dir", 0o777), root.Chmod("in-dir", 0o777),
		inputFile(root.WriteFile, root.Chmod, "in-file"), inputFile(root.WriteFile, root.Chmod, "in-build"),
		inputFile(root.WriteFile, root.Chmod, "in-dir/sub"),
		root.MkdirAll("lower/tree", 0o755), root.Chmod("lower/tree", 0o777|os.ModeSticky), root.WriteFile("lower/tree/sub", []byte("original"), 0o644),
		root.WriteFile("lower/tree/huge", nil, 0o644), os.Truncate(filepath.Join(root.Name(), "lower/tree/huge"), huge),
		root.Mkdir("lower/tree/empty", 0o777), root.Chmod("lower/tree/empty", 0o777|os.ModeSticky))
	if err == nil && os.Geteuid() != 0 {
		// The directory must be the run's, which has our user.
		err = errors.Join(root.Mkdir("out/tree", 0o777), root.Chmod("out/tree", 0o777|os.ModeSticky))
	}
	if err != nil {
		ws.Close()
		return nil, fmt.Errorf("set up the workspace: %w", err)
	}
	return ws, nil
}

// spec returns the spec of an attack, unless its guarantee changes it.
func (w *fixture) spec(attack []string) *sandbox.Spec {
	return &sandbox.Spec{
		Args: append([]string{"/hostile"}, attack...),
		Dir:  "/build",
		Env:  []string{"A=1", "PATH=/usr/bin:/bin"},
		Inputs: []sandbox.Input{
			{Target: "/hostile", Content: "x", Source: w.program},
			{Target: "/in/file", Content: "x", Source: "in-file"},
			{Target: "/in/dir", Content: "x", Source: "in-dir"},
			{Target: "/in/host", Content: "x", Source: filepath.Join(w.store, "file")},
			{Target: "/in/open", Content: "x", Source: filepath.Join(w.store, "open")},
			{Target: "/build/file", Content: "x", Source: "in-build"},
		},
		Outputs: []sandbox.Output{{Target: "/build", Source: "out"}},
		Temp:    []sandbox.Temp{{Target: "/tmp", Bytes: 16 << 20}},
		Network: sandbox.Network{Loopback: true, Listen: true},
		Limits:  sandboxtest.Limits(),
		Timeout: 5 * time.Minute, // for an attack that does not end
	}
}

// lines keeps everything written and calls onLine for each complete line.
type lines struct {
	text    bytes.Buffer
	pending []byte
	onLine  func(string)
}

func (l *lines) Write(p []byte) (int, error) {
	l.text.Write(p)
	l.pending = append(l.pending, p...)
	for {
		line, rest, ok := bytes.Cut(l.pending, []byte("\n"))
		if !ok {
			return len(p), nil
		}
		l.pending = rest
		if l.onLine != nil {
			l.onLine(string(line))
		}
	}
}

// run runs one attack and returns what it printed. done, if not nil, inspects the outputs.
func (w *fixture) run(ctx context.Context, b sandbox.Backend, spec *sandbox.Spec, onLine func(string), done func(*os.Root)) (*sandbox.Result, string, error) {
	if f, ok := w.features[b]; ok && f.Tier != "full" {
		relax(spec, f)
	}
	ws, err := workspace(ctx, b, &spec.Limits)
	if err != nil {
		return nil, "", err
	}
	defer ws.Close()
	spec.Workspace = ws.Name()
	stdout, stderr := &lines{onLine: onLine}, &bytes.Buffer{}
	res, err := b.Run(ctx, spec, sandbox.Stdio{Stdout: stdout, Stderr: stderr})
	if err != nil {
		return nil, "", fmt.Errorf("%w; it printed %.2000s%.2000s", err, stdout.text.String(), stderr)
	}
	if done != nil {
		out, err := ws.Root().OpenRoot("out")
		if err != nil {
			return nil, "", err
		}
		defer out.Close()
		done(out)
	}
	return res, stdout.text.String() + stderr.String(), nil
}

// attempt runs the attack of a guarantee. It returns what escaped, or "" and the verdict. An error means that the
// attack could not run.
func (w *fixture) attempt(t *testing.T, g *guarantee, without []namespace.Layer) (escaped, held string, err error) {
	b := w.backend(t, without)
	if err := w.resetStore(); err != nil {
		return "", "", err
	}
	w.result, w.reached = nil, nil
	if g.before != nil {
		if _, text, err := w.run(t.Context(), b, w.spec(g.before), nil, nil); err != nil || !strings.HasPrefix(text, "held:") {
			return "", "", fmt.Errorf("the preceding attack %v: %q, %w", g.before, text, err)
		}
	}
	ended := make(chan struct{})
	if g.concurrent != nil {
		ctx, cancel := context.WithCancel(t.Context())
		ready, failed := make(chan struct{}), ""
		spec := w.spec(g.concurrent)
		spec.Timeout = 5 * time.Minute
		go func() {
			defer close(ended)
			_, text, err := w.run(ctx, b, spec, func(line string) {
				if line == "ready" {
					close(ready)
				}
			}, nil)
			failed = fmt.Sprintf("%q, %v", text, err)
		}()
		defer func() {
			cancel()
			if len(without) > 0 {
				w.killSurvivors() // the omitted layers may not
			}
			<-ended
		}()
		select {
		case <-ready:
		case <-ended:
			return "", "", fmt.Errorf("the concurrent attack %v: %s", g.concurrent, failed)
		}
	}
	spec := w.spec(g.attack)
	if g.spec != nil {
		g.spec(spec)
	}
	var onLine func(string)
	if g.onLine != nil {
		onLine = func(line string) { g.onLine(w, line) }
	}
	var checked error
	res, text, err := w.run(t.Context(), b, spec, onLine, func(out *os.Root) {
		if g.outputs != nil {
			checked = g.outputs(out)
		}
		if g.concurrent != nil {
			select {
			case <-ended:
				checked = errors.New("the concurrent run was killed")
			default:
			}
		}
	})
	w.connecting.Wait()
	if err != nil {
		return "", "", err
	}
	w.result = res
	if g.check != nil {
		checked = errors.Join(checked, g.check(w))
	}
	checked = errors.Join(checked, w.checkInputs())
	verdict := lastLine(text)
	switch {
	case strings.HasPrefix(verdict, "ESCAPED:"):
		return verdict, "", nil
	case checked != nil:
		return checked.Error(), "", nil
	case len(w.reached) > 0:
		return strings.Join(w.reached, ", "), "", nil
	case strings.HasPrefix(verdict, "held:") && res.ExitCode == 0:
		return "", verdict, nil
	case g.kills && res.Signal != 0:
		return "", fmt.Sprintf("killed by signal %d", res.Signal), nil
	}
	return "", "", fmt.Errorf("exit code %d, signal %d: %.2000s", res.ExitCode, res.Signal, text)
}

func lastLine(text string) string {
	all := strings.Split(strings.TrimSpace(text), "\n")
	for _, line := range all {
		if strings.HasPrefix(line, "ESCAPED:") {
			return line
		}
	}
	return all[len(all)-1]
}

// TestEscapes runs every attack with all layers, and then without those that ensure its guarantee.
func TestEscapes(t *testing.T) {
	w := newFixture(t)
	features := w.features[w.backend(t, nil)]
	var rows table
	all := guarantees(w)
	for i := range all {
		g := &all[i]
		t.Run(g.name, func(t *testing.T) {
			note, ran := g.reason, false
			if len(g.without) > 0 {
				note = fmt.Sprintf("not without %v", g.without)
			}
			defer func() { rows.add(g, t, ran, note) }()
			if g.limit != "" && !slices.Contains(features.Limits, g.limit) {
				sandboxtest.Unavailable(t, "limits", fmt.Sprintf("this worker cannot limit %s", g.limit))
			}
			ran = true
			w.confined(t, &features, g)
			if len(g.without) > 0 && (!g.rootOnly || os.Geteuid() == 0) {
				w.unconfined(t, g)
			}
		})
	}
	who := "root"
	if os.Geteuid() != 0 {
		who = fmt.Sprintf("user %d", os.Geteuid())
	}
	t.Logf("guarantees of the sandbox, worker of %s, tier %s:\n%s", who, features.Tier, rows.String())
}

// A table has a row for each guarantee.
type table struct{ strings.Builder }

func (rows *table) add(g *guarantee, t *testing.T, ran bool, note string) {
	state := "held"
	switch {
	case t.Failed():
		state = "FAILED"
	case !ran || t.Skipped():
		state = "skipped"
	}
	fmt.Fprintf(rows, "%-8s %-17s %s [%s]\n", state, g.name, g.promise, note)
}

// confined checks that the attack fails and that its attempts are recorded.
func (w *fixture) confined(t *testing.T, features *sandbox.Features, g *guarantee) {
	escaped, held, err := w.attempt(t, g, nil)
	if err != nil {
		t.Errorf("the attack could not run: %v", err)
		return
	}
	if escaped != "" {
		t.Errorf("%s\n%s", g.promise, escaped)
		return
	}
	t.Log(held)
	// Without a control group, a resource limit refuses a process silently.
	silent := g.limit == sandbox.LimitProcesses && w.result.Usage.PeakProcesses == 0
	if g.limit != "" && !silent && !g.quiet && !reports(w.result, g.limit) {
		t.Errorf("the result does not report the limit of %s: %+v, events %v", g.limit, w.result.Exceeded, w.result.Events)
	}
	if g.limit != "" && g.kills && !g.quiet && (w.result.Exceeded == nil || w.result.Exceeded.Subject != string(g.limit)) {
		t.Errorf("the result does not report that the limit of %s killed the run: %+v", g.limit, w.result.Exceeded)
	}
	if !slices.Contains(features.Layers, string(namespace.Monitor)) {
		return
	}
	for _, want := range g.events {
		if !slices.ContainsFunc(w.result.Events, func(e sandbox.Event) bool {
			return e.Kind == want.Kind && strings.HasPrefix(e.Subject, want.Subject)
		}) {
			t.Errorf("got events %[3]v, want %[1]s %[2]q", want.Kind, want.Subject, w.result.Events)
		}
	}
}

// unconfined checks that the attack succeeds without the layers. Otherwise it would not show that they are effective.
func (w *fixture) unconfined(t *testing.T, g *guarantee) {
	escaped, held, err := w.attempt(t, g, g.without)
	switch {
	case err != nil:
		t.Errorf("without %v the attack could not run: %v", g.without, err)
	case escaped == "":
		t.Errorf("without %v the attack still fails: %s", g.without, held)
	default:
		t.Logf("without %v: %s", g.without, escaped)
	}
	// Remove what was left in the host's IPC namespace.
	if slices.Contains(g.without, namespace.IPCNamespace) {
		_ = exec.Command(w.program, "find").Run() // it fails if it found something
	}
	w.killSurvivors()
}

// reports reports whether a result names a limit.
func reports(res *sandbox.Result, l sandbox.Limit) bool {
	is := func(e sandbox.Event) bool { return e.Kind == sandbox.EventLimit && e.Subject == string(l) }
	return slices.ContainsFunc(res.Events, is) || res.Exceeded != nil && is(*res.Exceeded)
}

// connectBack tries to reach the port on which a run says it listens.
func connectBack(w *fixture, line string) {
	var port int
	if _, err := fmt.Sscanf(line, "port %d", &port); err != nil {
		return
	}
	w.connecting.Go(func() {
		for _, host := range []string{"127.0.0.1", "localhost"} {
			c, err := net.DialTimeout("tcp", fmt.Sprintf("%s:%d", host, port), time.Second)
			if err != nil {
				continue
			}
			c.Close()
			w.mu.Lock()
			w.reached = append(w.reached, "reached "+c.RemoteAddr().String())
			w.mu.Unlock()
		}
	})
}

// survivors returns the processes of this host with the mark.
func (w *fixture) survivors() []string {
	return sandboxtest.Running(w.test, "\x00"+w.mark+"\x00")
}

// killSurvivors kills them, if the sandbox was not asked to.
func (w *fixture) killSurvivors() {
	for _, p := range w.survivors() {
		var pid int
		if _, err := fmt.Sscanf(p, "/proc/%d/", &pid); err == nil {
			_ = syscall.Kill(pid, syscall.SIGKILL)
		}
	}
}

func noSurvivors(w *fixture) error {
	if left := w.survivors(); len(left) > 0 {
		return fmt.Errorf("processes %v are still alive", left)
	}
	return nil
}

// TestFlood checks that output is streamed, and that a run whose reader fails ends.
func TestFlood(t *testing.T) {
	w := newFixture(t)
	b := w.backend(t, nil)
	must.Succeed(t, w.resetStore())
	const mib = 64
	for _, bytes := range []int64{mib << 20, 1 << 20} {
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
		defer cancel()
		spec := w.spec([]string{"flood", fmt.Sprint(mib)})
		ws := must.Get(workspace(ctx, b, &spec.Limits))(t)
		defer ws.Close()
		spec.Workspace = ws.Name()
		sink := &sink{left: bytes}
		res, err := b.Run(ctx, spec, sandbox.Stdio{Stdout: sink})
		switch whole := bytes == mib<<20; {
		case ctx.Err() != nil:
			t.Errorf("reader of %d bytes: the run did not end", bytes)
		case whole && (err != nil || res.ExitCode != 0 || sink.left != 0):
			t.Errorf("got error %v, %d bytes missing", err, sink.left)
		case !whole && err == nil && res.ExitCode == 0:
			t.Error("the run succeeded although its reader failed")
		}
	}
}

// A sink accepts a number of bytes and then fails.
type sink struct{ left int64 }

func (s *sink) Write(p []byte) (int, error) {
	if int64(len(p)) > s.left {
		return 0, errors.New("the sink is full")
	}
	s.left -= int64(len(p))
	return len(p), nil
}

// unprivilegedUser is a user ID that owns nothing.
const unprivilegedUser = 63210

// TestEscapesUnprivileged runs the same attacks against a worker of an ordinary user, in a child process.
func TestEscapesUnprivileged(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("TestEscapes already runs as an ordinary user")
	}
	program := must.Get(build())(t)
	dir := must.Get(os.MkdirTemp("", "cloister-escape-"))(t)
	defer os.RemoveAll(dir)
	own := map[string]string{"/proc/self/exe": filepath.Join(dir, "escape.test"), program: filepath.Join(dir, "hostile")}
	for from, to := range own {
		b, err := os.ReadFile(from)
		must.Succeed(t, errors.Join(err, os.WriteFile(to, b, 0o755)))
	}
	if err := os.Chown(dir, unprivilegedUser, unprivilegedUser); err != nil {
		sandboxtest.Unavailable(t, "unprivileged", err)
	}
	args := []string{"-test.run=^(TestEscapes|TestFlood|TestSoak)$", "-test.v", "-test.timeout=25m", fmt.Sprintf("-soak=%d", min(*soak, 400))}
	cmd := exec.CommandContext(t.Context(), own["/proc/self/exe"], args...)
	cmd.Dir = dir
	cmd.Env = []string{
		"TMPDIR=" + dir, "HOME=" + dir, "PATH=/usr/bin:/bin", hostileVariable + "=" + own[program],
		// An ordinary user has no control groups.
		"CLOISTER_REQUIRE=" + strings.ReplaceAll(strings.ReplaceAll(os.Getenv("CLOISTER_REQUIRE"), "limits", ""), "unprivileged", "namespaces"),
	}
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: unprivilegedUser, Gid: unprivilegedUser}}
	out, err := cmd.CombinedOutput()
	t.Logf("%s", out)
	must.Be(t, err == nil, "as user %d: %v", unprivilegedUser, err)
	for _, name := range []string{"TestEscapes", "TestFlood", "TestSoak"} {
		switch {
		case strings.Contains(string(out), "--- SKIP: "+name+" "):
			sandboxtest.Unavailable(t, "unprivileged", "an ordinary user has no sandbox here")
		case !strings.Contains(string(out), "--- PASS: "+name+" "):
			t.Errorf("%s did not run", name)
		}
	}
}
