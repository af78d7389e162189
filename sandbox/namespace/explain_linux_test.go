// SPDX-License-Identifier: Apache-2.0

package namespace_test

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/sandbox/namespace"
	"github.com/cloister-build/cloister/sandbox/sandboxtest"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
)

// TestWorkspacePathsAreExplained: what is wrong with a source in the workspace is an ErrSpec that names it.
func TestWorkspacePathsAreExplained(t *testing.T) {
	t.Parallel()
	b, _ := backend(t, namespace.Config{})
	w, err := b.Workspace(t.Context(), sandbox.Unlimited, sandbox.Unlimited)
	must.Succeed(t, err)
	defer w.Close()
	root := w.Root()
	must.Succeed(t, errors.Join(root.WriteFile("file", nil, 0o644), root.Symlink("file", "link"), root.Mkdir("closed", 0), root.Mkdir("out", 0o777)))
	for source, want := range map[string]string{
		"link":   "source link of output /build: invalid sandbox spec: link is a symbolic link: use the path that it leads to",
		"file":   "source file of output /build: invalid sandbox spec: it is not a directory",
		"closed": "invalid sandbox spec: working directory /build: the run's user may not enter it",
	} {
		s := script("true")
		s.Workspace, s.Dir = w.Name(), "/build"
		s.Outputs = []sandbox.Output{{Target: "/build", Source: source}}
		if _, err := b.Run(t.Context(), s, sandbox.Stdio{}); !errors.Is(err, sandbox.ErrSpec) || err.Error() != want {
			t.Errorf("output %s: got %v, want %s", source, err, want)
		}
	}
	s := script("true")
	s.Workspace = w.Name()
	s.Outputs = []sandbox.Output{{Target: "/build", Source: "out"}}
	s.Inputs = append(s.Inputs, sandbox.Input{Target: "/in", Content: "x", Source: "link"})
	_, err = b.Run(t.Context(), s, sandbox.Stdio{})
	if want := "source link of input /in"; !errors.Is(err, sandbox.ErrSpec) || !strings.HasPrefix(err.Error(), want) {
		t.Errorf("input: got %v, want an ErrSpec for the %s", err, want)
	}
	absent := filepath.Join(t.TempDir(), "absent")
	s.Inputs[len(s.Inputs)-1].Source = absent
	_, err = b.Run(t.Context(), s, sandbox.Stdio{})
	if !errors.Is(err, fs.ErrNotExist) || !strings.HasPrefix(err.Error(), "source "+absent+" of input /in: ") || !strings.HasSuffix(err.Error(), " (mount_source)") {
		t.Errorf("absent input: got %v, want ErrNotExist with the code mount_source", err)
	}
}

// TestMissingControlGroupsHaveACode: a limit that the host's control groups cannot enforce has a reason with a code.
// Ordinary users usually have no control groups.
func TestMissingControlGroupsHaveACode(t *testing.T) {
	_, f := backend(t, namespace.Config{})
	named := 0
	for _, c := range f.Checks {
		if c.Name == "memory limit" || c.Name == "CPU time limit" {
			named++
			expect.That(t, c.OK || strings.HasSuffix(c.Detail, " (cgroup_unavailable)"), "got %+v, want a code", c)
		}
	}
	expect.Equal(t, named, 2)
}

// TestFullWorkspace: the limit of a workspace is reported, not a higher one of the Spec.
func TestFullWorkspace(t *testing.T) {
	t.Parallel()
	const size = 1 << 20
	b, _ := backend(t, namespace.Config{})
	for _, limit := range []int64{16 << 30, sandbox.Unlimited} {
		w := must.Get(b.Workspace(t.Context(), size, 100))(t)
		defer w.Close()
		s := script("head -c 2000000 /dev/zero > file")
		s.Workspace, s.Limits.OutputBytes, s.Dir = w.Name(), limit, "/build"
		s.Outputs = []sandbox.Output{{Target: "/build", Source: "out"}}
		res := must.Get(b.Run(t.Context(), s, sandbox.Stdio{}))(t)
		if e := res.Exceeded; e == nil || e.LimitValue != size || e.ActualValue != size {
			t.Errorf("limit %d: got %v, want %d bytes", limit, e, size)
		}
	}
}

// TestHiddenPathsAreResolved: a hidden directory may be relative, and lead through a symbolic link.
func TestHiddenPathsAreResolved(t *testing.T) {
	t.Parallel()
	dir := must.Get(filepath.EvalSymlinks(t.TempDir()))(t)
	link := filepath.Join(dir, "link")
	must.Succeed(t, errors.Join(os.Mkdir(filepath.Join(dir, "the-store"), 0o755), os.Symlink("the-store", link)))
	here := must.Get(os.Getwd())(t)
	relative := must.Get(filepath.Rel(here, link))(t)
	for i, hidden := range []string{filepath.Join(dir, "the-store"), link, relative} {
		b, f := backend(t, namespace.Config{Hidden: []string{hidden}})
		if !slices.ContainsFunc(f.Checks, func(c sandbox.Check) bool { return c.Name == string(namespace.HiddenPaths) && c.OK }) {
			if i == 0 {
				sandboxtest.Unavailable(t, "namespaces", "this host cannot hide paths")
			}
			t.Errorf("%s: got checks %+v, want %s", hidden, f.Checks, namespace.HiddenPaths)
		}
		s := script("cat /proc/self/mountinfo")
		s.Inputs = append(s.Inputs, sandbox.Input{Target: "/in", Content: "x", Source: filepath.Join(dir, "the-store")})
		var mounts strings.Builder
		must.Get(b.Run(t.Context(), s, sandbox.Stdio{Stdout: &mounts}))(t)
		expect.That(t, strings.Contains(mounts.String(), " /in ") && !strings.Contains(mounts.String(), "the-store"),
			"%s: got mounts\n%s, want /in without the-store", hidden, &mounts)
	}
}
