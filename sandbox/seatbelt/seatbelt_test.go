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
	"path/filepath"
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

// TestProfileNamesWhatIsReadOfTheSystem: the profile permits no sysctl that shows the arguments and environments of
// other processes.
func TestProfileNamesWhatIsReadOfTheSystem(t *testing.T) {
	got := Profile(&placement.Run{}, &sandbox.Network{})
	for _, line := range []string{"(allow sysctl-read)", `"kern.proc`, `"kern."`, `"net.`} {
		expect.That(t, !strings.Contains(got, line), "the profile has %q:\n%s", line, got)
	}
	denied := strings.Index(got, "(deny process-info*")
	expect.That(t, denied >= 0 && denied < strings.Index(got, "process-info* (target same-sandbox)"), "the default of process-info* is not replaced:\n%s", got)
}

// TestLongProfilesAreNoArguments: the kernel limits arguments to 1 MiB on macOS, and one to 128 KiB on Linux.
func TestLongProfilesAreNoArguments(t *testing.T) {
	r := &placement.Run{Args: []string{"tool"}}
	for i := range 50_000 {
		r.Fixed = append(r.Fixed, fmt.Sprintf("/private/var/w/out/directory/input%d.c", i))
	}
	n := 0
	for _, arg := range must.Get(launch(&sandbox.Spec{Limits: sandbox.DefaultLimits()}, r, "/p/profile", "/build/tool"))(t) {
		n += len(arg)
	}
	expect.That(t, n < 1000, "the arguments have %d bytes", n)
	expect.That(t, len(Profile(r, &sandbox.Network{})) > 1<<20, "the profile is short")
}

// launchUnder executes what launch returns, with a script in the place of sandbox-exec. It returns the output, the exit
// code and the error of launchError.
func launchUnder(t *testing.T, sandboxExec string, spec *sandbox.Spec, r *placement.Run, file string) (stdout, stderr string, code int, failed error) {
	t.Helper()
	for _, name := range []string{"/bin/sh", shell, setEnv} {
		if _, err := exec.LookPath(name); err != nil {
			sandboxtest.Unavailable(t, "tools", err)
		}
	}
	fake := filepath.Join(t.TempDir(), "sandbox-exec")
	must.Succeed(t, os.WriteFile(fake, []byte("#!/bin/sh\n"+sandboxExec), 0o700))
	args := must.Get(launch(spec, r, "/p/profile", file))(t)
	args[slices.Index(args, launcher)] = fake
	read, write, err := os.Pipe()
	must.Succeed(t, err)
	cmd := exec.CommandContext(t.Context(), "/bin/sh", args...)
	h := &head{}
	var out bytes.Buffer
	cmd.Env, cmd.ExtraFiles, cmd.Stdout, cmd.Stderr = []string{}, []*os.File{write}, &out, h
	if err := cmd.Run(); err != nil {
		expect.That(t, errors.As(err, new(*exec.ExitError)), "launch: %v", err)
	}
	must.Succeed(t, write.Close())
	prologue := must.Get(io.ReadAll(read))(t)
	must.Succeed(t, read.Close())
	return out.String(), string(h.text), cmd.ProcessState.ExitCode(), launchError(string(prologue), string(h.text))
}

// confines stands for a sandbox-exec that applies its profile.
const confines = `shift 2; exec "$@"`

// TestLaunchErrors: a failure of the sandbox is an error. A failure of the command is a result, even if the command is
// another sandbox-exec.
func TestLaunchErrors(t *testing.T) {
	const refused = "echo 'sandbox-exec: sandbox_apply: Operation not permitted' >&2; exit 71"
	text := filepath.Join(t.TempDir(), "text")
	must.Succeed(t, os.WriteFile(text, []byte("no program"), 0o600))
	for name, c := range map[string]struct {
		sandboxExec, file, script string
		openFiles                 int64
		code                      int
		want                      string // of the error
	}{
		"the profile is not applied": {refused, "/bin/sh", "exit 0", 64, 71, "sandbox_apply: Operation not permitted"},
		"the profile is wrong":       {"echo 'sandbox-exec: invalid profile' >&2; exit 65", "/bin/sh", "exit 0", 64, 65, "invalid profile"},
		"sandbox-exec does nothing":  {"exit 0", "/bin/sh", "exit 0", 64, 0, "did not confine it"},
		"the limit is not set":       {confines, "/bin/sh", "exit 0", 1 << 40, -1, "limit"},
		"a sandbox in the sandbox":   {confines, "/bin/sh", refused, 64, 71, ""},
		"a command that fails":       {confines, "/bin/sh", "exit 65", 64, 65, ""},
		"not executable":             {confines, text, "", 64, 126, ""},
	} {
		spec := &sandbox.Spec{Limits: sandbox.Limits{OpenFiles: c.openFiles}}
		_, stderr, code, err := launchUnder(t, c.sandboxExec, spec, &placement.Run{Args: []string{"tool", "-c", c.script}}, c.file)
		if c.want == "" {
			expect.That(t, err == nil, "%s: got %v, want a result of the command", name, err)
		} else {
			expect.Message(t, err, c.want, name)
		}
		expect.That(t, code == c.code || c.code == -1 && code != 0, "%s: got exit code %d, want %d: %s", name, code, c.code, stderr)
	}
}

// TestCommandHasItsEnvironmentAndLimitOnly: the variables of the run do not reach the programs that start it outside
// its profile, and the command does not have descriptor 3.
func TestCommandHasItsEnvironmentAndLimitOnly(t *testing.T) {
	r := &placement.Run{Args: []string{"tool"}, Env: []string{"-u=1", "BASH_FUNC_ulimit%%=() { :; }", "DYLD_INSERT_LIBRARIES=/build/l"}}
	spec := &sandbox.Spec{Limits: sandbox.Limits{OpenFiles: sandbox.Unlimited}}
	const outside = `env | grep -q -e DYLD -e ulimit && echo seen; `
	out, _, _, err := launchUnder(t, outside+confines, spec, r, setEnv)
	expect.That(t, err == nil && out == strings.Join(r.Env, "\n")+"\n", "got %q, %v, want the environment %q", out, err, r.Env)

	spec.Limits.OpenFiles = 64
	r = &placement.Run{Args: []string{"tool", "-c", "echo $(ulimit -n) $( (echo open >&3) 2>/dev/null || echo closed)"}}
	out, _, _, err = launchUnder(t, confines, spec, r, "/bin/sh")
	expect.That(t, err == nil && out == "64 closed\n", "got %q, %v", out, err)

	_, err = launch(spec, r, "/p/profile", "/build/a=b/tool")
	expect.Error(t, err, sandbox.ErrUnsupported, "a program that env takes for a variable")
}

func TestHeadKeepsTheBeginning(t *testing.T) {
	h := &head{}
	for range 3 {
		_ = must.Get(h.Write(bytes.Repeat([]byte("x"), 1000)))(t)
	}
	expect.Equal(t, len(h.text), 1024, "bytes that are kept")
}
