// SPDX-License-Identifier: Apache-2.0

package environment_test

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime/debug"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/sandbox/environment"
	"github.com/cloister-build/cloister/sandbox/gvisor"
	"github.com/cloister-build/cloister/sandbox/microvm"
	"github.com/cloister-build/cloister/sandbox/namespace"
	"github.com/cloister-build/cloister/sandbox/sandboxtest"
	"github.com/cloister-build/cloister/tests/guestkernel"
	"github.com/cloister-build/cloister/tests/must"
	"golang.org/x/sys/unix"
)

func TestMain(m *testing.M) {
	namespace.Init()
	guestkernel.Use()
	// What make gvisor builds, unless somebody chose another.
	if built, err := filepath.Abs("../../bin/runsc"); err == nil && os.Getenv("RUNSC_PATH") == "" {
		if _, err := os.Stat(built); err == nil {
			if err := os.Setenv("RUNSC_PATH", built); err != nil {
				panic(err)
			}
		}
	}
	os.Exit(m.Run())
}

// TestEnvironment is what environments promise, on each backend.
func TestEnvironment(t *testing.T) {
	namespaces := func() sandbox.Backend { return namespace.New(namespace.Config{}) }
	machines := microvm.NewQEMU(true)
	defer machines.Close()
	for name, h := range map[string]host{
		"namespaces": {"namespaces", namespaces, false},
		"relayed":    {"namespaces", namespaces, true},
		"gvisor":     {"gvisor", gvisor.New, true},
		"qemu":       {"qemu", func() sandbox.Backend { return kept{machines} }, true},
	} {
		t.Run(name, func(t *testing.T) {
			h.probe(t) // or skip
			for _, c := range contract {
				t.Run(c.name, func(t *testing.T) { c.test(t, h) })
			}
		})
	}
}

var contract = []struct {
	name string
	test func(*testing.T, host)
}{
	{"CommandsShareTheEnvironment", commandsShareTheEnvironment},
	{"CommandOfItsOwn", commandOfItsOwn},
	{"StreamsOfAnySize", streamsOfAnySize},
	{"ProgramsThatCannotRun", programsThatCannotRun},
	{"BackgroundProcessDoesNotDelayTheEnd", backgroundProcessDoesNotDelayTheEnd},
	{"SignalsReachTheCommand", signalsReachTheCommand},
	{"ContextEndsTheCommandOnly", contextEndsTheCommandOnly},
	{"CloseEndsCommands", closeEndsCommands},
	{"CloseDeliversTheRestOfTheOutput", closeDeliversTheRestOfTheOutput},
	{"UnreadOutputDoesNotDelayTheEnd", unreadOutputDoesNotDelayTheEnd},
	{"CommandsMayShareStdin", commandsMayShareStdin},
	{"StdinStaysAsItIs", stdinStaysAsItIs},
	{"EndedCommandsLeaveNoThreads", endedCommandsLeaveNoThreads},
	{"TimeoutEndsTheEnvironment", timeoutEndsTheEnvironment},
	{"StoppedAgentDoesNotDelayTheEnd", stoppedAgentDoesNotDelayTheEnd},
	{"CloseEndsBackgroundProcesses", closeEndsBackgroundProcesses},
	{"ManyCommandsAtOnce", manyCommandsAtOnce},
	{"KilledAgentEndsTheEnvironment", killedAgentEndsTheEnvironment},
}

// A kept backend outlives a case, so that not every case boots a machine.
type kept struct{ sandbox.Backend }

func (kept) Close() error { return nil }

// A host has a kind of backends.
type host struct {
	name       string // in sandboxtest.Requirements
	newBackend func() sandbox.Backend
	relayed    bool // the streams of commands are copied, as for another kernel
}

// probe returns a new backend that works, and its features.
func (h host) probe(t *testing.T) (sandbox.Backend, *sandbox.Features) {
	t.Helper()
	info, ok := debug.ReadBuildInfo()
	if h.name != "namespaces" && ok && slices.Contains(info.Settings, debug.BuildSetting{Key: "-race", Value: "true"}) {
		t.Skip("programs with the race detector are dynamically linked")
	}
	if why := guestkernel.Missing(); h.name == "qemu" && why != "" {
		sandboxtest.Unavailable(t, h.name, why)
	}
	b := h.newBackend()
	t.Cleanup(func() { b.Close() })
	features, err := b.Probe(t.Context())
	if err != nil {
		sandboxtest.Unavailable(t, h.name, err)
	}
	if h.relayed && features.Kernel == "" {
		features.Kernel = "another"
	}
	return b, &features
}

// start starts an environment with a writable directory /scratch, after change, which may be nil.
func (h host) start(t *testing.T, change func(*sandbox.Spec)) *environment.Environment {
	t.Helper()
	e, _ := h.startIn(t, change)
	return e
}

// startIn is start, and also returns the workspace, in which /scratch is the directory scratch.
func (h host) startIn(t *testing.T, change func(*sandbox.Spec)) (*environment.Environment, *os.Root) {
	t.Helper()
	b, features := h.probe(t)
	ws := must.Get(b.Workspace(t.Context(), 16<<20, 1000))(t)
	t.Cleanup(func() { ws.Close() })
	spec := newSpec(t)
	spec.Workspace = ws.Name()
	if !slices.Contains(features.Audits, spec.Audit) {
		spec.Audit = sandbox.AuditOff
	}
	for _, l := range []struct {
		limit sandbox.Limit
		value *int64
	}{{sandbox.LimitMemory, &spec.Limits.Memory}, {sandbox.LimitProcesses, &spec.Limits.Processes}} {
		if !slices.Contains(features.Limits, l.limit) {
			*l.value = sandbox.Unlimited
		}
	}
	if !slices.Contains(features.Limits, sandbox.LimitCPU) {
		spec.Limits.CPU = sandbox.Unlimited
	}
	if change != nil {
		change(spec)
	}
	e, err := environment.Start(t.Context(), features, func(ctx context.Context, std sandbox.Stdio) (*sandbox.Result, error) {
		return b.Run(ctx, spec, std)
	})
	must.Succeed(t, err)
	t.Cleanup(func() { e.Close(context.Background()) }) // killing the run would end the kept machine
	return e, ws.Root()
}

// newSpec returns the Spec of an environment of this program.
func newSpec(t *testing.T) *sandbox.Spec {
	t.Helper()
	tools := must.Get(sandbox.HostToolchain())(t)
	self := must.Get(os.Executable())(t)
	spec, err := sandbox.ForTest(sandbox.Profile{
		Args: environment.Args("/agent"), Tools: tools, Outputs: []string{"/scratch"},
		Inputs: []sandbox.Input{{Target: "/agent/" + environment.Program, Source: self, Content: "agent"}},
	})
	must.Succeed(t, err)
	return spec
}

// shell runs a script and returns its exit code and output.
func shell(t *testing.T, e *environment.Environment, script string) (int, string) {
	t.Helper()
	var out bytes.Buffer
	code, err := e.Exec(t.Context(), command(script), sandbox.Stdio{Stdout: &out, Stderr: &out}, nil)
	if err != nil {
		t.Fatalf("%s: %v", script, err)
	}
	return code, out.String()
}

func command(script string) *sandbox.Spec {
	return &sandbox.Spec{Args: []string{"/bin/sh", "-c", script}}
}

func commandsShareTheEnvironment(t *testing.T, h host) {
	e := h.start(t, nil)
	for _, c := range []struct {
		script string
		code   int
		out    string
	}{
		{"echo kept > /scratch/file; cd /; exit 3", 3, ""},
		{"cat /scratch/file; pwd", 0, "kept\n/scratch\n"}, // the file is kept, the working directory is not
		{"sleep 1000 < /dev/null > /dev/null 2>&1 & echo $! > /scratch/pid", 0, ""},
		{"kill -0 $(cat /scratch/pid) && echo alive", 0, "alive\n"},
		{"kill $$", 143, ""},
		{"echo out > /dev/stdout; echo err > /dev/stderr", 0, "out\nerr\n"},
		{"cat", 0, ""},
		{"id -u; cat /etc/shadow", 1, "1000\ncat: /etc/shadow: No such file or directory\n"},
		{"echo x 2>/dev/null > /usr/x || echo refused", 0, "refused\n"},
	} {
		if code, out := shell(t, e, c.script); code != c.code || out != c.out {
			t.Errorf("%s: got %d %q, want %d %q", c.script, code, out, c.code, c.out)
		}
	}
	result := must.Get(e.Close(t.Context()))(t)
	if _, features := h.probe(t); !slices.Contains(features.Audits, sandbox.AuditViolations) {
		return
	}
	var writes []string
	for _, event := range result.Events {
		if event.Kind == sandbox.EventWrite {
			writes = append(writes, event.Subject)
		}
	}
	if want := "/usr/x"; strings.Join(writes, " ") != want {
		t.Errorf("got denied writes %q, want %q", writes, want)
	}
}

func commandOfItsOwn(t *testing.T, h host) {
	e := h.start(t, nil)
	stdin, w, err := os.Pipe()
	must.Succeed(t, err)
	defer stdin.Close()
	go func() {
		_, _ = io.WriteString(w, "typed\n")
		w.Close()
	}()
	var stdout, stderr bytes.Buffer
	spec := &sandbox.Spec{
		Args: []string{"sh", "-c", "cat; pwd; echo $A $HOME; echo err >&2"}, Dir: "/tmp", Env: []string{"A=b", "HOME=/scratch"},
	}
	code, err := e.Exec(t.Context(), spec, sandbox.Stdio{Stdin: stdin, Stdout: &stdout, Stderr: &stderr}, nil)
	if err != nil || code != 0 || stdout.String() != "typed\n/tmp\nb /scratch\n" || stderr.String() != "err\n" {
		t.Errorf("got %d %v, stdout %q, stderr %q", code, err, stdout.String(), stderr.String())
	}
}

// Streams are as long as they are, a command need not read its stdin, and one that writes what nobody takes gets SIGPIPE.
func streamsOfAnySize(t *testing.T, h host) {
	e := h.start(t, nil)
	stdin, w, err := os.Pipe()
	must.Succeed(t, err)
	defer stdin.Close()
	defer w.Close()
	want := bytes.Repeat([]byte("0123456789abcdef"), 1<<16)
	var got bytes.Buffer
	go func() {
		_, _ = w.Write(append(want, "more"...))
	}()
	code, err := e.Exec(t.Context(), command("head -c 1048576"), sandbox.Stdio{Stdin: stdin, Stdout: &got}, nil)
	if err != nil || code != 0 || !bytes.Equal(got.Bytes(), want) {
		t.Errorf("got %d %v and %d bytes, want %d", code, err, got.Len(), len(want))
	}
	code, err = e.Exec(t.Context(), &sandbox.Spec{Args: []string{"true"}}, sandbox.Stdio{Stdin: stdin}, nil)
	if err != nil || code != 0 {
		t.Errorf("with a stdin that does not end: got %d %v, want 0", code, err)
	}
	code, err = e.Exec(t.Context(), &sandbox.Spec{Args: []string{"yes"}}, sandbox.Stdio{Stdout: failing{}}, nil)
	if !errors.Is(err, io.ErrShortWrite) || code != 141 {
		t.Errorf("with a writer that fails: got %d %v, want 141 and its error", code, err)
	}
}

// failing is a writer that fails.
type failing struct{}

func (failing) Write([]byte) (int, error) { return 0, io.ErrShortWrite }

func programsThatCannotRun(t *testing.T, h host) {
	e := h.start(t, nil)
	for _, c := range []struct {
		args []string
		dir  string
		code int
		err  string
	}{
		{[]string{"no-such-program"}, "", 127, "cloister: no-such-program: not found in the sandbox\n"},
		{[]string{"./absent"}, "", 127, "cloister: ./absent: not found in the sandbox\n"},
		{[]string{"/etc/passwd"}, "", 126, "cloister: /etc/passwd: not executable\n"},
		{[]string{"true"}, "/absent", 126, "cloister: /absent is not a directory in the sandbox\n"},
	} {
		var stderr bytes.Buffer
		spec := &sandbox.Spec{Args: c.args, Dir: c.dir}
		code, err := e.Exec(t.Context(), spec, sandbox.Stdio{Stderr: &stderr}, nil)
		if err != nil || code != c.code || stderr.String() != c.err {
			t.Errorf("%q: got %d %v %q, want %d %q", c.args, code, err, stderr.String(), c.code, c.err)
		}
	}
	for _, spec := range []*sandbox.Spec{
		nil, {}, {Args: []string{"a\x00"}}, {Args: []string{"a"}, Env: []string{"A"}}, {Args: []string{"a", strings.Repeat("x", 1<<17)}},
	} {
		if _, err := e.Exec(t.Context(), spec, sandbox.Stdio{}, nil); !errors.Is(err, sandbox.ErrSpec) {
			t.Errorf("got %v, want ErrSpec", err)
		}
	}
	if h.relayed {
		if _, err := e.Exec(t.Context(), command("true"), sandbox.Stdio{Terminal: os.Stdin}, nil); !errors.Is(err, sandbox.ErrUnsupported) {
			t.Errorf("with a terminal: got %v, want ErrUnsupported", err)
		}
	}
}

// A command ends although a process in the background has its output open, and none of its own output is lost: here the
// reader waits until the command has ended.
func backgroundProcessDoesNotDelayTheEnd(t *testing.T, h host) {
	e := h.start(t, nil)
	out := &slowWriter{written: make(chan struct{}), release: make(chan struct{})}
	go func() {
		<-out.written
		shell(t, e, "while kill -0 $(cat /scratch/pid) 2>/dev/null; do sleep 0.01; done")
		close(out.release)
	}()
	script := "echo $$ > /scratch/pid; sleep 1000 & head -c 60000 /dev/zero | tr '\\0' x"
	code, err := e.Exec(t.Context(), command(script), sandbox.Stdio{Stdout: out}, nil)
	if err != nil || code != 0 || string(out.text) != strings.Repeat("x", 60000) {
		t.Errorf("got %d %v and %d bytes, want 0 and 60000", code, err, len(out.text))
	}
}

// A slowWriter waits in its first Write.
type slowWriter struct {
	text             []byte
	once             sync.Once
	written, release chan struct{}
}

func (w *slowWriter) Write(b []byte) (int, error) {
	w.once.Do(func() {
		close(w.written)
		<-w.release
	})
	w.text = append(w.text, b...)
	return len(b), nil
}

func signalsReachTheCommand(t *testing.T, h host) {
	e := h.start(t, nil)
	r, w := io.Pipe()
	signals := make(chan os.Signal, 1)
	go func() {
		_, _ = r.Read(make([]byte, 6)) // the trap is set
		signals <- syscall.Signal(0)   // not a signal
		signals <- syscall.SIGINT
		_, _ = io.Copy(io.Discard, r)
	}()
	code, err := e.Exec(t.Context(), command("trap 'exit 7' INT; echo ready; while :; do sleep 0.01; done"), sandbox.Stdio{Stdout: w}, signals)
	if err != nil || code != 7 {
		t.Errorf("got %d %v, want 7", code, err)
	}
}

func contextEndsTheCommandOnly(t *testing.T, h host) {
	e := h.start(t, nil)
	ctx, cancel := context.WithCancel(t.Context())
	r, w := io.Pipe()
	go func() {
		_, _ = r.Read(make([]byte, 6))
		cancel()
		_, _ = io.Copy(io.Discard, r)
	}()
	code, err := e.Exec(ctx, command("trap '' TERM; echo ready; while :; do sleep 0.01; done"), sandbox.Stdio{Stdout: w}, nil)
	if code != 137 || !errors.Is(err, context.Canceled) {
		t.Errorf("got %d %v, want 137 and the cause", code, err)
	}
	if code, out := shell(t, e, "echo alive"); code != 0 || out != "alive\n" {
		t.Errorf("then got %d %q", code, out)
	}
}

func closeEndsCommands(t *testing.T, h host) {
	e := h.start(t, nil)
	r, w := io.Pipe()
	ended := make(chan error)
	go func() {
		_, err := e.Exec(t.Context(), command("echo ready; sleep 1000"), sandbox.Stdio{Stdout: w}, nil)
		ended <- err
	}()
	must.Get(r.Read(make([]byte, 6)))(t)
	go io.Copy(io.Discard, r)
	if _, err := e.Close(t.Context()); err != nil {
		t.Error(err)
	}
	if err := <-ended; err != nil && !errors.Is(err, environment.ErrEnded) {
		t.Errorf("got %v, want ErrEnded or the end by a signal", err)
	}
	if _, err := e.Exec(t.Context(), command("true"), sandbox.Stdio{}, nil); !errors.Is(err, environment.ErrEnded) {
		t.Errorf("got %v, want ErrEnded", err)
	}
	<-e.Ended()
}

// What commands write after SIGTERM arrives, here four windows of a wire, and so does their exit code.
func closeDeliversTheRestOfTheOutput(t *testing.T, h host) {
	e := h.start(t, nil)
	r, w := io.Pipe()
	code := make(chan int, 1)
	go func() {
		n, err := e.Exec(t.Context(), command("trap 'head -c 1048576 /dev/zero; echo; echo last; exit 3' TERM\necho ready\n"+
			"while :; do sleep 0.01; done"), sandbox.Stdio{Stdout: w}, nil)
		w.CloseWithError(err)
		code <- n
	}()
	must.Get(io.ReadFull(r, make([]byte, len("ready\n"))))(t)
	closed := make(chan error, 1)
	go func() {
		_, err := e.Close(t.Context())
		closed <- err
	}()
	got, err := io.ReadAll(r)
	if err != nil || len(got) != 1<<20+len("\nlast\n") || !bytes.HasSuffix(got, []byte("\nlast\n")) {
		t.Errorf("got %d bytes that end in %q, %v; want 1 MiB and the last line", len(got), got[max(0, len(got)-10):], err)
	}
	if n := <-code; n != 3 {
		t.Errorf("got exit code %d, want 3", n)
	}
	if err := <-closed; err != nil {
		t.Error(err)
	}
}

// The exit code of a command whose output nobody reads arrives when the command ends, by its context or by Close.
func unreadOutputDoesNotDelayTheEnd(t *testing.T, h host) {
	e := h.start(t, nil)
	enough := 1 // chunks that fit into pipes, and into the window of a wire
	if h.relayed {
		enough = 5
	}
	unread := func(ctx context.Context, name string) (out *slowWriter, code chan int) {
		out, code = &slowWriter{written: make(chan struct{}), release: make(chan struct{})}, make(chan int, 1)
		go func() {
			n, _ := e.Exec(ctx, command("trap 'exit 3' TERM; n=0; while head -c 65536 /dev/zero; do n=$((n+1)); echo $n > /scratch/"+name+"; done"),
				sandbox.Stdio{Stdout: out}, nil)
			code <- n
		}()
		<-out.written
		must.Hold(t, "no reader delays the command", func() bool {
			n := 0
			_, text := shell(t, e, "cat /scratch/"+name+" 2>&1")
			_, err := fmt.Sscan(text, &n)
			return err == nil && n >= enough
		})
		return out, code
	}
	ctx, cancel := context.WithCancel(t.Context())
	out, code := unread(ctx, "first")
	cancel()
	if n := <-code; n != 3 && n != 137 { // it is killed at once
		t.Errorf("by its context: got exit code %d, want 3 or 137", n)
	}
	close(out.release)
	out, code = unread(t.Context(), "second")
	if _, err := e.Close(context.Background()); err != nil {
		t.Error(err)
	}
	close(out.release)
	if n := <-code; n != 3 {
		t.Errorf("by Close: got exit code %d, want 3", n)
	}
}

// A command ends although another one has taken what there was to read.
func commandsMayShareStdin(t *testing.T, h host) {
	e := h.start(t, nil)
	stdin, w, err := os.Pipe()
	must.Succeed(t, err)
	defer stdin.Close()
	defer w.Close()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	const n = 8
	ended := make(chan error, n)
	for range n {
		go func() {
			_, err := e.Exec(ctx, command("while ! [ -e /scratch/end ]; do sleep 0.01; done"), sandbox.Stdio{Stdin: stdin}, nil)
			ended <- err
		}()
	}
	for range 500 {
		must.Get(w.WriteString("x"))(t)
	}
	shell(t, e, "echo > /scratch/end")
	for range n {
		if err := <-ended; err != nil {
			t.Errorf("got %v, want the end of the command", err)
		}
	}
}

// The stdin of a command blocks, but that of the caller does not: a deadline still ends a Read.
func stdinStaysAsItIs(t *testing.T, h host) {
	e := h.start(t, nil)
	stdin, w, err := os.Pipe()
	must.Succeed(t, err)
	defer stdin.Close()
	defer w.Close()
	var out bytes.Buffer
	spec := command("while read name value; do [ $name = flags: ] && echo $(( (value & 04000) != 0 )); done < /proc/self/fdinfo/0; true")
	if h.relayed {
		spec = command("echo 0") // it has a pipe of its own
	}
	code, err := e.Exec(t.Context(), spec, sandbox.Stdio{Stdin: stdin, Stdout: &out}, nil)
	if err != nil || code != 0 || out.String() != "0\n" {
		t.Errorf("got %d %v, O_NONBLOCK %q; want 0", code, err, out.String())
	}
	conn := must.Get(stdin.SyscallConn())(t) // Fd would change it
	flags := 0
	if controlled := conn.Control(func(fd uintptr) { flags, err = unix.FcntlInt(fd, unix.F_GETFL, 0) }); controlled != nil || err != nil {
		t.Fatal(controlled, err)
	}
	if flags&unix.O_NONBLOCK == 0 {
		t.Error("the caller's stdin blocks now, so neither a deadline nor Close ends a Read")
	}
}

// Threads of the agent count towards the limit of processes.
func endedCommandsLeaveNoThreads(t *testing.T, h host) {
	if h.name != "gvisor" {
		return // the agent is not in /proc
	}
	e := h.start(t, nil)
	var all sync.WaitGroup
	for range 40 {
		all.Go(func() {
			if code, _ := shell(t, e, "echo >> /scratch/started; while [ $(wc -l < /scratch/started) -lt 40 ]; do sleep 0.01; done"); code != 0 {
				t.Errorf("got exit code %d, want 0", code)
			}
		})
	}
	all.Wait()
	var threads int
	_, out := shell(t, e, "grep Threads /proc/$PPID/status")
	if _, err := fmt.Sscanf(out, "Threads: %d", &threads); err != nil || threads > 20 {
		t.Errorf("the agent has %q, want at most 20 threads after 40 commands", out)
	}
}

// The Spec's timeout is the maximum lifetime.
func timeoutEndsTheEnvironment(t *testing.T, h host) {
	e := h.start(t, func(s *sandbox.Spec) { s.Timeout = 500 * time.Millisecond })
	_, err := e.Exec(t.Context(), command("sleep 1000"), sandbox.Stdio{}, nil)
	if !errors.Is(err, environment.ErrEnded) {
		t.Errorf("got %v, want ErrEnded", err)
	}
	result, err := e.Close(t.Context())
	if err != nil || !result.Stopped {
		t.Errorf("got %+v %v, want a stopped run", result, err)
	}
}

// A command that stops the agent does not keep the environment beyond its end, by its timeout or by Close: then it stops
// the agent in response to the end.
func stoppedAgentDoesNotDelayTheEnd(t *testing.T, h host) {
	for name, c := range map[string]struct {
		change func(*sandbox.Spec)
		script string
	}{
		"timeout": {func(s *sandbox.Spec) { s.Timeout = 5 * time.Second }, "trap '' TERM; echo ready; kill -STOP $PPID; echo > /scratch/stopped; sleep 1000"},
		"close":   {nil, "trap 'kill -STOP $PPID; echo > /scratch/stopped' TERM; echo ready; while :; do sleep 0.01; done"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			e, root := h.startIn(t, c.change)
			ended := make(chan error, 1)
			r, w := io.Pipe()
			go func() {
				_, err := e.Exec(context.Background(), command(c.script), sandbox.Stdio{Stdout: w}, nil)
				w.CloseWithError(err)
				ended <- err
			}()
			if _, err := io.ReadFull(r, make([]byte, len("ready\n"))); c.change == nil && err != nil {
				t.Fatal(err)
			}
			if c.change == nil {
				if _, err := e.Close(context.Background()); err != nil {
					t.Error(err)
				}
			}
			<-e.Ended()
			if err := <-ended; !errors.Is(err, environment.ErrEnded) {
				t.Errorf("got %v, want ErrEnded", err)
			}
			if _, err := root.Stat("scratch/stopped"); err != nil && h.name != "qemu" { // which collects no files of a killed run
				t.Errorf("the command did not stop the agent: %v", err)
			}
		})
	}
}

// A process in the background gets SIGTERM and time to end. One that ignores it, in a session of its own, is killed.
func closeEndsBackgroundProcesses(t *testing.T, h host) {
	e, root := h.startIn(t, nil)
	stdin, held, err := os.Pipe()
	must.Succeed(t, err)
	defer held.Close()
	defer stdin.Close()
	script := `mkfifo /scratch/ready
(trap 'sleep 0.3; echo done > /scratch/saved; exit' TERM; echo > /scratch/ready; while :; do sleep 0.01; done) > /dev/null 2>&1 &
cat /scratch/ready
exec 3<&0
setsid sh -c 'trap "" TERM; echo > /scratch/ready; while :; do sleep 1000; done' <&3 > /dev/null 2>&1 &
cat /scratch/ready`
	code, err := e.Exec(t.Context(), command(script), sandbox.Stdio{Stdin: stdin}, nil)
	if err != nil || code != 0 {
		t.Fatalf("got %d %v, want 0", code, err)
	}
	stdin.Close()
	passed := !h.relayed // otherwise a command's stdin ends with it
	if _, err := held.WriteString("x"); passed && err != nil {
		t.Errorf("the process does not have its stdin: %v", err)
	}
	if _, err := e.Close(t.Context()); err != nil {
		t.Error(err)
	}
	if text, err := root.ReadFile("scratch/saved"); err != nil || string(text) != "done\n" {
		t.Errorf("the process in the background left %q, %v; want what it writes after SIGTERM", text, err)
	}
	if _, err := held.WriteString("x"); passed && !errors.Is(err, syscall.EPIPE) {
		t.Errorf("writing to the stdin of the other process: got %v, want EPIPE since it was killed", err)
	}
}

func manyCommandsAtOnce(t *testing.T, h host) {
	e := h.start(t, nil)
	const n = 20
	got := make(chan string, n)
	for range n {
		go func() {
			var out bytes.Buffer
			code, err := e.Exec(t.Context(), command("echo x"), sandbox.Stdio{Stdout: &out}, nil)
			if code != 0 || err != nil {
				out.WriteString("failed")
			}
			got <- out.String()
		}()
	}
	for range n {
		if out := <-got; out != "x\n" {
			t.Errorf("got %q, want x", out)
		}
	}
}

// A command can take over the agent's protocol only for its own environment. Killing it ends the environment.
func killedAgentEndsTheEnvironment(t *testing.T, h host) {
	e := h.start(t, nil)
	_, err := e.Exec(t.Context(), command("kill -9 $PPID; sleep 1000"), sandbox.Stdio{}, nil)
	if !errors.Is(err, environment.ErrEnded) {
		t.Errorf("got %v, want ErrEnded", err)
	}
}

// TestShortageOfFilesFailsTheCommand: when the agent cannot open pipes for another command, only that one fails. The
// agent needs pipes for the command's streams and then one for the start. The limits vary the number of free
// descriptors, so that each of these steps fails.
func TestShortageOfFilesFailsTheCommand(t *testing.T) {
	h := host{"namespaces", func() sandbox.Backend { return namespace.New(namespace.Config{}) }, true}
	for files := int64(40); files < 43; files++ {
		e := h.start(t, func(s *sandbox.Spec) { s.Limits.OpenFiles = files })
		var waiting sync.WaitGroup
		ctx, cancel := context.WithCancel(t.Context())
		got := ""
		for n := 0; n < 40 && got == ""; n++ {
			read, write := io.Pipe()
			ended := make(chan string, 1)
			waiting.Go(func() {
				var stderr bytes.Buffer
				code, err := e.Exec(ctx, command("echo started; exec sleep 1000"), sandbox.Stdio{Stdout: write, Stderr: &stderr}, nil)
				ended <- fmt.Sprintf("%d, %v: %s", code, err, &stderr)
				write.Close()
			})
			if line, _ := bufio.NewReader(read).ReadString('\n'); line == "" {
				got = <-ended
			}
		}
		if !strings.HasPrefix(got, "126, <nil>: cloister: ") {
			t.Errorf("%d files: got %q, want the exit code 126 and a reason", files, got)
		}
		cancel()
		waiting.Wait()
		if code, out := shell(t, e, "echo works"); code != 0 || out != "works\n" {
			t.Errorf("%d files: got %d, %q from the next command, want it to work", files, code, out)
		}
	}
}

func TestWrongProgramIsExplained(t *testing.T) {
	for _, kernel := range []string{"", "another"} {
		_, err := environment.Start(t.Context(), &sandbox.Features{Kernel: kernel}, func(context.Context, sandbox.Stdio) (*sandbox.Result, error) {
			return &sandbox.Result{ExitCode: 127}, nil
		})
		if err == nil || !strings.Contains(err.Error(), "exit code 127") {
			t.Errorf("kernel %q: got %v, want exit code 127", kernel, err)
		}
	}
}

// TestTimeoutBeforeTheStartIsExplained: it is not the program's fault, unless the run was stopped for what the program
// sent.
func TestTimeoutBeforeTheStartIsExplained(t *testing.T) {
	for _, kernel := range []string{"", "another"} {
		_, err := environment.Start(t.Context(), &sandbox.Features{Kernel: kernel}, func(context.Context, sandbox.Stdio) (*sandbox.Result, error) {
			return &sandbox.Result{ExitCode: 137, Stopped: true}, nil
		})
		if !errors.Is(err, environment.ErrEnded) || !strings.Contains(err.Error(), "its timeout is too short") {
			t.Errorf("kernel %q: got %v, want ErrEnded and that the timeout is too short", kernel, err)
		}
	}
	_, err := environment.Start(t.Context(), &sandbox.Features{}, func(ctx context.Context, std sandbox.Stdio) (*sandbox.Result, error) {
		_ = must.Get(std.Stdin.WriteString("not the protocol"))(t)
		<-ctx.Done()
		return &sandbox.Result{ExitCode: 137, Stopped: true}, nil
	})
	if err == nil || errors.Is(err, environment.ErrEnded) || !strings.Contains(err.Error(), "exit code 137") {
		t.Errorf("another program: got %v, want exit code 137", err)
	}
}
