// SPDX-License-Identifier: Apache-2.0

// Package escape_test attacks the sandbox: one small hostile program for each guarantee, as root's worker and as
// an ordinary user's, and each once more without the layers that keep the guarantee, where the attack must
// succeed: a test that cannot fail proves nothing. It knows backends by their interface, and looks at the host
// from outside.
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
	"github.com/cloister-build/cloister/sandbox/sandboxtest"
	"github.com/cloister-build/cloister/tests/internal/program"
	"golang.org/x/sys/unix"
)

// hostileVariable names a program that is compiled already, for tests that run as another user.
const hostileVariable = "CLOISTER_TEST_HOSTILE"

// cloister is the program as it is delivered, for tests of its mouths.
var cloister program.Program

func TestMain(m *testing.M) {
	// What a careless parent hands down: core files, and a variable that nobody should see.
	core := unix.Rlimit{}
	if err := unix.Getrlimit(unix.RLIMIT_CORE, &core); err == nil {
		core.Cur = min(64<<20, core.Max)
		_ = unix.Setrlimit(unix.RLIMIT_CORE, &core)
	}
	os.Setenv("CLOISTER_LEAK", "yes")
	code := cloister.Main(m)
	if built != "" {
		os.RemoveAll(filepath.Dir(built)) // holds the program and nothing else
	}
	os.Exit(code)
}

// built is where build has put the program, or "".
var built string

// build compiles the hostile program once and returns its path. It is static, so that a sandbox needs nothing else.
var build = sync.OnceValues(func() (string, error) {
	if p := os.Getenv(hostileVariable); p != "" {
		return p, nil
	}
	dir, err := os.MkdirTemp("", "cloister-hostile-")
	if err != nil {
		return "", err
	}
	built = filepath.Join(dir, "hostile")
	cmd := exec.Command("go", "build", "-o", built, "./hostile")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("build hostile: %w\n%s", err, out)
	}
	// The sources were read by another process; go test must know that they matter for its cache.
	sources, err := filepath.Glob("hostile/*")
	for _, s := range sources {
		if _, err := os.Stat(s); err != nil {
			return "", err
		}
	}
	return built, err
})

// A world is what attacks are pointed at: parts of this host, and the last run.
type world struct {
	test    *testing.T // with which it ends
	program string
	// store is a directory whose path is to be hidden, and where two inputs come from; secret is a file that
	// is none, which everybody could read.
	store, secret string
	listeners     []string // of this host's loopback
	abstract      string   // an abstract socket of this host
	mark          string   // in command lines of processes that must not outlive their run

	backends map[string]*namespace.Backend // by the layers that each lacks
	features map[*namespace.Backend]sandbox.Features

	result *sandbox.Result
	knocks sync.WaitGroup
	mu     sync.Mutex
	reach  []string // what was reached from outside
}

// newWorld makes a world, which ends with the test.
func newWorld(t *testing.T) *world {
	program, err := build()
	if err != nil {
		t.Fatal(err)
	}
	dir, err := filepath.EvalSymlinks(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	mark := fmt.Sprintf("escape-%d", os.Getpid())
	w := &world{
		test: t, program: program, store: filepath.Join(dir, "store-"+mark), secret: filepath.Join(dir, "secret"),
		abstract: "@" + mark, mark: mark, backends: map[string]*namespace.Backend{}, features: map[*namespace.Backend]sandbox.Features{},
	}
	if err := os.WriteFile(w.secret, []byte("secret"), 0o644); err != nil {
		t.Fatal(err)
	}
	for _, l := range [][2]string{{"tcp", "127.0.0.1:0"}, {"tcp", "[::1]:0"}, {"unix", w.abstract}} {
		listener, err := net.Listen(l[0], l[1])
		if err != nil && l[1] == "[::1]:0" {
			continue // a host without IPv6
		}
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { listener.Close() })
		if l[0] == "tcp" {
			w.listeners = append(w.listeners, listener.Addr().String())
		}
	}
	return w
}

// hostProcesses are processes that a run must not reach: this one and its parent.
func (w *world) hostProcesses() []string {
	return []string{fmt.Sprint(os.Getpid()), fmt.Sprint(os.Getppid())}
}

// stock lays out the store as it is before each run.
func (w *world) stock() error {
	return errors.Join(os.RemoveAll(w.store), os.MkdirAll(filepath.Join(w.store, "open"), 0o700),
		os.Chmod(filepath.Join(w.store, "open"), 0o777),
		inputFile(os.WriteFile, os.Chmod, filepath.Join(w.store, "file")),
		inputFile(os.WriteFile, os.Chmod, filepath.Join(w.store, "open", "sub")))
}

// inputFile makes an input that everybody may write, as far as its mode goes: only the sandbox protects it.
func inputFile(write func(string, []byte, os.FileMode) error, chmod func(string, os.FileMode) error, name string) error {
	return errors.Join(write(name, []byte("original"), 0o666), chmod(name, 0o666))
}

// intact returns what has happened to the inputs that lie on the host.
func (w *world) intact() error {
	for _, name := range []string{"file", "open/sub"} {
		b, err := os.ReadFile(filepath.Join(w.store, name))
		if err != nil || string(b) != "original" {
			return fmt.Errorf("the host's %s holds %q: %w", name, b, err)
		}
		if st, err := os.Stat(filepath.Join(w.store, name)); err != nil || st.Mode() != 0o666 {
			return fmt.Errorf("the host's %s is not what it was: %v", name, err)
		}
	}
	if left, err := os.ReadDir(filepath.Join(w.store, "open")); err != nil || len(left) != 1 {
		return fmt.Errorf("the host's directory holds %v: %w", left, err)
	}
	return nil
}

// backend returns the backend that lacks these layers, made once.
func (w *world) backend(without []namespace.Layer) *namespace.Backend {
	key := fmt.Sprint(without)
	if w.backends[key] == nil {
		if err := w.stock(); err != nil {
			w.test.Fatal(err)
		}
		b := namespace.New(namespace.Config{Without: without, Hidden: []string{w.store}})
		w.test.Cleanup(func() { b.Close() })
		w.backends[key] = b
		f, err := b.Probe(w.test.Context())
		if err != nil {
			w.test.Fatalf("without %v: %v", without, err)
		}
		w.features[b] = f
	}
	return w.backends[key]
}

// fit asks of a backend only what it promises: one that lacks layers refuses what it could not hold.
func fit(spec *sandbox.Spec, f sandbox.Features) {
	for _, l := range sandbox.AllLimits {
		if !slices.Contains(f.Limits, l) {
			spec.Limits.Set(l, sandbox.Unlimited)
		}
	}
	if !slices.Contains(f.Audits, spec.Audit) {
		spec.Audit = sandbox.AuditOff
	}
}

// workspace lends a workspace with the inputs that every run has.
func workspace(ctx context.Context, b sandbox.Backend, l *sandbox.Limits) (sandbox.Workspace, error) {
	ws, err := b.Workspace(ctx, l.OutputBytes, l.OutputFiles)
	if err != nil {
		return nil, err
	}
	root := ws.Root()
	err = errors.Join(
		root.Mkdir("out", 0o777), root.Chmod("out", 0o777), root.Mkdir("in-dir", 0o777), root.Chmod("in-dir", 0o777),
		inputFile(root.WriteFile, root.Chmod, "in-file"), inputFile(root.WriteFile, root.Chmod, "in-build"),
		inputFile(root.WriteFile, root.Chmod, "in-dir/sub"))
	if err != nil {
		ws.Close()
		return nil, fmt.Errorf("lay out the workspace: %w", err)
	}
	return ws, nil
}

// spec is what a run is given unless its guarantee changes it.
func (w *world) spec(attack []string) *sandbox.Spec {
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
		Timeout: 30 * time.Second,
	}
}

// lines is a writer that keeps all, and calls said for each whole line.
type lines struct {
	text    bytes.Buffer
	pending []byte
	said    func(string)
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
		if l.said != nil {
			l.said(string(line))
		}
	}
}

// run performs one attack and returns what it printed. done, if not nil, sees the outputs.
func (w *world) run(ctx context.Context, b sandbox.Backend, spec *sandbox.Spec, said func(string), done func(*os.Root)) (*sandbox.Result, string, error) {
	if f, ok := w.features[b.(*namespace.Backend)]; ok && f.Tier != "full" {
		fit(spec, f)
	}
	ws, err := workspace(ctx, b, &spec.Limits)
	if err != nil {
		return nil, "", err
	}
	defer ws.Close()
	spec.Workspace = ws.Name()
	stdout, stderr := &lines{said: said}, &bytes.Buffer{}
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

// attempt performs the attack of a guarantee and returns what escaped, "" if nothing did, and why that is known.
// An error says that the attack could not be tried.
func (w *world) attempt(t *testing.T, g *guarantee, without []namespace.Layer) (escaped, held string, err error) {
	b := w.backend(without)
	if err := w.stock(); err != nil {
		return "", "", err
	}
	w.result, w.reach = nil, nil
	if g.first != nil {
		if _, text, err := w.run(t.Context(), b, w.spec(g.first), nil, nil); err != nil || !strings.HasPrefix(text, "held:") {
			return "", "", fmt.Errorf("%v, which comes first: %q, %w", g.first, text, err)
		}
	}
	ended := make(chan struct{})
	if g.beside != nil {
		ctx, cancel := context.WithCancel(t.Context())
		ready, failed := make(chan struct{}), ""
		spec := w.spec(g.beside)
		spec.Timeout = time.Minute
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
				w.killLeft() // perhaps nothing else does
			}
			<-ended
		}()
		select {
		case <-ready:
		case <-ended:
			return "", "", fmt.Errorf("%v, which is to be alive meanwhile: %s", g.beside, failed)
		}
	}
	spec := w.spec(g.attack)
	if g.spec != nil {
		g.spec(spec)
	}
	var said func(string)
	if g.said != nil {
		said = func(line string) { g.said(w, line) }
	}
	var checked error
	res, text, err := w.run(t.Context(), b, spec, said, func(out *os.Root) {
		if g.outputs != nil {
			checked = g.outputs(out)
		}
		if g.beside != nil {
			select {
			case <-ended:
				checked = errors.New("the run beside was ended")
			default:
			}
		}
	})
	w.knocks.Wait()
	if err != nil {
		return "", "", err
	}
	w.result = res
	if g.check != nil {
		checked = errors.Join(checked, g.check(w))
	}
	checked = errors.Join(checked, w.intact())
	verdict := lastLine(text)
	switch {
	case strings.HasPrefix(verdict, "ESCAPED:"):
		return verdict, "", nil
	case checked != nil:
		return checked.Error(), "", nil
	case len(w.reach) > 0:
		return strings.Join(w.reach, ", "), "", nil
	case strings.HasPrefix(verdict, "held:") && res.ExitCode == 0:
		return "", verdict, nil
	case g.ends && res.Signal != 0:
		return "", fmt.Sprintf("ended by signal %d", res.Signal), nil
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

// TestEscapes tries every attack, confined as well as can be, and then without what confines it.
func TestEscapes(t *testing.T) {
	w := newWorld(t)
	features, err := w.backend(nil).Probe(t.Context())
	if err != nil {
		sandboxtest.Unavailable(t, "namespaces", err)
	}
	var table strings.Builder
	row := func(g *guarantee, t *testing.T, ran bool, note string) {
		state := "held"
		switch {
		case t.Failed():
			state = "FAILED"
		case !ran || t.Skipped():
			state = "skipped"
		}
		fmt.Fprintf(&table, "%-8s %-17s %s [%s]\n", state, g.name, g.promise, note)
	}
	all := guarantees(w)
	for i := range all {
		g := &all[i]
		t.Run(g.name, func(t *testing.T) {
			note, ran := g.because, false
			if len(g.without) > 0 {
				note = fmt.Sprintf("not without %v", g.without)
			}
			defer func() { row(g, t, ran, note) }()
			if g.limit != "" && !slices.Contains(features.Limits, g.limit) {
				sandboxtest.Unavailable(t, "limits", fmt.Sprintf("this worker cannot limit %s", g.limit))
			}
			ran = true
			w.confined(t, &features, g)
			if len(g.without) > 0 && !(g.root && os.Geteuid() != 0) {
				w.unconfined(t, g)
			}
		})
	}
	who := "root"
	if os.Geteuid() != 0 {
		who = fmt.Sprintf("user %d", os.Geteuid())
	}
	t.Logf("guarantees of the sandbox, worker of %s, tier %s:\n%s", who, features.Tier, table.String())
}

// confined expects the attack to fail, and what it tried to be on record.
func (w *world) confined(t *testing.T, features *sandbox.Features, g *guarantee) {
	escaped, held, err := w.attempt(t, g, nil)
	if err != nil {
		t.Errorf("the attack could not be tried: %v", err)
		return
	}
	if escaped != "" {
		t.Errorf("%s\n%s", g.promise, escaped)
		return
	}
	t.Log(held)
	// Without a control group the kernel refuses a process by a resource limit, and tells nobody.
	silent := g.limit == sandbox.LimitProcesses && w.result.Usage.PeakProcesses == 0
	if g.limit != "" && !silent && !met(w.result, g.limit) {
		t.Errorf("the result does not say that the limit of %s was met: %+v, events %v", g.limit, w.result.Exceeded, w.result.Events)
	}
	if g.limit != "" && g.ends && (w.result.Exceeded == nil || w.result.Exceeded.Subject != string(g.limit)) {
		t.Errorf("the result does not say that the limit of %s ended the run: %+v", g.limit, w.result.Exceeded)
	}
	if !slices.Contains(features.Layers, string(namespace.Monitor)) {
		return
	}
	for _, want := range g.events {
		if !slices.ContainsFunc(w.result.Events, func(e sandbox.Event) bool {
			return e.Kind == want.Kind && strings.HasPrefix(e.Subject, want.Subject)
		}) {
			t.Errorf("no event %s %q among %v", want.Kind, want.Subject, w.result.Events)
		}
	}
}

// unconfined expects the attack to succeed: else it is not known what the layers are for, or whether it is one.
func (w *world) unconfined(t *testing.T, g *guarantee) {
	escaped, held, err := w.attempt(t, g, g.without)
	switch {
	case err != nil:
		t.Errorf("without %v the attack could not be tried: %v", g.without, err)
	case escaped == "":
		t.Errorf("without %v the attack fails all the same: %s", g.without, held)
	default:
		t.Logf("without %v: %s", g.without, escaped)
	}
	// What was left in the host's own IPC namespace is the owner's to remove.
	if slices.Contains(g.without, namespace.IPCNamespace) {
		_ = exec.Command(w.program, "find").Run() // its exit code says that it found something
	}
	w.killLeft()
}

// met reports whether a result says that a limit was met.
func met(res *sandbox.Result, l sandbox.Limit) bool {
	is := func(e sandbox.Event) bool { return e.Kind == sandbox.EventLimit && e.Subject == string(l) }
	return slices.ContainsFunc(res.Events, is) || res.Exceeded != nil && is(*res.Exceeded)
}

// knock tries to reach the port that a run says it listens on.
func knock(w *world, line string) {
	var port int
	if _, err := fmt.Sscanf(line, "port %d", &port); err != nil {
		return
	}
	w.knocks.Go(func() {
		for _, host := range []string{"127.0.0.1", "localhost"} {
			c, err := net.DialTimeout("tcp", fmt.Sprintf("%s:%d", host, port), time.Second)
			if err != nil {
				continue
			}
			c.Close()
			w.mu.Lock()
			w.reach = append(w.reach, "reached "+c.RemoteAddr().String())
			w.mu.Unlock()
		}
	})
}

// left returns the processes of this host that bear the world's mark.
func (w *world) left() []int {
	var pids []int
	dirs, _ := filepath.Glob("/proc/[0-9]*/cmdline")
	for _, d := range dirs {
		b, err := os.ReadFile(d)
		if err != nil || !bytes.Contains(b, []byte("\x00"+w.mark+"\x00")) {
			continue
		}
		var pid int
		if _, err := fmt.Sscanf(d, "/proc/%d/", &pid); err == nil {
			pids = append(pids, pid)
		}
	}
	return pids
}

// killLeft ends them, where the sandbox was asked not to.
func (w *world) killLeft() {
	for _, pid := range w.left() {
		_ = syscall.Kill(pid, syscall.SIGKILL)
	}
}

func noneLeft(w *world) error {
	if pids := w.left(); len(pids) > 0 {
		return fmt.Errorf("processes %v are alive", pids)
	}
	return nil
}

// TestFlood: what a run prints passes through the worker and does not stay there; and a run whose reader is gone
// ends instead of waiting for ever.
func TestFlood(t *testing.T) {
	w := newWorld(t)
	b := w.backend(nil)
	if _, err := b.Probe(t.Context()); err != nil {
		sandboxtest.Unavailable(t, "namespaces", err)
	}
	if err := w.stock(); err != nil {
		t.Fatal(err)
	}
	const mib = 64
	for _, room := range []int64{mib << 20, 1 << 20} {
		// Far longer than either takes, and shorter than the test may.
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
		defer cancel()
		spec := w.spec([]string{"flood", fmt.Sprint(mib)})
		ws, err := workspace(ctx, b, &spec.Limits)
		if err != nil {
			t.Fatal(err)
		}
		defer ws.Close()
		spec.Workspace = ws.Name()
		sink := &sink{room: room}
		res, err := b.Run(ctx, spec, sandbox.Stdio{Stdout: sink})
		switch whole := room == mib<<20; {
		case ctx.Err() != nil:
			t.Errorf("with a reader of %d bytes the run did not end by itself", room)
		case whole && (err != nil || res.ExitCode != 0 || sink.room != 0):
			t.Errorf("not all of the output arrived: %v, %d bytes lack", err, sink.room)
		case !whole && err == nil && res.ExitCode == 0:
			t.Error("a run whose reader had gone wrote on to its end")
		}
	}
}

// A sink takes so many bytes and then no more.
type sink struct{ room int64 }

func (s *sink) Write(p []byte) (int, error) {
	if int64(len(p)) > s.room {
		return 0, errors.New("the sink is full")
	}
	s.room -= int64(len(p))
	return len(p), nil
}

// unprivilegedUser is one that owns nothing.
const unprivilegedUser = 63210

// TestEscapesUnprivileged runs the same attacks against an ordinary user's worker, in a process of this binary.
func TestEscapesUnprivileged(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("TestEscapes runs as an ordinary user already")
	}
	program, err := build()
	if err != nil {
		t.Fatal(err)
	}
	dir, err := os.MkdirTemp("", "cloister-escape-")
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(dir)
	own := map[string]string{"/proc/self/exe": filepath.Join(dir, "escape.test"), program: filepath.Join(dir, "hostile")}
	for from, to := range own {
		b, err := os.ReadFile(from)
		if err := errors.Join(err, os.WriteFile(to, b, 0o755)); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Chown(dir, unprivilegedUser, unprivilegedUser); err != nil {
		t.Fatal(err)
	}
	args := []string{"-test.run=^(TestEscapes|TestFlood|TestSoak)$", "-test.timeout=9m", fmt.Sprintf("-soak=%d", min(*soak, 400))}
	if testing.Verbose() {
		args = append(args, "-test.v")
	}
	cmd := exec.CommandContext(t.Context(), own["/proc/self/exe"], args...)
	cmd.Dir = dir
	cmd.Env = []string{
		"TMPDIR=" + dir, "HOME=" + dir, "PATH=/usr/bin:/bin", hostileVariable + "=" + own[program],
		// An ordinary user has no groups to limit memory with.
		"CLOISTER_REQUIRE=" + strings.ReplaceAll(strings.ReplaceAll(os.Getenv("CLOISTER_REQUIRE"), "limits", ""), "unprivileged", "namespaces"),
	}
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: unprivilegedUser, Gid: unprivilegedUser}}
	out, err := cmd.CombinedOutput()
	t.Logf("%s", out)
	if err != nil {
		t.Fatalf("as user %d: %v", unprivilegedUser, err)
	}
	if strings.Contains(string(out), "no tests to run") || !strings.Contains(string(out), "PASS") {
		t.Fatal("no attack was tried")
	}
}
