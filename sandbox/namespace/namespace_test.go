// SPDX-License-Identifier: Apache-2.0

//go:build linux

package namespace_test

import (
	"bufio"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/sandbox/namespace"
	"github.com/cloister-build/cloister/sandbox/sandboxtest"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
	"golang.org/x/sys/unix"
)

// holdVariable makes the test binary a worker that only holds a run, for a test that kills it.
const holdVariable = "CLOISTER_TEST_HOLD"

func TestMain(m *testing.M) {
	namespace.Init()
	if words := os.Getenv(insideVariable); words != "" {
		inside(words)
		return
	}
	if mark := os.Getenv(churnVariable); mark != "" {
		churn(mark)
	}
	if mark := os.Getenv(holdVariable); mark != "" {
		hold(mark)
		return
	}
	if denied := os.Getenv(deniedVariable); denied != "" {
		probeDenied(denied)
		return
	}
	if os.Getenv(starveVariable) != "" {
		starve()
		return
	}
	// What a careless parent leaves behind: an open descriptor and ignored signals.
	if _, err := unix.FcntlInt(os.Stderr.Fd(), unix.F_DUPFD, 200); err != nil {
		panic(err)
	}
	signal.Ignore(syscall.SIGINT, syscall.SIGQUIT, syscall.SIGUSR1, syscall.SIGTSTP, syscall.SIGTTOU)
	if _, err := unix.KeyctlInt(unix.KEYCTL_JOIN_SESSION_KEYRING, 0, 0, 0, 0); err == nil {
		// A login session has a key.
		_, _ = unix.AddKey("user", "cloister-test", []byte("secret"), unix.KEY_SPEC_SESSION_KEYRING)
	}
	// The tests wait more than they compute.
	flag.Parse()
	if err := flag.Set("test.parallel", strconv.Itoa(max(4, runtime.NumCPU()))); err != nil {
		panic(err)
	}
	os.Exit(m.Run())
}

func TestBackend(t *testing.T) {
	t.Parallel()
	sandboxtest.TestBackend(t, func() sandbox.Backend {
		config := namespace.Config{Source: map[string]string{os.TempDir(): os.TempDir()}}
		if os.Getenv(attachedVariable) != "" {
			return namespace.NewAttached(config)
		}
		return namespace.New(config)
	})
}

// TestZeroBackendFails: a Backend that New did not make returns an error from every method and touches no descriptor.
func TestZeroBackendFails(t *testing.T) {
	t.Parallel()
	var b namespace.Backend
	spec := &sandbox.Spec{Args: []string{"/bin/true"}, Dir: "/", Limits: sandboxtest.Limits()}
	for name, call := range map[string]func() error{
		"Probe":     func() error { _, err := b.Probe(t.Context()); return err },
		"Run":       func() error { _, err := b.Run(t.Context(), spec, sandbox.Stdio{}); return err },
		"Workspace": func() error { _, err := b.Workspace(t.Context(), 1<<20, 10); return err },
		"Mount":     func() error { _, err := b.Mount(t.Context(), nil, nil); return err },
		"Close":     b.Close,
	} {
		if err := call(); err == nil || !strings.Contains(err.Error(), "make one with New") {
			t.Errorf("%s: got %v, want an error that names New", name, err)
		}
	}
}

// TestConfigIsCopied: changing a Config after New changes no backend.
func TestConfigIsCopied(t *testing.T) {
	t.Parallel()
	without := []namespace.Layer{namespace.HiddenPaths}
	b := namespace.New(namespace.Config{Without: without})
	defer b.Close()
	without[0] = namespace.Landlock
	f, err := b.Probe(t.Context())
	if err != nil {
		sandboxtest.Unavailable(t, "namespaces", err)
	}
	if !slices.ContainsFunc(f.Checks, func(c sandbox.Check) bool { return c.Name == string(namespace.HiddenPaths) && !c.OK }) {
		t.Errorf("got checks %+v, want %s left out", f.Checks, namespace.HiddenPaths)
	}
}

func TestNilImageIsRefused(t *testing.T) {
	t.Parallel()
	b := namespace.New(namespace.Config{})
	defer b.Close()
	if _, err := b.Mount(t.Context(), nil, nil); !errors.Is(err, sandbox.ErrSpec) {
		t.Errorf("got error %v, want ErrSpec", err)
	}
}

// unprivilegedUser owns nothing.
const unprivilegedUser = 63210

// TestBackendUnprivileged runs the contract as an ordinary user, in another process.
func TestBackendUnprivileged(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("TestBackend already runs as an ordinary user")
	}
	dir, err := os.MkdirTemp("", "cloister-unprivileged-")
	must.Succeed(t, err)
	defer os.RemoveAll(dir)
	must.Succeed(t, os.Chown(dir, unprivilegedUser, unprivilegedUser))
	self := filepath.Join(dir, "namespace.test")
	copyExecutable(t, self)
	t.Parallel() // not before: a child forked meanwhile would keep the copy open for writing
	args := []string{"-test.run=^Test(Backend|RunsDieWithTheirZygote|FortyRunsAtOnce|NothingAccumulates|LimitsThatNobodyCanKeep|HiddenDirectory|KernelsThatLackALayer|NetworkIsKeptOnlyUnused|Lookups|SocketsInFlightAreGone|TemplateKeepsNothing|BasesDoNotMix|KilledSlotLosesItsRunAlone|IdleProcessesDie|LongCommandLines|TimedWaitsEnd|FilesHaveTheTimeOfTheRun|HeldFilesAreOfOneSecond|DirectoriesListInAnotherOrder|ListingFailsAsUsual|OthersOwnInputs|SeedsGiveNothingTwice|ConditionsHoldOrTheRunFails|ConditionsEndInTheirSlot|MissingControlGroupsHaveACode)$", "-test.timeout=15m", "-test.v"}
	cmd := exec.CommandContext(t.Context(), self, args...)
	cmd.Dir = dir
	// That user lacks control groups.
	require := strings.NewReplacer("unprivileged", "namespaces", "limits", "").Replace(os.Getenv("CLOISTER_REQUIRE"))
	cmd.Env = []string{"TMPDIR=" + dir, "HOME=" + dir, "PATH=/usr/bin:/bin", "CLOISTER_REQUIRE=" + require}
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: unprivilegedUser, Gid: unprivilegedUser}}
	out, err := cmd.CombinedOutput()
	t.Logf("%s", out)
	must.Be(t, err == nil, "as user %d: %v", unprivilegedUser, err)
	if strings.Contains(string(out), "--- SKIP: TestBackend ") {
		sandboxtest.Unavailable(t, "unprivileged", "ordinary users have no sandbox here")
	}
	must.Be(t, !strings.Contains(string(out), "no tests to run") && strings.Contains(string(out), "PASS"),
		"the contract did not run")
}

func copyExecutable(t *testing.T, to string) {
	t.Helper()
	src := must.Get(os.Open("/proc/self/exe"))(t)
	defer src.Close()
	dst := must.Get(os.OpenFile(to, os.O_CREATE|os.O_WRONLY|os.O_EXCL, 0o755))(t)
	if _, err := io.Copy(dst, src); err != nil {
		t.Fatal(err)
	}
	must.Succeed(t, dst.Close())
}

// programs returns the host's programs and their libraries.
func programs() (all []sandbox.Input) {
	for _, dir := range []string{"/usr", "/bin", "/lib", "/lib64"} {
		if src, err := filepath.EvalSymlinks(dir); err == nil {
			all = append(all, sandbox.Input{Target: dir, Content: "host", Source: src})
		}
	}
	return all
}

// hold runs a command that would outlive its worker if it could.
func hold(mark string) {
	b := namespace.New(namespace.Config{})
	_, err := b.Run(timeless{}, &sandbox.Spec{
		Args:   []string{"/bin/sh", "-c", fmt.Sprintf("trap '' TERM HUP; echo started; setsid sleep %[1]s & sleep %[1]s", mark)},
		Dir:    "/usr",
		Env:    []string{"PATH=/usr/bin:/bin"},
		Inputs: programs(),
		Limits: sandboxtest.Limits(),
	}, sandbox.Stdio{Stdout: os.Stdout})
	fmt.Println("ended:", err)
}

// timeless is a context that never ends.
type timeless struct{}

func (timeless) Deadline() (time.Time, bool) { return time.Time{}, false }
func (timeless) Done() <-chan struct{}       { return nil }
func (timeless) Err() error                  { return nil }
func (timeless) Value(any) any               { return nil }

// starveVariable makes the test binary a worker with too few descriptors.
const starveVariable = "CLOISTER_TEST_STARVE"

func starve() {
	b := namespace.New(namespace.Config{})
	if _, err := b.Probe(timeless{}); err != nil {
		panic(err)
	}
	usr := programs()
	var failed atomic.Int32
	for few := uint64(150); few < 400; few += 10 {
		if err := syscall.Setrlimit(syscall.RLIMIT_NOFILE, &syscall.Rlimit{Cur: few, Max: 1000}); err != nil {
			panic(err)
		}
		var all sync.WaitGroup
		for range 24 {
			all.Go(func() {
				_, err := b.Run(timeless{}, &sandbox.Spec{
					Args: []string{"/bin/sleep", "0.1"}, Dir: "/usr", Inputs: usr, Limits: sandboxtest.Limits(),
				}, sandbox.Stdio{})
				if err != nil {
					failed.Add(1)
				}
			})
		}
		all.Wait()
	}
	fmt.Println("all ended,", failed.Load(), "failed")
}

// TestRunsEndWithoutDescriptors: a worker without free descriptors loses runs but never waits forever.
func TestRunsEndWithoutDescriptors(t *testing.T) {
	t.Parallel()
	if _, err := namespace.New(namespace.Config{}).Probe(t.Context()); err != nil {
		sandboxtest.Unavailable(t, "namespaces", err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, "/proc/self/exe")
	cmd.Env = append(os.Environ(), starveVariable+"=yes")
	out, err := cmd.CombinedOutput()
	if err != nil || !strings.Contains(string(out), "all ended") || strings.Contains(string(out), " 0 failed") {
		t.Errorf("got %q, %v", out, err)
	}
}

func TestRunDiesWithItsWorker(t *testing.T) {
	t.Parallel()
	if _, err := namespace.New(namespace.Config{}).Probe(t.Context()); err != nil {
		sandboxtest.Unavailable(t, "namespaces", err)
	}
	mark := fmt.Sprintf("4%d.5", os.Getpid())
	cmd := exec.CommandContext(t.Context(), "/proc/self/exe")
	cmd.Env = append(os.Environ(), holdVariable+"="+mark)
	stdout := must.Get(cmd.StdoutPipe())(t)
	must.Succeed(t, cmd.Start())
	if line, err := bufio.NewReader(stdout).ReadString('\n'); err != nil || line != "started\n" {
		t.Fatalf("the run did not start: %q, %v", line, err)
	}
	alive := func() []string { return sandboxtest.Running(t, "sleep\x00"+mark) }
	must.Hold(t, "the run starts its processes", func() bool { return len(alive()) == 2 })
	must.Succeed(t, cmd.Process.Kill())
	_ = cmd.Wait() // reports the kill
	must.Hold(t, "the run ends with its worker", func() bool { return len(alive()) == 0 })
}

func TestBackendSurvivesItsZygote(t *testing.T) {
	t.Parallel()
	b := namespace.New(namespace.Config{})
	defer b.Close()
	if _, err := b.Probe(t.Context()); err != nil {
		sandboxtest.Unavailable(t, "namespaces", err)
	}
	r := sandboxtest.Run{Script: "exit 3"}
	r.Do(t, b)
	must.Succeed(t, b.KillZygote())
	r.Do(t, b)
	expect.That(t, r.Result.ExitCode == 3, "got exit code %d, want 3", r.Result.ExitCode)
}
