// SPDX-License-Identifier: Apache-2.0

package comparison

import (
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/castest"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
	"github.com/cloister-build/cloister/worker/repro/changes"
)

// Diffoscope sees the differing files of server directories under their names. Files that cannot be written or are
// absent are counted, and nothing is written outside.
func TestDiffoscopeSeesDifferingFiles(t *testing.T) {
	store := castest.NewMemory()
	put := func(nodes map[string]string, links ...string) cas.Digest {
		dir := &repb.Directory{}
		for _, name := range slices.Sorted(maps.Keys(nodes)) {
			d := must.Get(cas.PutBytes(t.Context(), store, cas.SHA256, []byte(nodes[name])))(t)
			dir.Files = append(dir.Files, &repb.FileNode{Name: name, Digest: d.Proto()})
		}
		for _, name := range links {
			dir.Symlinks = append(dir.Symlinks, &repb.SymlinkNode{Name: name, Target: "/"})
		}
		return must.Get(cas.PutProto(t.Context(), store, cas.SHA256, dir))(t)
	}
	r := &changes.Reader{Store: store}
	found, err := changes.Directories(t.Context(), "file", r.Directory(put(map[string]string{"same": "s", "f": "one", "\n\x1b": "a", "gone": "g"}, "link")),
		r.Directory(put(map[string]string{"same": "s", "f": "two", "../up": "b", "link/x": "b", "/abs": "b", "nul\x00": "b", "": "b"}, "other")))
	must.Succeed(t, err)
	absent := cas.SHA256.Sum([]byte("absent"))
	found = append(found, changes.Change{What: "stdout", EntryA: r.File("stdout", absent, false)},
		changes.Change{What: "file", Path: "large", EntryB: r.File("large", cas.SHA256.Sum(make([]byte, 100)), false)})
	var all []shownChange
	for _, c := range found {
		all = append(all, shownChange{Change: c})
	}
	dir := t.TempDir()
	a, b := filepath.Join(dir, "a"), filepath.Join(dir, "b")
	p := changed{left: 20}
	must.Succeed(t, p.write(t.Context(), all, [2]string{a, b}))
	got := map[string]string{}
	must.Succeed(t, filepath.WalkDir(dir, func(path string, d os.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		text, err := os.ReadFile(path)
		name, _ := filepath.Rel(dir, path)
		got[name] = string(text)
		return err
	}))
	want := map[string]string{"a/f": "one", "a/\n\x1b": "a", "a/gone": "g", "b/f": "two", "b/link/x": "b"}
	expect.That(t, maps.Equal(got, want), "written are %q, want %q", got, want)
	// The name that is none, those with NUL, .. and / in front, what is absent and what is too large.
	expect.That(t, p.files == len(want) && p.without == 6 && strings.Contains(p.why, "stdout is absent"), "%+v", p)
}
