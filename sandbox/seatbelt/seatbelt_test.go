// SPDX-License-Identifier: Apache-2.0

package seatbelt

import (
	"bytes"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/sandbox/internal/placement"
	"github.com/cloister-build/cloister/sandbox/sandboxtest"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
)

var update = flag.Bool("update", false, "rewrite the expected profile")

func TestProfile(t *testing.T) {
	r := &placement.Run{
		Readable: []string{"/usr", "/private/etc/services"},
		Writable: []string{"/private/var/w/out", `/private/var/t "1\2)`},
		Fixed:    []string{"/private/var/w/out/src/a.c"},
		Holders:  []string{"/private/var/w/out", "/private/var/w/out/src"},
	}
	const file = "testdata/profile.sb"
	got := Profile(r, &sandbox.Network{Loopback: true, Listen: true})
	if *update {
		must.Succeed(t, os.WriteFile(file, []byte(got), 0o644))
	}
	if want := string(must.Get(os.ReadFile(file))(t)); got != want {
		t.Errorf("got\n%s\nwant\n%s", got, want)
	}
	const socket, connect, listen = "(allow system-socket", `(allow network-outbound (remote ip "localhost:*"))`, "(allow network-bind network-inbound"
	for _, c := range []struct {
		network sandbox.Network
		want    []string
	}{{sandbox.Network{}, nil}, {sandbox.Network{Loopback: true}, []string{socket, connect}}, {sandbox.Network{Loopback: true, Listen: true}, []string{socket, connect, listen}}} {
		var rules []string
		for line := range strings.Lines(Profile(r, &c.network)) {
			for _, rule := range []string{socket, connect, listen, "(allow network"} {
				if strings.HasPrefix(line, rule) {
					rules = append(rules, rule)
					break
				}
			}
		}
		expect.Slices(t, rules, c.want, "rules for %+v", c.network)
	}
}

// TestProfileWithoutPathsAllowsNone: a rule without filters would match every path.
func TestProfileWithoutPathsAllowsNone(t *testing.T) {
	got := Profile(&placement.Run{}, &sandbox.Network{})
	for _, operation := range []string{"(allow file-write*", "(allow network", "(deny file-write* file-link", "/Users"} {
		expect.That(t, !strings.Contains(got, operation), "the profile has %q:\n%s", operation, got)
	}
	expect.That(t, strings.HasPrefix(got, "(version 1)\n(deny default)\n"), "the profile does not begin with a denial:\n%s", got)
}

func TestFamilyFollowsDescendants(t *testing.T) {
	f := family{group: 10, known: map[int]int64{}}
	first := f.update([]process{{12, 11, 12, 3}, {11, 10, 11, 2}, {10, 1, 10, 1}, {20, 1, 20, 1}})
	expect.Slices(t, first, []int{12, 11, 10}, "children that left the group")
	later := f.update([]process{{12, 1, 12, 3}, {11, 1, 11, 9}, {20, 1, 20, 1}})
	expect.Slices(t, later, []int{12}, "an orphan, but not a later process with a known ID")
}

// TestLaunchErrors: a failure of the sandbox is no result of the command, and the command's own failure is one.
func TestLaunchErrors(t *testing.T) {
	for _, c := range []struct {
		text string
		code int
		want string
	}{
		{"sandbox-exec: invalid profile\nmore", exitData, "sandbox-exec: invalid profile"},
		{"sandbox-exec: execvp() of '/b/tool' failed: Exec format error\n", exitSystem, "/b/tool: Exec format error"},
		{"sandbox-exec: execvp() of '/b/other' failed: Exec format error\n", exitSystem, ""}, // of the command
		{"sandbox-exec: sandbox_apply: Operation not permitted\n", exitSystem, ""},
		{"main.c: sandbox-exec: error", exitData, ""},
		{"sandbox-exec: invalid profile", 1, ""},
		{"", exitData, ""},
	} {
		h := &head{}
		_ = must.Get(h.Write([]byte(c.text)))(t)
		got := ""
		if err := h.launchError(c.code, "/b/tool"); err != nil {
			got = err.Error()
			expect.Equal(t, errors.As(err, new(*placement.NotExecuted)), c.code == exitSystem, "fault of the command: %s", c.text)
		}
		expect.Equal(t, got, c.want, "%d: %s", c.code, c.text)
	}
	h := &head{}
	for range 3 {
		_ = must.Get(h.Write(bytes.Repeat([]byte("x"), 1000)))(t)
	}
	expect.Equal(t, len(h.text), 1024, "bytes that are kept")
}

// TestVariablesAreSetBehindTheShell: a shell imports functions such as ulimit from its environment, and would run them
// without a profile.
func TestVariablesAreSetBehindTheShell(t *testing.T) {
	r := &placement.Run{Args: []string{"tool", "-x"}, Env: []string{"-u=1", "BASH_FUNC_ulimit%%=() { :; }"}}
	got := launch(&sandbox.Spec{Limits: sandbox.Limits{OpenFiles: sandbox.Unlimited}}, r, "/p/profile", "/build/tool")
	expect.Slices(t, got, []string{
		"-c", `exec "$0" "$@" 3>&-`, "/usr/bin/env", "-i", "--", "-u=1", "BASH_FUNC_ulimit%%=() { :; }",
		launcher, "-f", "/p/profile", "/build/tool", "-x",
	}, "arguments of the shell")
}

func TestVariablesOfTheLauncherAreRefused(t *testing.T) {
	for _, v := range []string{"DYLD_INSERT_LIBRARIES=/build/l", "MallocLogFile=/home/f"} {
		expect.Error(t, checkEnv([]string{"PATH=/bin", v}), sandbox.ErrUnsupported, v)
	}
	must.Succeed(t, checkEnv([]string{"PATH=/bin", "X=DYLD_LIBRARY_PATH"}))
}

// TestLongProfilesAreNoArguments: the kernel limits arguments to 1 MiB on macOS, and one to 128 KiB on Linux.
func TestLongProfilesAreNoArguments(t *testing.T) {
	r := &placement.Run{Args: []string{"tool"}}
	for i := range 50_000 {
		r.Fixed = append(r.Fixed, fmt.Sprintf("/private/var/w/out/directory/input%d.c", i))
	}
	n := 0
	for _, arg := range launch(&sandbox.Spec{Limits: sandbox.DefaultLimits()}, r, "/p/profile", "/build/tool") {
		n += len(arg)
	}
	expect.That(t, n < 1000, "the arguments have %d bytes", n)
	expect.That(t, len(Profile(r, &sandbox.Network{})) > 1<<20, "the profile is short")
}

// TestShellSetsTheLimitOrSaysWhy executes the prologue with a program in the place of sandbox-exec.
func TestShellSetsTheLimitOrSaysWhy(t *testing.T) {
	if runtime.GOOS == "windows" {
		sandboxtest.Unavailable(t, "tools", "a shell")
	}
	for _, c := range []struct {
		limit int64
		out   string
		fails bool
	}{{64, "64 closed\n", false}, {1 << 40, "", true}} {
		args := launch(&sandbox.Spec{Limits: sandbox.Limits{OpenFiles: c.limit}}, &placement.Run{Args: []string{"tool"}}, "/p/profile", "/build/tool")
		i := slices.Index(args, launcher)
		args = append(args[:i], "/bin/sh", "-c", "echo $(ulimit -n) $( (echo open >&3) 2>/dev/null || echo closed)")
		read, write, err := os.Pipe()
		must.Succeed(t, err)
		cmd := exec.CommandContext(t.Context(), "/bin/sh", args...)
		cmd.Env, cmd.ExtraFiles = []string{}, []*os.File{write}
		out, runErr := cmd.Output()
		must.Succeed(t, write.Close())
		reason := string(must.Get(io.ReadAll(read))(t))
		must.Succeed(t, read.Close())
		expect.Equal(t, string(out), c.out, "limit %d", c.limit)
		expect.That(t, (runErr != nil) == c.fails && strings.Contains(reason, "limit") == c.fails, "limit %d: got %v and the reason %q", c.limit, runErr, reason)
	}
}
