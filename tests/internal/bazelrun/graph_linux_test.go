// SPDX-License-Identifier: Apache-2.0

package bazelrun

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"testing"

	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
)

func TestGraphPredictsItsOutputs(t *testing.T) {
	workspace := t.TempDir()
	g := &Graph{Layers: 3, Width: 4, Lines: func(layer, i int) int { return 10*layer + i }}
	g.Edit(1, 2)
	must.Succeed(t, g.Write(workspace))
	dir := filepath.Join(workspace, "graph")
	outputs := g.Outputs()
	expect.Equal(t, len(outputs), 12, "outputs")
	g.each(func(name string, layer, i int) {
		args := []string{"./node.sh", strconv.Itoa(g.lines(layer, i)), "0", name + ".out", name + ".src"}
		for _, dep := range g.below(layer, i) {
			args = append(args, dep+".out")
		}
		cmd := exec.Command("/bin/bash", args...)
		cmd.Dir = dir
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("%v: %v\n%s", args, err, out)
		}
		got, err := os.ReadFile(filepath.Join(dir, name+".out"))
		expect.That(t, err == nil && bytes.Equal(got, outputs[name+".out"]),
			"%s: got %.80q, %v; want %.80q", name, got, err, outputs[name+".out"])
	})
}

func TestEditChangesATargetAndItsDependents(t *testing.T) {
	g := &Graph{Layers: 4, Width: 5}
	before := g.Outputs()
	g.Edit(2, 1)
	after := g.Outputs()
	changed := map[string]bool{name(2, 1): true}
	g.each(func(name string, layer, i int) {
		for _, dep := range g.below(layer, i) {
			changed[name] = changed[name] || changed[dep]
		}
		if same := bytes.Equal(before[name+".out"], after[name+".out"]); same == changed[name] {
			t.Errorf("%s: got unchanged %v, want %v", name, same, !changed[name])
		}
	})
}

func TestWriteLeavesUnchangedFilesAlone(t *testing.T) {
	workspace := t.TempDir()
	g := &Graph{Layers: 1, Width: 2}
	must.Succeed(t, g.Write(workspace))
	node := filepath.Join(workspace, "graph", "node.sh")
	before := must.Get(os.Stat(node))(t)
	expect.That(t, before.Mode().Perm()&0o111 != 0, "node.sh: got mode %v, want it executable", before.Mode())
	g.Edit(0, 1)
	must.Succeed(t, g.Write(workspace))
	if after, err := os.Stat(node); err != nil || !after.ModTime().Equal(before.ModTime()) {
		t.Errorf("node.sh was rewritten, want it left alone: %v", err)
	}
	if b, err := os.ReadFile(filepath.Join(workspace, "graph", "n0_1.src")); err != nil || !bytes.Contains(b, []byte("edition 1")) {
		t.Errorf("edited source: got %q, %v; want edition 1", b, err)
	}
}
