// SPDX-License-Identifier: Apache-2.0

package placement

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
)

// newRun returns a host with a workspace that has an input tree, and a Spec that uses it.
func newRun(t *testing.T) (*Host, sandbox.Workspace, *sandbox.Spec) {
	h := NewHost()
	t.Cleanup(func() { must.Succeed(t, h.Close()) })
	ws := must.Get(h.Workspace(t.Context(), sandbox.Unlimited, sandbox.Unlimited))(t)
	for _, dir := range []string{"in/src", "out/src"} {
		must.Succeed(t, ws.Root().MkdirAll(dir, 0o700))
	}
	must.Succeed(t, ws.Root().WriteFile("in/src/a.c", []byte("small"), 0o400))
	must.Succeed(t, ws.Root().WriteFile("in/tool", nil, 0o400)) // the place of an input
	must.Succeed(t, ws.Root().WriteFile("out/src/hides", []byte("upper"), 0o600))
	must.Succeed(t, ws.Root().WriteFile("in/src/hides", []byte("lower"), 0o400))
	dir := must.Get(filepath.EvalSymlinks(t.TempDir()))(t)
	must.Succeed(t, os.WriteFile(filepath.Join(dir, "tool"), []byte("large"), 0o755))
	return h, ws, &sandbox.Spec{
		Args: []string{"/build/tool", "/build/src"}, Dir: "/build/src", Env: []string{"OTHER=/buildings", "TMPDIR=/tmp"},
		Outputs:   []sandbox.Output{{Target: "/build", Source: "out"}},
		Lower:     []sandbox.Lower{{Target: "/build", Content: "c", Source: "in"}},
		Inputs:    []sandbox.Input{{Target: "/build/tool", Content: "t", Source: filepath.Join(dir, "tool")}, {Target: dir, Content: "host", Source: dir}},
		Temp:      []sandbox.Temp{{Target: "/tmp", Bytes: 100}},
		Limits:    sandbox.DefaultLimits(),
		Workspace: ws.Name(),
	}
}

func TestPlaceAndRestore(t *testing.T) {
	h, ws, spec := newRun(t)
	r := must.Get(h.Place(spec))(t)
	out := filepath.Join(ws.Name(), "out")
	expect.Equal(t, r.Dir, filepath.Join(out, "src"))
	expect.Slices(t, r.Args, []string{filepath.Join(out, "tool"), "/build/src"})
	expect.Slices(t, r.Env, []string{"OTHER=/buildings", "TMPDIR=" + r.Writable[1]})
	expect.Slices(t, r.Readable, []string{spec.Inputs[1].Target})
	expect.Slices(t, r.Fixed, []string{filepath.Join(out, "src/a.c"), filepath.Join(out, "tool")})
	expect.Slices(t, r.Holders, []string{out, filepath.Join(out, "src")})
	for name, want := range map[string]string{"src/a.c": "small", "src/hides": "upper", "tool": "large"} {
		expect.Equal(t, string(must.Get(os.ReadFile(filepath.Join(out, name)))(t)), want, name)
	}
	file, err := r.program()
	expect.That(t, err == nil && file == filepath.Join(out, "tool"), "the program is %s, %v", file, err)

	must.Succeed(t, os.WriteFile(filepath.Join(out, "src/a.o"), []byte("object"), 0o600))
	must.Succeed(t, r.Restore())
	var left []string
	must.Succeed(t, fs.WalkDir(ws.Root().FS(), "out", func(p string, _ fs.DirEntry, err error) error {
		left = append(left, p)
		return err
	}))
	expect.Slices(t, left, []string{"out", "out/src", "out/src/a.o", "out/src/hides"}, "outputs after the run")
	expect.Equal(t, string(must.Get(ws.Root().ReadFile("in/src/a.c"))(t)), "small", "the lower directory after the run")
	_, err = os.Stat(r.Writable[1])
	expect.Error(t, err, fs.ErrNotExist, "the temporary directory")
}

func TestChangedInputsAreErrors(t *testing.T) {
	for name, change := range map[string]func(file string) error{
		"written": func(f string) error {
			return errors.Join(os.Chmod(f, 0o600), os.WriteFile(f, []byte("changed"), 0o600), os.Chmod(f, 0o400))
		},
		"mode":     func(f string) error { return os.Chmod(f, 0o600) },
		"removed":  os.Remove,
		"replaced": func(f string) error { return errors.Join(os.Remove(f), os.Symlink("/etc/passwd", f)) },
	} {
		h, ws, spec := newRun(t)
		r := must.Get(h.Place(spec))(t)
		must.Succeed(t, change(filepath.Join(ws.Name(), "out/src/a.c")))
		expect.Message(t, r.Restore(), "the run changed its input out/src/a.c", name)
	}
}

func TestPlaceRefusesWhatNeedsMounts(t *testing.T) {
	for name, change := range map[string]func(*sandbox.Spec){
		"input elsewhere":   func(s *sandbox.Spec) { s.Inputs[1].Target = "/elsewhere" },
		"input in /tmp":     func(s *sandbox.Spec) { s.Inputs[1].Target = "/tmp/x" },
		"directory":         func(s *sandbox.Spec) { s.Inputs[1].Target = "/build/dir" },
		"over a file":       func(s *sandbox.Spec) { s.Inputs[0].Target = "/build/src/hides" },
		"working directory": func(s *sandbox.Spec) { s.Dir = "/elsewhere" },
	} {
		h, ws, spec := newRun(t)
		change(spec)
		r, err := h.Place(spec)
		expect.Error(t, err, sandbox.ErrUnsupported, name, r)
		text, err := ws.Root().ReadFile("in/src/a.c")
		expect.That(t, err == nil && string(text) == "small", "%s: the lower directory has %q, %v", name, text, err)
	}
	h, _, spec := newRun(t)
	link := filepath.Join(t.TempDir(), "link")
	must.Succeed(t, os.Symlink(spec.Inputs[0].Source, link))
	spec.Inputs[0].Source = link
	expect.Error(t, expect.Err(h.Place(spec)), sandbox.ErrSpec)
	spec.Inputs[0].Source = link + "missing"
	expect.Error(t, expect.Err(h.Place(spec)), fs.ErrNotExist)
}

func TestInputsAreNotPlacedBehindLinks(t *testing.T) {
	h, ws, spec := newRun(t)
	must.Succeed(t, ws.Root().Mkdir("out/other", 0o700))
	must.Succeed(t, ws.Root().Symlink("other", "out/link"))
	spec.Inputs[0].Target = "/build/link/tool"
	expect.Error(t, expect.Err(h.Place(spec)), sandbox.ErrSpec)
	left := must.Get(os.ReadDir(filepath.Join(ws.Name(), "out/other")))(t)
	expect.Equal(t, len(left), 0, "files behind the link")
}

func TestOutputsAreMeasured(t *testing.T) {
	h, ws, spec := newRun(t)
	spec.Limits.OutputBytes, spec.Limits.OutputFiles = 20, 4
	r := must.Get(h.Place(spec))(t)
	if e := r.exceeded(true); e != nil {
		t.Errorf("before the run: %s", e)
	}
	for _, c := range []struct{ file, subject string }{
		{filepath.Join(ws.Name(), "out/big"), "output bytes"}, {filepath.Join(r.Writable[1], "big"), "room in /tmp"},
	} {
		must.Succeed(t, os.WriteFile(c.file, []byte(strings.Repeat("x", 101)), 0o600))
		if e := r.exceeded(true); e == nil || e.Subject != c.subject {
			t.Errorf("%s: got %v, want %s", c.file, e, c.subject)
		}
		must.Succeed(t, os.Remove(c.file))
	}
	for _, name := range []string{"1", "2", "3"} {
		must.Succeed(t, ws.Root().Mkdir("out/"+name, 0o700))
	}
	if e := r.exceeded(true); e == nil || e.Subject != "output files" {
		t.Errorf("got %v, want the limit of output files", e)
	}
	must.Succeed(t, r.Restore())
}

// TestUnmeasurableOutputsExceedTheirLimit: a run must not hide files where the worker cannot look.
func TestUnmeasurableOutputsExceedTheirLimit(t *testing.T) {
	h, ws, spec := newRun(t)
	r := must.Get(h.Place(spec))(t)
	expect.That(t, r.exceeded(true) == nil, "before the run: %v", r.exceeded(true))
	hide := map[string]func(dir *os.Root) error{
		"deep": func(dir *os.Root) error { // its path is longer than any that the kernel accepts
			name := strings.Repeat("d", 200)
			for range 25 {
				if err := dir.Mkdir(name, 0o700); err != nil {
					return err
				}
				inner, err := dir.OpenRoot(name)
				if err != nil {
					return err
				}
				defer inner.Close()
				dir = inner
			}
			return dir.WriteFile("big", make([]byte, 1<<20), 0o600)
		},
	}
	if os.Geteuid() != 0 { // root reads everything
		hide["unreadable"] = func(dir *os.Root) error { return errors.Join(dir.Mkdir("closed", 0o700), dir.Chmod("closed", 0)) }
	}
	for name, f := range hide {
		for where, subject := range map[string]string{filepath.Join(ws.Name(), "out"): "output bytes", r.Writable[1]: "room in /tmp"} {
			dir := must.Get(os.OpenRoot(where))(t)
			must.Succeed(t, f(dir))
			e := r.exceeded(true)
			if e == nil || e.Subject != subject || !strings.Contains(e.Actual, "not measurable") {
				t.Errorf("%s in %s: got %v, want an exceeded limit", name, where, e)
			}
			must.Succeed(t, dir.Close())
			entries := must.Get(os.ReadDir(where))(t)
			for _, e := range entries {
				if e.Name() == "closed" || strings.HasPrefix(e.Name(), "ddd") {
					must.Succeed(t, removeTree(filepath.Join(where, e.Name())))
				}
			}
		}
	}
	must.Succeed(t, r.Restore())
}

// TestTerminalsAreRefused: a run with a terminal, which the backend would ignore, is refused.
func TestTerminalsAreRefused(t *testing.T) {
	h, _, spec := newRun(t)
	f := sandbox.Features{Backend: "other", Audits: []sandbox.Audit{spec.Audit}, Limits: sandbox.AllLimits, Lower: true}
	ran := false
	execute := func(*Run, string, *sandbox.Result) error { ran = true; return nil }
	must.Get(h.Run(t.Context(), &f, spec, sandbox.Stdio{}, execute))(t)
	expect.That(t, ran, "without a terminal: nothing was executed")
	ran = false
	_, err := h.Run(t.Context(), &f, spec, sandbox.Stdio{Terminal: os.Stdin}, execute)
	expect.Error(t, err, sandbox.ErrUnsupported)
	expect.That(t, !ran, "a run was executed")
}

func TestClosedHostRefuses(t *testing.T) {
	h, ws, _ := newRun(t)
	must.Succeed(t, h.Close())
	expect.Error(t, expect.Err(h.Workspace(t.Context(), 1, 1)), sandbox.ErrClosed)
	expect.Error(t, h.begin(), sandbox.ErrClosed)
	_, err := os.Stat(ws.Name())
	expect.Error(t, err, fs.ErrNotExist)
	expect.That(t, slices.Contains(Limits, sandbox.LimitOutputBytes), "output bytes are not limited")
}
