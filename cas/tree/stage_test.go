// SPDX-License-Identifier: Apache-2.0

package tree_test

import (
	"context"
	"errors"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"testing/iotest"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/castest"
	"github.com/cloister-build/cloister/cas/tree"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
)

// stage plans in and stages it in a new workspace.
func stage(t testing.TB, store cas.Store, in *tree.Input, workdir string, outputs ...string) (*os.Root, *tree.Staged) {
	t.Helper()
	l := plan(t, in, workdir, outputs, nil)
	ws := newRoot(t)
	s := must.Get(l.Stage(t.Context(), store, ws))(t)
	t.Cleanup(s.Release)
	return ws, s
}

// Rules 98 and 100: the run sees exactly the input root and the parents of its outputs.
func TestStageShowsInputRootAndParentsOfOutputs(t *testing.T) {
	for _, s := range shapes(t) {
		if strings.HasPrefix(s.name, "error_") {
			continue
		}
		t.Run(s.name, func(t *testing.T) {
			store := castest.NewMemory()
			in := load(t, store, s.input)
			ws, staged := stage(t, store, in, s.workdir, s.outputs...)
			for _, o := range s.outputs {
				if parent := path.Dir(o); parent != "." {
					s.input.set(parent, dirNode())
				}
			}
			same(t, "exec root", view(t, ws, staged), s.input)
			ws = newRoot(t)
			layered := must.Get(plan(t, in, s.workdir, s.outputs, nil).Layered().Stage(t.Context(), store, ws))(t)
			defer layered.Release()
			same(t, "layered exec root", view(t, ws, layered), s.input)
		})
	}
}

// TestOrderChangesNothingElse checks that a layout with an order shows the same tree.
func TestOrderChangesNothingElse(t *testing.T) {
	for _, s := range shapes(t) {
		if strings.HasPrefix(s.name, "error_") {
			continue
		}
		t.Run(s.name, func(t *testing.T) {
			store := newFiler(t)
			in := load(t, store, s.input)
			usualWS, usual := stage(t, store, in, s.workdir, s.outputs...)
			l := plan(t, in, s.workdir, s.outputs, nil)
			ws := newRoot(t)
			staged := must.Get(l.WithOrder(5).Stage(t.Context(), store, ws))(t)
			defer staged.Release()
			same(t, "exec root", view(t, ws, staged), view(t, usualWS, usual))
			expect.That(t, staged.Form == usual.Form && len(staged.Binds) == len(usual.Binds),
				"got binds %v, want %v", staged.Binds, usual.Binds)
			modes(t, ws, usualWS)
		})
	}
}

// modes checks that all files in got have the same modes and times as in want.
func modes(t *testing.T, got, want *os.Root) {
	t.Helper()
	err := fs.WalkDir(want.FS(), ".", func(p string, d fs.DirEntry, err error) error {
		if err != nil || p == "." {
			return err
		}
		a, errA := got.Lstat(p)
		b, errB := want.Lstat(p)
		// A placeholder has its creation time.
		if errors.Join(errA, errB) != nil || a.Mode() != b.Mode() || a.ModTime() != b.ModTime() &&
			a.ModTime().Year() < 2020 {
			t.Errorf("%s: got %v, want %v (%v)", p, a, b, errors.Join(errA, errB))
		}
		return nil
	})
	must.Succeed(t, err)
}

func TestStageBindsLargeFilesFromStore(t *testing.T) {
	store := newFiler(t)
	large, small := strings.Repeat("L", tree.LargeFile), strings.Repeat("s", tree.LargeFile-1)
	n := parse(t, "d/e/large = "+large, "d/e/small = "+small, "d/tool *= "+large,
		"top = "+large, "old = "+large, "small = "+small)
	ws, s := stage(t, store, load(t, store, n), "", "old")
	same(t, "exec root", view(t, ws, s), n)
	var got []string
	for _, b := range s.Binds {
		kind := "workspace"
		if filepath.IsAbs(b.Source) {
			kind = "store"
		}
		got = append(got, b.Target+" "+kind)
	}
	// An input at an output path is private, whatever its size.
	want := []string{"top store", "d/tool store", "d/e/large store"}
	expect.Slices(t, got, want, "binds")
	expect.Equal(t, store.lent.Load(), 3, "files of the store are in use")
	s.Release()
	s.Release()
	expect.Equal(t, store.lent.Load(), 0, "files were not released")
}

// A fullFiler is a Filer without room for any file.
type fullFiler struct{ cas.Store }

func (fullFiler) File(context.Context, cas.Digest, bool) (string, func(), error) {
	return "", nil, cas.ErrFull
}

func TestStageCopiesLargeFilesIfTheFilerIsFull(t *testing.T) {
	store := fullFiler{castest.NewMemory()}
	large := strings.Repeat("L", tree.LargeFile)
	n := parse(t, "d/e/large = "+large, "d/tool *= "+large, "top = "+large, "small = s")
	ws, s := stage(t, store, load(t, store, n), "", "old")
	same(t, "exec root", view(t, ws, s), n)
	expect.That(t, len(s.Binds) == 0, "got binds %v, want copies", s.Binds)
	s.Release()
}

func TestStageReportsVanishedBlob(t *testing.T) {
	large := strings.Repeat("L", tree.LargeFile)
	for _, lost := range []string{"small", large} {
		store := newFiler(t)
		in := load(t, store, parse(t, "d/a/kept = "+large+"kept", "d/x = "+lost))
		l := plan(t, in, "", nil, nil)
		d := cas.SHA256.Sum([]byte(lost))
		store.Delete(d)
		_, err := l.Stage(t.Context(), store, newRoot(t))
		wantMissingBlobs(t, err, d)
		expect.Equal(t, store.lent.Load(), 0, "files were not released after the failure")
	}
}

// A fullStore fails every read with ENOSPC.
type fullStore struct{ cas.Store }

func (fullStore) Open(context.Context, cas.Digest, int64) (io.ReadCloser, error) {
	return io.NopCloser(iotest.ErrReader(&fs.PathError{Op: "write", Path: "x", Err: syscall.ENOSPC})), nil
}

func TestStageReportsErrors(t *testing.T) {
	store := castest.NewMemory()
	l := plan(t, load(t, store, parse(t, "d/x = content")), "", nil, nil)
	reason := errors.New("reason")
	ended, cancel := context.WithCancelCause(t.Context())
	cancel(reason)
	used := newRoot(t)
	must.Succeed(t, used.Mkdir("out", 0o777))
	corrupt := castest.NewMemory()
	corrupt.Corrupt(putBytes(t, corrupt, []byte("content")))
	for _, c := range []struct {
		name  string
		ctx   context.Context
		store cas.Store
		ws    *os.Root
		want  error
		text  string
	}{
		{"corrupt blob", t.Context(), corrupt, newRoot(t), cas.ErrCorrupt, "d/x"},
		{"full workspace", t.Context(), fullStore{store}, newRoot(t), cas.ErrFull, ""},
		{"ended context", ended, store, newRoot(t), reason, ""},
		{"used workspace", t.Context(), store, used, fs.ErrExist, "out"},
	} {
		t.Run(c.name, func(t *testing.T) {
			_, err := l.Stage(c.ctx, c.store, c.ws)
			wantError(t, err, c.want, c.text)
		})
	}
}

func TestRule075_DeepTreeIsStaged(t *testing.T) {
	t.Parallel()
	store := castest.NewMemory()
	root := chain(t, store, 1000, "d", files("f"))
	ws, _ := stage(t, store, must.Get(tree.Load(t.Context(), store, root))(t), "")
	deep := "out" + strings.Repeat("/d", 1000) + "/f"
	must.Get(ws.Lstat(deep))(t)
}
