// SPDX-License-Identifier: Apache-2.0

package jobobject

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
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/sandbox/sandboxtest"
	"github.com/cloister-build/cloister/tests/must"
	"golang.org/x/sys/windows"
)

// TestMain is also the program of the runs: its arguments say what it does.
func TestMain(m *testing.M) {
	if len(os.Args) < 2 || strings.HasPrefix(os.Args[1], "-test.") {
		os.Exit(m.Run())
	}
	switch args := os.Args[1:]; args[0] {
	case "report": // the environment, whether it is an administrator, and files in both writable directories
		sid, err := windows.CreateWellKnownSid(windows.WinBuiltinAdministratorsSid)
		admin := false
		if err == nil {
			admin, err = windows.Token(0).IsMember(sid)
		}
		wd, wdErr := os.Getwd()
		fmt.Println(admin, errors.Join(err, wdErr, os.WriteFile("out.txt", []byte("made"), 0o600), os.WriteFile(filepath.Join(os.Getenv("TMPDIR"), "t"), nil, 0o600)))
		fmt.Println(wd)
		fmt.Println(strings.Join(os.Environ(), "\n"))
		os.Exit(7)
	case "children": // two generations that sleep; their process IDs
		child := exec.Command(os.Args[0], "sleep") // the job ends it
		child.Stdout = os.Stdout
		if err := child.Start(); err != nil {
			fmt.Println(err)
		}
		if len(args) > 1 {
			time.Sleep(time.Hour)
		}
		fmt.Println(os.Getpid())
	case "sleep":
		fmt.Println(os.Getpid())
		time.Sleep(time.Hour)
	case "worker": // runs itself and is killed
		b := New()
		spec, _ := newSpec(b, "sleep")
		_, err := b.Run(context.Background(), spec, sandbox.Stdio{Stdout: os.Stdout})
		fmt.Println(err)
	case "spin":
		for time.Now().Unix() > 0 { // the limit ends it
		}
	case "allocate":
		var all [][]byte
		for range 64 {
			all = append(all, bytes.Repeat([]byte{1}, 16<<20))
		}
		fmt.Println(len(all))
	case "change":
		fmt.Println(errors.Join(os.Chmod("input", 0o600), os.WriteFile("input", []byte("changed"), 0o600)))
	case "fill": // the file is named below the working directory without changes to its name
		if wd, err := os.Getwd(); err == nil {
			_ = os.WriteFile(`\\?\`+wd+`\`+args[1], make([]byte, 2<<20), 0o600)
		}
		time.Sleep(time.Hour)
	}
}

// newSpec returns a Spec that runs this program in a new workspace.
func newSpec(b sandbox.Backend, args ...string) (*sandbox.Spec, sandbox.Workspace) {
	self, err := os.Executable()
	if err != nil {
		panic(err)
	}
	ws, err := b.Workspace(context.Background(), sandbox.Unlimited, sandbox.Unlimited)
	if err != nil {
		panic(err)
	}
	limits := sandbox.DefaultLimits()
	limits.OpenFiles = sandbox.Unlimited
	return &sandbox.Spec{
		Args: append([]string{self}, args...), Dir: "/build", Env: []string{"A=b", "TMPDIR=/tmp"},
		Outputs: []sandbox.Output{{Target: "/build", Source: "out"}}, Temp: []sandbox.Temp{{Target: "/tmp", Bytes: 1 << 20}},
		Network: sandbox.Network{Loopback: true, Listen: true}, Limits: limits, Audit: sandbox.AuditOff, Accept: Name, Workspace: ws.Name(),
	}, ws
}

func newBackend(t *testing.T) sandbox.Backend {
	b := New()
	t.Cleanup(func() {
		err := b.Close()
		if wine() && errors.Is(err, windows.ERROR_INVALID_FUNCTION) {
			t.Logf("Wine before version 9 cannot remove files by descriptor: %v", err)
			return
		}
		must.Succeed(t, err)
	})
	return b
}

// wine reports whether this is Wine, which lacks some parts of Windows.
func wine() bool {
	return windows.NewLazySystemDLL("ntdll.dll").NewProc("wine_get_version").Find() == nil
}

// runSpec runs spec and returns its result and stdout.
func runSpec(t *testing.T, b sandbox.Backend, spec *sandbox.Spec) (*sandbox.Result, string) {
	t.Helper()
	var out bytes.Buffer
	return must.Get(b.Run(t.Context(), spec, sandbox.Stdio{Stdout: &out, Stderr: &out}))(t), out.String()
}

func TestProbe(t *testing.T) {
	f, err := newBackend(t).Probe(t.Context())
	if err != nil || f.Backend != Name || f.Tier != "unconfined" || len(f.Gaps) == 0 || !f.Checks[0].OK {
		t.Errorf("got %+v, %v", f, err)
	}
}

// tempOf returns the temporary directory of an environment.
func tempOf(env []string) string {
	for _, kv := range env {
		if dir, ok := strings.CutPrefix(kv, "TMPDIR="); ok {
			return dir
		}
	}
	return ""
}

func TestRunHasItsFilesAndNoRights(t *testing.T) {
	t.Setenv("OF_THE_WORKER", "secret")
	b := newBackend(t)
	spec, ws := newSpec(b, "report")
	res, out := runSpec(t, b, spec)
	if res.ExitCode != 7 || res.Stopped || res.Exceeded != nil || !res.Released {
		t.Errorf("got %+v, want exit code 7", res)
	}
	lines := strings.Split(strings.ReplaceAll(strings.TrimSpace(out), "\r", ""), "\n")
	if len(lines) < 5 || lines[0] != "false <nil>" || lines[1] != filepath.Join(ws.Name(), "out") {
		t.Fatalf("got %q, want no administrator, no error, and the output as working directory", lines)
	}
	env := lines[2:]
	if !slices.Contains(env, "A=b") || !slices.Contains(env, "TMPDIR="+filepath.Join(filepath.Dir(ws.Name()), filepath.Base(tempOf(env)))) ||
		slices.Contains(env, "OF_THE_WORKER=secret") {
		t.Errorf("the environment is %q", env)
	}
	if text, err := ws.Root().ReadFile("out/out.txt"); err != nil || string(text) != "made" {
		t.Errorf("the output is %q, %v", text, err)
	}
}

// ended returns a channel that is closed when the process has ended.
func ended(t *testing.T, pid string) <-chan error {
	t.Helper()
	end := make(chan error, 1)
	h, err := windows.OpenProcess(windows.SYNCHRONIZE, false, uint32(must.Get(strconv.Atoi(strings.TrimSpace(pid)))(t)))
	if err != nil { // it has
		end <- nil
		return end
	}
	go func() {
		defer windows.CloseHandle(h)
		_, err := windows.WaitForSingleObject(h, windows.INFINITE)
		end <- err
	}()
	return end
}

func TestNoProcessOutlivesTheRun(t *testing.T) {
	b := newBackend(t)
	for _, args := range [][]string{{"children"}, {"children", "and wait"}} {
		spec, _ := newSpec(b, args...)
		read, write := io.Pipe()
		pid := make(chan string, 1)
		ctx, cancel := context.WithCancel(t.Context())
		go func() {
			s := bufio.NewScanner(read)
			for s.Scan() {
				select {
				case pid <- s.Text(): // of the child or the parent
				default:
				}
				if len(args) > 1 {
					cancel()
				}
			}
		}()
		res := must.Get(b.Run(ctx, spec, sandbox.Stdio{Stdout: write}))(t)
		write.Close()
		cancel()
		if res.Stopped != (len(args) > 1) {
			t.Errorf("%q: got %+v", args, res)
		}
		if len(args) > 1 && res.ExitCode != exitKilled {
			t.Errorf("%q: the exit code is %d, want %d", args, res.ExitCode, exitKilled)
		}
		must.Succeed(t, <-ended(t, <-pid))
	}
}

func TestNoProcessOutlivesTheWorker(t *testing.T) {
	worker := exec.CommandContext(t.Context(), must.Get(os.Executable())(t), "worker")
	out := must.Get(worker.StdoutPipe())(t)
	must.Succeed(t, worker.Start())
	pid := must.Get(bufio.NewReader(out).ReadString('\n'))(t)
	end := ended(t, pid)
	select {
	case <-end:
		t.Fatalf("%q ended early", pid)
	default:
	}
	must.Succeed(t, worker.Process.Kill())
	must.Succeed(t, <-end)
	_ = worker.Wait() // it was killed
}

func TestTimeoutStopsTheRun(t *testing.T) {
	b := newBackend(t)
	spec, _ := newSpec(b, "sleep")
	spec.Timeout = time.Millisecond
	if res, _ := runSpec(t, b, spec); !res.Stopped || res.ExitCode != exitKilled {
		t.Errorf("got %+v, want it to be stopped", res)
	}
}

func TestOutputsAreLimited(t *testing.T) {
	outputsAreLimited(t, "big", "big.", "big ")
}

func outputsAreLimited(t *testing.T, names ...string) {
	b := newBackend(t)
	for _, name := range names {
		spec, _ := newSpec(b, "fill", name)
		spec.Limits.OutputBytes, spec.Timeout = 1<<20, time.Minute
		if res, _ := runSpec(t, b, spec); res.Exceeded == nil || res.Exceeded.Subject != string(sandbox.LimitOutputBytes) {
			t.Errorf("%q: got %+v, want the limit of output bytes", name, res)
		}
	}
}

// TestStreamsAreLimited needs Windows itself: Wine has no streams.
func TestStreamsAreLimited(t *testing.T) {
	if wine() {
		sandboxtest.Unavailable(t, "windows", "Wine has no streams of files")
	}
	outputsAreLimited(t, "file:stream")
}

func TestChangedInputIsAnError(t *testing.T) {
	b := newBackend(t)
	spec, ws := newSpec(b, "change")
	must.Succeed(t, ws.Root().WriteFile("source", []byte("content"), 0o400))
	spec.Inputs = []sandbox.Input{{Target: "/build/input", Content: "c", Source: "source"}}
	res, err := b.Run(t.Context(), spec, sandbox.Stdio{})
	if err == nil || !strings.Contains(err.Error(), "the run changed its input") {
		t.Errorf("got %+v, %v, want an error", res, err)
	}
}

func TestMissingProgram(t *testing.T) {
	b := newBackend(t)
	spec, _ := newSpec(b)
	spec.Args = []string{"missing"}
	if res, out := runSpec(t, b, spec); res.ExitCode != 127 || !strings.Contains(out, "missing: not found") {
		t.Errorf("got %+v, %q", res, out)
	}
	spec, ws := newSpec(b)
	must.Succeed(t, errors.Join(ws.Root().Mkdir("out", 0o700), ws.Root().WriteFile("out/text.exe", []byte("no program"), 0o700)))
	spec.Args = []string{"/build/text.exe"}
	if res, out := runSpec(t, b, spec); res.ExitCode != 126 {
		t.Errorf("a text as program: got %+v, %q, want exit code 126", res, out)
	}
}

// TestWhatIsLackingIsRefused: nothing of a Spec is ignored, and nothing runs without protection unless it accepts that.
func TestWhatIsLackingIsRefused(t *testing.T) {
	b := newBackend(t)
	for name, change := range map[string]func(*sandbox.Spec){
		"gaps":             func(s *sandbox.Spec) { s.Accept = "" },
		"no network":       func(s *sandbox.Spec) { s.Network = sandbox.Network{} },
		"no listening":     func(s *sandbox.Spec) { s.Network.Listen = false },
		"endpoint":         func(s *sandbox.Spec) { s.Network.Allow = []sandbox.Endpoint{{Host: "example.org", Port: 443}} },
		"root":             func(s *sandbox.Spec) { s.Root = &sandbox.Root{Image: "i", Source: "."} },
		"output at /":      func(s *sandbox.Spec) { s.Outputs[0].Target = "/" },
		"superuser":        func(s *sandbox.Spec) { s.Superuser = true },
		"open files":       func(s *sandbox.Spec) { s.Limits.OpenFiles = 100 },
		"processors":       func(s *sandbox.Spec) { s.Limits.MilliCPUs = 500 },
		"disk rate":        func(s *sandbox.Spec) { s.Limits.DiskRate = 1 << 20 },
		"audit":            func(s *sandbox.Spec) { s.Audit = sandbox.AuditViolations },
		"kill":             func(s *sandbox.Spec) { s.Kill = []sandbox.EventKind{sandbox.EventLimit} },
		"host name":        func(s *sandbox.Spec) { s.Conditions.Hostname = "other" },
		"input elsewhere":  func(s *sandbox.Spec) { s.Inputs = []sandbox.Input{{Target: "/other", Content: "c", Source: "d"}} },
		"socket":           func(s *sandbox.Spec) { s.Sockets = []sandbox.Input{{Target: "/tmp/s", Content: "c", Source: "s"}} },
		"directory inside": func(s *sandbox.Spec) { s.Inputs = []sandbox.Input{{Target: "/build/d", Content: "c", Source: "d"}} },
	} {
		spec, ws := newSpec(b, "report")
		must.Succeed(t, ws.Root().Mkdir("d", 0o700))
		change(spec)
		if _, err := b.Run(t.Context(), spec, sandbox.Stdio{}); !errors.Is(err, sandbox.ErrUnsupported) {
			t.Errorf("%s: got %v, want ErrUnsupported", name, err)
		}
	}
}

// TestLimitsOfTheJob needs Windows itself: Wine accepts these limits and does not enforce them.
func TestLimitsOfTheJob(t *testing.T) {
	if wine() {
		sandboxtest.Unavailable(t, "windows", "Wine does not enforce limits of jobs")
	}
	b := newBackend(t)
	for _, c := range []struct {
		program string
		limit   sandbox.Limit
		value   int64
	}{
		{"spin", sandbox.LimitCPU, int64(time.Second)},
		{"allocate", sandbox.LimitMemory, 256 << 20},
	} {
		spec, _ := newSpec(b, c.program)
		spec.Limits.Set(c.limit, c.value)
		if res, out := runSpec(t, b, spec); res.Exceeded == nil || res.Exceeded.Subject != string(c.limit) {
			t.Errorf("%s: got %+v, %s", c.program, res, out)
		}
	}
	spec, _ := newSpec(b, "children")
	spec.Limits.Processes = 1
	if res, out := runSpec(t, b, spec); len(res.Events) != 1 || res.Events[0].Subject != string(sandbox.LimitProcesses) {
		t.Errorf("got %+v, %s, want an event for the limit of processes", res, out)
	}
}
