// SPDX-License-Identifier: Apache-2.0

package namespace_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/sandbox/namespace"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
	"golang.org/x/sys/unix"
)

// TestKernelsThatLackALayer runs the parts of the contract that concern files and processes, and TestWhatIsLacking, as
// on kernels without Landlock or overlayfs.
func TestKernelsThatLackALayer(t *testing.T) {
	t.Parallel()
	backend(t, namespace.Config{})
	const contract = "ProbeNamesTheTier|IdentityIsFixed|UndeclaredPathsAreAbsent|InputsCannotBeChanged|InputInsideWritableDirectoryCannotBeChanged|" +
		"OutputsOverInputs|OnlyOutputsAndTempAreWritable|TempIsPrivateToARun|OtherRunsAreInvisible|HostNetworkIsUnreachable|ViolationsAreRecorded"
	for _, layer := range []string{"landlock", "overlayfs"} {
		cmd := exec.CommandContext(t.Context(), "/proc/self/exe", "-test.run=^Test(Backend|WhatIsLacking)$/^("+contract+")$", "-test.v")
		cmd.Dir = t.TempDir()
		cmd.Env = append(os.Environ(), deniedVariable+"=tests "+layer, "CLOISTER_REQUIRE=")
		out, err := cmd.CombinedOutput()
		if err != nil || !strings.Contains(string(out), "--- PASS: TestWhatIsLacking ") || !strings.Contains(string(out), "--- PASS: TestBackend ") {
			t.Errorf("without %s: %v\n%s", layer, err, out)
		}
	}
}

// readOnlyVariable makes the test binary a worker whose container has a read-only /proc/sys.
const readOnlyVariable = "CLOISTER_TEST_READ_ONLY"

// TestMissingInotifyLimitIsReported: the sandbox cannot set the limit if /proc/sys is read-only.
func TestMissingInotifyLimitIsReported(t *testing.T) {
	t.Parallel()
	missing := func(f sandbox.Features) bool {
		return slices.ContainsFunc(f.Checks, func(c sandbox.Check) bool { return c.Name == "inotify limit" && !c.OK })
	}
	if os.Getenv(readOnlyVariable) != "" {
		must.Succeed(t, unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""))
		must.Succeed(t, unix.Mount("/proc/sys", "/proc/sys", "", unix.MS_BIND, ""))
		must.Succeed(t, unix.Mount("", "/proc/sys", "", unix.MS_BIND|unix.MS_REMOUNT|unix.MS_RDONLY, ""))
		_, f := backend(t, namespace.Config{})
		expect.That(t, missing(f) && f.Tier == "partial", "with a read-only /proc/sys: got tier %s, checks %+v", f.Tier, f.Checks)
		return
	}
	rootOnly(t)
	_, f := backend(t, namespace.Config{})
	expect.That(t, !missing(f), "got checks %+v, want the limit in force", f.Checks)
	cmd := exec.CommandContext(t.Context(), "/proc/self/exe", "-test.run=^TestMissingInotifyLimitIsReported$", "-test.v")
	cmd.Env = append(os.Environ(), readOnlyVariable+"=yes")
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWNS}
	out, err := cmd.CombinedOutput()
	expect.That(t, err == nil && strings.Contains(string(out), "--- PASS: "), "%v\n%s", err, out)
}

// TestWhatIsLacking: what a kernel lacks is reported, a run works without it, and cannot change its inputs.
func TestWhatIsLacking(t *testing.T) {
	lacking := os.Getenv(lackingVariable)
	if lacking == "" {
		t.Skip("TestKernelsThatLackALayer runs it")
	}
	dir, err := filepath.EvalSymlinks(t.TempDir())
	must.Succeed(t, err)
	dir = filepath.Join(dir, "the-store")
	must.Succeed(t, os.Mkdir(dir, 0o777))
	blob := filepath.Join(dir, "blob")
	must.Succeed(t, os.WriteFile(blob, []byte("text"), 0o666))
	b, f := backend(t, namespace.Config{Hidden: []string{dir}})
	enforced := func(name string) bool {
		return slices.ContainsFunc(f.Checks, func(c sandbox.Check) bool { return c.Name == name && c.OK })
	}
	hidden := enforced(string(namespace.HiddenPaths))
	expect.That(t, f.Tier == "partial", "without %s: got tier %s, want partial; checks %+v", lacking, f.Tier, f.Checks)
	if lacking == "landlock" && (enforced("landlock") || slices.Contains(f.Layers, "landlock")) || lacking == "overlayfs" && (hidden || f.Lower) {
		t.Errorf("without %s: got layers %q, overlays over inputs %t, checks %+v", lacking, f.Layers, f.Lower, f.Checks)
	}
	// Root's inputs belong to another user; those of an ordinary user need an overlay, also on kernels before Linux 6.15.
	reported := slices.ContainsFunc(f.Checks, func(c sandbox.Check) bool { return c.Name == "unchangeable inputs" && !c.OK })
	expect.That(t, reported == (!f.Lower && os.Geteuid() != 0), "without %s: inputs are reported as changeable: %t; overlays %t, checks %+v",
		lacking, reported, f.Lower, f.Checks)
	// With overlays, actions of an ordinary user own the directories of their inputs.
	limited := slices.ContainsFunc(f.Checks, func(c sandbox.Check) bool {
		return c.Name == "unchangeable inputs" && c.OK && strings.Contains(c.Detail, "can change directory modes")
	})
	expect.That(t, limited == (f.Lower && os.Geteuid() != 0), "without %s: the directories of inputs are reported as changeable: %t; "+
		"overlays %t, checks %+v", lacking, limited, f.Lower, f.Checks)
	s := script("cat /in/blob; (echo other > /in/blob) 2>/dev/null; rm -f /in/blob 2>/dev/null; cat /proc/self/mountinfo")
	s.Inputs = append(s.Inputs, sandbox.Input{Target: "/in/blob", Content: "x", Source: blob})
	var said strings.Builder
	res, err := b.Run(t.Context(), s, sandbox.Stdio{Stdout: &said, Stderr: &said})
	must.Be(t, err == nil && res.ExitCode == 0 && strings.HasPrefix(said.String(), "text"),
		"got %+v, %v\n%s", res, err, &said)
	expect.That(t, strings.Contains(said.String(), "the-store") != hidden,
		"without %s: paths are hidden: %t; the mount table is\n%s", lacking, hidden, &said)
	expect.Equal(t, string(must.Get(os.ReadFile(blob))(t)), "text", "the run changed its input")
}
