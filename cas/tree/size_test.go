// SPDX-License-Identifier: Apache-2.0

package tree_test

import (
	"fmt"
	"io/fs"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/castest"
	"github.com/cloister-build/cloister/cas/tree"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
)

// taken returns the size of a workspace on a memory-backed file system.
func taken(t testing.TB, ws *os.Root, s *tree.Staged) (bytes, files int64) {
	t.Helper()
	if len(s.Lower) > 0 {
		files = 2 // of the overlay
	}
	page := int64(os.Getpagesize())
	must.Succeed(t, fs.WalkDir(ws.FS(), ".", func(_ string, e fs.DirEntry, err error) error {
		must.Succeed(t, err)
		files++
		info := must.Get(e.Info())(t)
		if e.Type().IsRegular() || e.Type() == fs.ModeSymlink && info.Size() >= 128 {
			bytes += (info.Size() + page - 1) / page * page
		}
		return nil
	}))
	return bytes, files
}

func TestSizeEstimateIsWhatStageTakes(t *testing.T) {
	large := strings.Repeat("L", tree.LargeFile)
	inputs := []struct {
		name    string
		input   *node
		outputs []string
	}{
		{"large files", parse(t, "d/large = "+large, "d/e/tool *= "+large, "top = "+large, "old = "+large,
			"out/old = "+large, "s = 1"), []string{"old", "out"}},
		{"one directory many times", parse(t, "a/x/f = 1", "a/y/f = 1", "b/f = 1", "out/x/f = 1"), []string{"out"}},
		{"one directory bound and copied", parse(t, "a/e/f = "+large, "out/e/f = "+large), []string{"out"}},
		{
			"links", parse(t, "l -> f", "d/l -> "+strings.Repeat("x", 127), "d/m -> "+strings.Repeat("x", 128), "f = 1"),
			nil,
		},
	}
	for _, s := range shapes(t) {
		if !strings.HasPrefix(s.name, "error_") {
			inputs = append(inputs, struct {
				name    string
				input   *node
				outputs []string
			}{s.name, s.input, s.outputs})
		}
	}
	for _, c := range inputs {
		for name, store := range map[string]cas.Store{"copied": castest.NewMemory(), "bound": newFiler(t)} {
			t.Run(c.name+" "+name, func(t *testing.T) {
				usual := plan(t, load(t, store, c.input), "", c.outputs, nil)
				for _, l := range []*tree.Layout{usual, usual.Layered()} {
					ws := newRoot(t)
					s := must.Get(l.Stage(t.Context(), store, ws))(t)
					defer s.Release()
					bytes, files := l.SizeEstimate(store)
					if b, f := taken(t, ws, s); b != bytes || f != files {
						t.Errorf("SizeEstimate: got %d bytes in %d files, Stage took %d in %d", bytes, files, b, f)
					}
				}
			})
		}
	}
}

func TestAllFilesAreOfTheExpandedTree(t *testing.T) {
	in := load(t, castest.NewMemory(), parse(t, "a/f = 1", "b/f = 1", "b/l -> f", "c/", "d *= 2"))
	var got []string
	for f := range in.AllFiles() {
		got = append(got, fmt.Sprintf("%s symlink=%t", f.Path, f.Symlink))
	}
	slices.Sort(got)
	expect.Slices(t, got, []string{"a/f symlink=false", "b/f symlink=false", "b/l symlink=true", "d symlink=false"})
	for f := range in.AllFiles() {
		expect.That(t, f.Path != "", "got an empty path")
		break // must not panic
	}
}
