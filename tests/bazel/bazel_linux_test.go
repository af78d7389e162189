// SPDX-License-Identifier: Apache-2.0

// Package bazel_test builds the example with a real Bazel and a real cloister serve. It checks what a user at the
// terminal sees, and the store afterwards.
package bazel_test

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"os"
	"os/user"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/cloister-build/cloister/sandbox/sandboxtest"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/internal/bazelrun"
	"github.com/cloister-build/cloister/tests/internal/loopback"
	"github.com/cloister-build/cloister/tests/internal/program"
	"github.com/cloister-build/cloister/tests/must"
)

// Time limits for one call of Bazel and one start of serve.
const (
	bazelTime = time.Hour
	serveTime = 5 * time.Minute
)

// all compares the stable hashes of all actions.
var all = flag.Bool("all", false, "build the whole example as the second user, not a part of it")

// built is the compiled program, which other users may execute.
var built program.Program

func TestMain(m *testing.M) { os.Exit(built.Main(m)) }

// A rig is a serve, and a Bazel that builds a copy of the example with it.
type rig struct {
	*bazelrun.Bazel
	server *bazelrun.Server
	config bazelrun.ServerConfig
}

// newRig starts both as user, or as the current user if that is nil; they end with the test.
func newRig(t *testing.T, user *syscall.Credential) *rig {
	t.Helper()
	if err := bazelrun.Find(); err != nil {
		sandboxtest.Unavailable(t, "bazel", err)
	}
	dir := must.Get(bazelrun.TempDir(user))(t)
	t.Cleanup(func() { must.Succeed(t, bazelrun.Remove(dir)) })
	cloister := built.Path(t)
	if err := bazelrun.Confines(t.Context(), cloister, user); err != nil {
		what := "namespaces"
		if user != nil {
			what = "unprivileged"
		}
		sandboxtest.Unavailable(t, what, err)
	}
	address := must.Get(loopback.Address())(t)
	r := &rig{
		Bazel: &bazelrun.Bazel{
			Workspace: filepath.Join(dir, "workspace"), Root: filepath.Join(dir, "bazel"),
			User: user, Log: t.Output(),
		},
		config: bazelrun.ServerConfig{
			Binary: cloister, Dir: filepath.Join(dir, "store"), Home: filepath.Join(dir, "home"),
			Listen: address, User: user, Log: t.Output(),
		},
	}
	must.Succeed(t, bazelrun.CopyWorkspace(r.Workspace, "../.."))
	r.config.Args = []string{"--source-tree", r.Workspace}
	for _, d := range []string{r.Root, r.config.Home} {
		must.Succeed(t, os.Mkdir(d, 0o755))
		if user != nil {
			must.Succeed(t, os.Chown(d, int(user.Uid), int(user.Gid)))
		}
	}
	r.serve(t)
	t.Cleanup(func() { must.Succeed(t, errors.Join(r.Shutdown(), r.server.Stop())) })
	return r
}

// serve starts the server at its address.
func (r *rig) serve(t *testing.T) {
	t.Helper()
	ctx, cancel := context.WithTimeoutCause(t.Context(), serveTime, errors.New("time limit exceeded"))
	defer cancel()
	server := must.Get(bazelrun.StartServer(ctx, r.config))(t)
	r.server = server
	r.Endpoint = server.Addr
}

// bazel runs Bazel and returns its build, successful or not.
func (r *rig) bazel(t *testing.T, verb string, args ...string) *bazelrun.Build {
	t.Helper()
	ctx, cancel := context.WithTimeoutCause(t.Context(), bazelTime, errors.New("time limit exceeded"))
	defer cancel()
	return must.Get(r.Run(ctx, verb, args...))(t)
}

// blobs verifies the store and returns its number of blobs and results.
func (r *rig) blobs(t *testing.T) int {
	t.Helper()
	n := must.Get(bazelrun.Verify(t.Context(), r.config))(t)
	must.Be(t, n != 0, "the store is empty")
	return n
}

// wantAll checks that the build or test succeeded and that all its actions are of one kind.
func wantAll(t *testing.T, build *bazelrun.Build, kind string) {
	t.Helper()
	must.Be(t, build.ExitCode == 0, "bazel: exit %d, want 0", build.ExitCode)
	counts := build.Processes()
	expect.That(t, counts[kind] != 0, "got processes %v, want some of kind %q", counts, kind)
	for other := range counts {
		// Internal actions execute nothing: they write a file that Bazel already knows.
		expect.That(t, other == kind || other == "internal",
			"got processes %v, want only %q and internal", counts, kind)
	}
}

func TestExampleBuildsAndIsCached(t *testing.T) {
	t.Parallel()
	r := newRig(t, nil)
	var remote int
	var executed map[string]ran
	step := func(name string, f func(t *testing.T)) {
		if !t.Run(name, f) {
			t.FailNow() // the next step builds on this one
		}
	}
	step("everything is built and tested remotely", func(t *testing.T) {
		build := r.bazel(t, "test", "//examples/...")
		wantAll(t, build, "remote")
		remote = build.Processes()["remote"]
		passed := regexp.MustCompile(`(?m)^//examples/\S+ +PASSED`).FindAllString(build.Output, -1)
		expect.That(t, len(passed) >= 20, "got %d passed tests, want at least 20", len(passed))
		r.wantNoEvents(t)
		if executed = r.executed(t); len(executed) != remote {
			t.Errorf("got %d executed actions in the history, want %d", len(executed), remote)
		}
	})
	t.Run("one action of each kind is reproducible", func(t *testing.T) { r.wantReproducible(t, executed) })
	step("after clean everything is a remote cache hit", func(t *testing.T) {
		ctx, cancel := context.WithTimeout(t.Context(), bazelTime)
		defer cancel()
		must.Succeed(t, r.Clean(ctx))
		build := r.bazel(t, "test", "//examples/...")
		wantAll(t, build, "remote cache hit")
		expect.Equal(t, build.Processes()["remote cache hit"], remote,
			"remote cache hits (the number of executed actions)")
	})
	before := r.blobs(t)
	t.Run("a failing test shows its log", func(t *testing.T) { testFailureShowsLog(t, r) })
	t.Run("a sleeping test times out and leaves no process", func(t *testing.T) { testTimeout(t, r) })
	t.Run("hostile genrules fail", func(t *testing.T) { testHostile(t, r) })
	t.Run("the store keeps its blobs", func(t *testing.T) {
		if after := r.blobs(t); after < before {
			t.Errorf("got %d blobs, want at least the previous %d", after, before)
		}
	})
	t.Run("an unprivileged user builds and is confined", func(t *testing.T) { testUnprivileged(t, r, executed) })
}

func testFailureShowsLog(t *testing.T, r *rig) {
	build := r.bazel(t, "test", "//examples/hostile:fails_test")
	expect.Equal(t, build.ExitCode, 3, "bazel: exit")
	for _, want := range []string{"examples/hostile/fails_test.cc:6: 6 * 9: got 54, want 42", "fails_test   "} {
		expect.Text(t, build.Output, want, "output")
	}
}

func testTimeout(t *testing.T, r *rig) {
	// A machine that stalls may need a longer timeout to get that far.
	for timeout := 3; !testTimeoutOf(t, r, timeout); timeout *= 6 {
		must.Be(t, timeout <= 100, "the test never began")
	}
}

// testTimeoutOf lets a test run into a timeout in seconds, and reports whether it began before.
func testTimeoutOf(t *testing.T, r *rig, timeout int) bool {
	token := fmt.Sprintf("cloister-sleeper-%d-%d", os.Getpid(), time.Now().UnixNano())
	processes := func() []string { return sandboxtest.Running(t, "\x00"+token+"\x00") } // a whole argument: not Bazel
	ctx, cancel := context.WithCancel(t.Context())
	seen := make(chan bool)
	go func() {
		found := false
		for ctx.Err() == nil && !found {
			found = len(processes()) > 0
			time.Sleep(20 * time.Millisecond)
		}
		seen <- found
	}()
	build := r.bazel(t, "test", "//examples/hostile:sleeps_test",
		fmt.Sprint("--test_timeout=", timeout), "--test_env=HOSTILE_TOKEN="+token)
	left := processes()
	cancel()
	expect.That(t, len(left) == 0, "got live processes %v of the test, want none", left)
	expect.Equal(t, build.ExitCode, 3, "bazel: exit")
	expect.That(t, strings.Contains(build.Output, "TIMEOUT"), "output does not contain TIMEOUT")
	// Only the absence of a process that was seen proves something.
	return <-seen && strings.Contains(build.Output, "sleeping as "+token)
}

func testHostile(t *testing.T, r *rig) {
	listener := must.Get(net.Listen("tcp4", "127.0.0.1:0"))(t)
	defer listener.Close()
	var accepted atomic.Int32
	go func() {
		for {
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			accepted.Add(1)
			fmt.Fprintln(conn, "a secret of this network")
			conn.Close()
		}
	}()
	for _, c := range []struct{ target, why string }{
		{"connects", `Connection refused`},
		{"writes_input", `Read-only file system|Permission denied`},
		{"links_input", `cross-device|not permitted|Read-only file system|Permission denied|Value too large`},
		{"reads_undeclared", `secret\.txt: No such file or directory`},
		{"reads_workspace", `secret\.txt: No such file or directory`},
	} {
		t.Run(c.target, func(t *testing.T) {
			build := r.bazel(t, "build", "//examples/hostile:"+c.target,
				"--define=HOSTILE_PORT="+port(listener), "--define=HOSTILE_WORKSPACE="+r.Workspace)
			expect.Equal(t, build.ExitCode, 1, "bazel: exit")
			expect.That(t, regexp.MustCompile(c.why).MatchString(build.Output), "output does not match %q", c.why)
		})
	}
	expect.Equal(t, accepted.Load(), 0, "connections from the sandbox")
	// From outside the connection works, so the sandbox refused it.
	conn := must.Get(net.Dial("tcp4", listener.Addr().String()))(t)
	defer conn.Close()
	if secret, err := io.ReadAll(conn); err != nil || len(secret) == 0 {
		t.Errorf("got %q, %v from the listener, want a secret", secret, err)
	}
}

func port(l net.Listener) string { return strconv.Itoa(l.Addr().(*net.TCPAddr).Port) }

// testUnprivileged builds as another user with another server in other directories. Its runs must equal those of first,
// which are in executed.
func testUnprivileged(t *testing.T, first *rig, executed map[string]ran) {
	if os.Geteuid() != 0 {
		t.Skip("not root: the other tests of this package already run unprivileged")
	}
	r := newRig(t, unusedUser(t))
	targets := []string{"//examples/hash/...", "//examples/pages/...", "//examples/units/..."}
	if *all {
		targets = []string{"//examples/..."}
	}
	build := r.bazel(t, "test", targets...)
	wantAll(t, build, "remote")
	r.wantNoEvents(t)
	wantEqualRuns(t, first, r, executed, r.executed(t))
	ctx, cancel := context.WithTimeout(t.Context(), bazelTime)
	defer cancel()
	must.Succeed(t, r.Clean(ctx))
	build = r.bazel(t, "test", targets...)
	wantAll(t, build, "remote cache hit")
	before := r.blobs(t)
	t.Run("a sleeping test times out and leaves no process", func(t *testing.T) { testTimeout(t, r) })
	t.Run("hostile genrules fail", func(t *testing.T) { testHostile(t, r) })
	if after := r.blobs(t); after < before {
		t.Errorf("got %d blobs, want at least the previous %d", after, before)
	}
}

// unusedUser returns a user and group id without an account on this host.
func unusedUser(t *testing.T) *syscall.Credential {
	for id := uint32(64000); id < 64900; id++ {
		_, userErr := user.LookupId(strconv.Itoa(int(id)))
		_, groupErr := user.LookupGroupId(strconv.Itoa(int(id)))
		if userErr != nil && groupErr != nil {
			return &syscall.Credential{Uid: id, Gid: id}
		}
	}
	t.Fatal("every user id from 64000 to 64899 is in use")
	return nil
}
