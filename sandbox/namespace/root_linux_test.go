// SPDX-License-Identifier: Apache-2.0

package namespace

import (
	"bytes"
	"testing"

	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/sandbox/internal/zygote"
	"github.com/cloister-build/cloister/sandbox/sandboxtest"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
)

// TestRootsAreSupported: on kernels that copy detached mounts (Linux 6.15), runs can have root file systems.
func TestRootsAreSupported(t *testing.T) {
	b := New(Config{})
	defer b.Close()
	f, err := b.Probe(t.Context())
	if err != nil {
		sandboxtest.Unavailable(t, "namespaces", err)
	}
	if f.Root != copiesDetached() || f.Superuser != f.Root {
		t.Errorf("got Root %v and Superuser %v, want %v", f.Root, f.Superuser, copiesDetached())
	}
}

// TestClosedRootIsNotReused: a workspace with the name of a closed one is another root, also for a slot that was busy
// when the first was closed.
func TestClosedRootIsNotReused(t *testing.T) {
	b := New(Config{})
	defer b.Close()
	if f, err := b.Probe(t.Context()); err != nil || !f.Root {
		sandboxtest.Unavailable(t, "namespaces", "no root file systems here")
	}
	must := func(err error) {
		t.Helper()
		must.Succeed(t, err)
	}
	root := func(text string) sandbox.Workspace {
		w, err := b.Workspace(t.Context(), sandbox.Unlimited, sandbox.Unlimited)
		must(err)
		for _, dir := range []string{"dev", "proc", "tmp", "build"} {
			must(w.Root().MkdirAll("root/"+dir, 0o755))
		}
		r, err := w.Root().OpenRoot("root")
		must(err)
		defer r.Close()
		sandboxtest.CopyPrograms(t, r, "cat")
		must(r.WriteFile("file", []byte(text), 0o644))
		return w
	}
	run := func(w sandbox.Workspace) string {
		ws, err := b.Workspace(t.Context(), sandbox.Unlimited, sandbox.Unlimited)
		must(err)
		defer ws.Close()
		must(ws.Root().Mkdir("out", 0o755))
		var out bytes.Buffer
		_, err = b.Run(t.Context(), &sandbox.Spec{
			Args: []string{"/bin/cat", "/file"}, Dir: "/build",
			Root:    &sandbox.Root{Content: "x", Image: w.Name(), Source: "root"},
			Outputs: []sandbox.Output{{Target: "/build", Source: "out"}}, Temp: []sandbox.Temp{{Target: "/tmp", Bytes: 1 << 20}},
			Workspace: ws.Name(), Limits: unlimited, Audit: sandbox.AuditOff,
		}, sandbox.Stdio{Stdout: &out})
		must(err)
		return out.String()
	}
	first := root("first")
	if got := run(first); got != "first" {
		t.Fatalf("got %q, want first", got)
	}
	// A run that fails before it is launched has the slot while the root is closed.
	s, err := b.acquire(&zygote.Base{})
	must(err)
	must(first.Close())
	b.release(s, "")
	second := root("second")
	defer second.Close()
	if first.Name() != second.Name() {
		t.Logf("the names differ: %s and %s", first.Name(), second.Name())
	}
	expect.Equal(t, run(second), "second")
}
