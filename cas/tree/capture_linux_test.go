// SPDX-License-Identifier: Apache-2.0

package tree_test

import (
	"os"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/castest"
	"github.com/cloister-build/cloister/cas/tree"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
)

// mknod makes a named pipe or a socket. Opening a named pipe would block forever.
func mknod(t *testing.T, dir *os.Root, name string, kind uint32) {
	t.Helper()
	must.Succeed(t, syscall.Mknod(filepath.Join(dir.Name(), name), kind|0o666, 0))
}

func TestRule116_DeclaredSpecialFileIsRefused(t *testing.T) {
	s := []string{"s"}
	for kind, text := range map[uint32]string{
		syscall.S_IFIFO:  `"s" is a named pipe`,
		syscall.S_IFSOCK: `"s" is a socket`,
	} {
		for _, w := range []tree.OutputSpec{{Paths: s}, {Files: s}, {Directories: s}} {
			out := newRoot(t)
			mknod(t, out, "s", kind)
			wantError(t, captureError(t, out, w), tree.ErrOutput, text)
		}
	}
}

func TestRule116_SpecialFilesInDirectoriesAreLeftOut(t *testing.T) {
	store := castest.NewMemory()
	out := execRoot(t, "d/a = 1", "d/z/b = 2")
	mknod(t, out, "d/fifo", syscall.S_IFIFO)
	mknod(t, out, "d/z/socket", syscall.S_IFSOCK)
	for _, name := range []string{"d/z/t", "d/z/u", "d/z/v\xc3\xa9"} {
		mknod(t, out, name, syscall.S_IFIFO)
	}
	omitted := must.Get(tree.Capture(t.Context(), cas.NewBatch(store), cas.SHA256, out,
		tree.OutputSpec{Paths: []string{"d"}}, &repb.ActionResult{}))(t)
	expect.Equal(t, omitted, `the named pipe "d/fifo", the socket "d/z/socket", the named pipe "d/z/t" and 2 more`,
		"omitted")
	r := capture(t, store, out, tree.OutputSpec{Paths: []string{"d"}})
	into := newRoot(t)
	must.Succeed(t, tree.Extract(t.Context(), store, cas.SHA256, r, into))
	same(t, "output", read(t, into, "."), parse(t, "d/a = 1", "d/z/b = 2"))
}

func TestRule117_NamesThatAreNotUTF8AreRefused(t *testing.T) {
	for name, make := range map[string]func(out *os.Root) error{
		"File":      func(out *os.Root) error { return out.WriteFile("d/\xff", nil, 0o644) },
		"Directory": func(out *os.Root) error { return out.Mkdir("d/\xff", 0o755) },
		"Target":    func(out *os.Root) error { return out.Symlink("\xff", "d/l") },
	} {
		t.Run(name, func(t *testing.T) {
			out := execRoot(t, "d/")
			must.Succeed(t, make(out))
			wantError(t, captureError(t, out, tree.OutputSpec{Paths: []string{"d"}}), tree.ErrOutput, `\xff`)
		})
	}
}

func TestIngestRejectsSpecialFiles(t *testing.T) {
	dir := execRoot(t, "d/a = 1")
	mknod(t, dir, "d/fifo", syscall.S_IFIFO)
	_, err := tree.Ingest(t.Context(), castest.NewMemory(), cas.SHA256, dir)
	wantError(t, err, cas.ErrInvalid, `"d/fifo" is a named pipe`)
}
