// SPDX-License-Identifier: Apache-2.0

package tree_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/castest"
	"github.com/cloister-build/cloister/cas/tree"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"google.golang.org/protobuf/proto"
)

// execRoot returns an exec root after a run.
func execRoot(t testing.TB, lines ...string) *os.Root {
	t.Helper()
	out := newRoot(t)
	parse(t, lines...).make(t, out)
	return out
}

// capture captures w and checks that all blobs of the result are stored (rule 119).
func capture(t testing.TB, store cas.Store, out *os.Root, w tree.OutputSpec) *repb.ActionResult {
	t.Helper()
	var r repb.ActionResult
	b := cas.NewBatch(store)
	must.Get(tree.Capture(t.Context(), b, cas.SHA256, out, w, &r))(t)
	must.Succeed(t, b.Flush(t.Context()))
	ds := must.Get(cas.Closure(t.Context(), store, cas.SHA256, &r))(t)
	missing := must.Get(store.Missing(t.Context(), ds))(t)
	expect.That(t, len(missing) == 0, "missing blobs of the result: %v", missing)
	return &r
}

// captureError returns the error of Capture.
func captureError(t testing.TB, out *os.Root, w tree.OutputSpec) error {
	_, err := tree.Capture(t.Context(), cas.NewBatch(castest.NewMemory()), cas.SHA256, out, w, &repb.ActionResult{})
	return err
}

// describe writes a result as lines, without Trees.
func describe(r *repb.ActionResult) string {
	var b strings.Builder
	for _, f := range r.OutputFiles {
		fmt.Fprintf(&b, "file %q size %d exec %v\n", f.Path, f.Digest.SizeBytes, f.IsExecutable)
	}
	for _, d := range r.OutputDirectories {
		fmt.Fprintf(&b, "dir %q tree %v root %v sorted %v\n",
			d.Path, d.TreeDigest != nil, d.RootDirectoryDigest != nil, d.IsTopologicallySorted)
	}
	for _, field := range []struct {
		name  string
		links []*repb.OutputSymlink
	}{{"link", r.OutputSymlinks}, {"filelink", r.OutputFileSymlinks}, {"dirlink", r.OutputDirectorySymlinks}} {
		for _, l := range field.links {
			fmt.Fprintf(&b, "%s %q -> %q\n", field.name, l.Path, l.Target)
		}
	}
	return b.String()
}

func TestCapture(t *testing.T) {
	for _, c := range []struct {
		name   string
		root   []string
		wanted tree.OutputSpec
		want   []string // of describe
	}{
		{
			"Rule111MissingIsLeftOut",
			[]string{"a/present = 12", "a/file = 1"},
			tree.OutputSpec{Paths: []string{"a/missing", "a/present", "no/where/at/all", "a/file/below"}},
			[]string{`file "a/present" size 2 exec false`},
		},
		{
			"Rule111KindIsDiscovered",
			[]string{"f = 12", "d/x = 1", "l -> d"},
			tree.OutputSpec{Paths: []string{"d", "f", "l"}},
			[]string{
				`file "f" size 2 exec false`,
				`dir "d" tree true root false sorted true`,
				`link "l" -> "d"`,
			},
		},
		{
			"Rule113PathAsRequestedAndSorted",
			[]string{"w/z = 1", "w/a *= ", "up = 12"},
			tree.OutputSpec{Dir: "w", Paths: []string{"z", "../up", "a", "./a", "a"}},
			[]string{
				`file "../up" size 2 exec false`,
				`file "./a" size 0 exec true`,
				`file "a" size 0 exec true`,
				`file "z" size 1 exec false`,
			},
		},
		{
			"Rule113EmptyPathIsWorkingDirectory",
			[]string{"w/z = 1"},
			tree.OutputSpec{Dir: "w", Directories: []string{""}},
			[]string{`dir "" tree true root false sorted true`},
		},
		{
			"Rule114LinksAreVerbatim",
			[]string{"abs -> /etc/passwd", "dangling -> ../../../x//y/", "w/f = 1", "tofile -> w/f"},
			tree.OutputSpec{Paths: []string{"abs", "dangling", "tofile"}},
			[]string{
				`link "abs" -> "/etc/passwd"`,
				`link "dangling" -> "../../../x//y/"`,
				`link "tofile" -> "w/f"`,
			},
		},
		{
			"Rule114LinksOfOldFields",
			[]string{"df -> x", "a -> dangling", "f = 1", "d/"},
			tree.OutputSpec{Files: []string{"df", "f"}, Directories: []string{"a", "d", "nothing"}},
			[]string{
				`file "f" size 1 exec false`,
				`dir "d" tree true root false sorted true`,
				`link "a" -> "dangling"`,
				`link "df" -> "x"`,
				`filelink "df" -> "x"`,
				`dirlink "a" -> "dangling"`,
			},
		},
		{
			"Rule112UnresolvableLinks",
			[]string{"loop -> loop", "out -> ../../x", "abs -> /etc", "bound -> d/in/it", "d/", "any -> d", "f = 1"},
			tree.OutputSpec{Files: []string{"loop", "out", "abs"}, Directories: []string{"bound"}},
			[]string{
				`link "abs" -> "/etc"`, `link "bound" -> "d/in/it"`, `link "loop" -> "loop"`, `link "out" -> "../../x"`,
				`filelink "abs" -> "/etc"`, `filelink "loop" -> "loop"`, `filelink "out" -> "../../x"`,
				`dirlink "bound" -> "d/in/it"`,
			},
		},
		{
			"Rule112LinksOfTheKindDeclared",
			[]string{"d/x = 1", "ld -> d", "lf -> d/x"},
			tree.OutputSpec{
				Files:       []string{"lf"},
				Directories: []string{"ld"},
			},
			[]string{`link "ld" -> "d"`, `link "lf" -> "d/x"`, `filelink "lf" -> "d/x"`, `dirlink "ld" -> "d"`},
		},
		{
			"Rule112OutputPathsTakeAnyLink",
			[]string{"d/x = 1", "ld -> d", "lf -> d/x"},
			tree.OutputSpec{Paths: []string{"ld", "lf"}},
			[]string{`link "ld" -> "d"`, `link "lf" -> "d/x"`},
		},
		{
			"Rule111EmptyPathIsWorkingDirectory",
			[]string{"w/z = 1"},
			tree.OutputSpec{Dir: "w", Paths: []string{""}},
			[]string{`dir "" tree true root false sorted true`},
		},
		{
			"Rule78PathsOverrideOldFields",
			[]string{"f = 1", "d/x = 1"},
			tree.OutputSpec{Paths: []string{"f"}, Files: []string{"d"}, Directories: []string{"f"}},
			[]string{`file "f" size 1 exec false`},
		},
		{
			"Rule115DirectoryOnly",
			[]string{"d/x = 1"},
			tree.OutputSpec{Paths: []string{"d"}, Format: repb.Command_DIRECTORY_ONLY},
			[]string{`dir "d" tree false root true sorted false`},
		},
		{
			"Rule115Both",
			[]string{"d/x = 1"},
			tree.OutputSpec{Paths: []string{"d"}, Format: repb.Command_TREE_AND_DIRECTORY},
			[]string{`dir "d" tree true root true sorted true`},
		},
		{
			"Rule82UnknownFormatIsTree",
			[]string{"d/x = 1"},
			tree.OutputSpec{Paths: []string{"d"}, Format: 99},
			[]string{`dir "d" tree true root false sorted true`},
		},
		{
			"MaxBytesExactly",
			[]string{"a = 12", "d/b = 345"},
			tree.OutputSpec{Paths: []string{"a"}, MaxBytes: 2},
			[]string{`file "a" size 2 exec false`},
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			got := describe(capture(t, castest.NewMemory(), execRoot(t, c.root...), c.wanted))
			expect.Equal(t, got, strings.Join(c.want, "\n")+"\n")
		})
	}
}

func TestCaptureRefuses(t *testing.T) {
	for _, c := range []struct {
		name string
		root []string
		want tree.OutputSpec
		kind error
		text string
	}{
		{
			"Rule112DirectoryAsFile",
			[]string{"ok = 1", "x/"},
			tree.OutputSpec{Files: []string{"ok", "x"}},
			tree.ErrOutput, `"x" is a directory, declared as a file`,
		},
		{
			"Rule112FileAsDirectory",
			[]string{"ok/", "x = 1"},
			tree.OutputSpec{Directories: []string{"ok", "x"}},
			tree.ErrOutput, `"x" is a file, declared as a directory`,
		},
		{
			"Rule112LinkToDirectoryAsFile",
			[]string{"ok = 1", "d/x = 1", "l -> d"},
			tree.OutputSpec{Files: []string{"ok", "l"}},
			tree.ErrOutput, `"l" is a symlink to a directory, declared as a file`,
		},
		{
			"Rule112LinkToFileAsDirectory",
			[]string{"ok/", "d/x = 1", "a/l -> ../d/x"},
			tree.OutputSpec{Directories: []string{"ok", "a/l"}},
			tree.ErrOutput, `"a/l" is a symlink to a file of another kind`,
		},
		{
			"SymlinkForParent",
			[]string{"ok = 1", "in/secret = 1", "a/b -> ../in"},
			tree.OutputSpec{Paths: []string{"ok", "a/b/secret"}},
			tree.ErrOutput,
			`"a/b/secret" lies behind the symlink "a/b"`,
		},
		{
			"SymlinkForWorkingDirectory",
			[]string{"ok = 1", "in/secret = 1", "w -> in"},
			tree.OutputSpec{Dir: "w", Paths: []string{"../ok", "secret"}},
			tree.ErrOutput, `symlink "w"`,
		},
		{
			"MaxBytes",
			[]string{"ok = 1", "d/a = 12", "d/b = 345"},
			tree.OutputSpec{Paths: []string{"d", "ok"}, MaxBytes: 5},
			tree.ErrOutput, "5 bytes",
		},
		{
			"Escape",
			[]string{"ok = 1"},
			tree.OutputSpec{Paths: []string{"ok", "x/../../etc"}},
			cas.ErrInvalid,
			"leaves",
		},
		{
			"Absolute",
			[]string{"ok = 1"},
			tree.OutputSpec{Paths: []string{"ok", "/etc/passwd"}},
			cas.ErrInvalid,
			"absolute",
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := &repb.ActionResult{ExitCode: 3}
			_, err := tree.Capture(t.Context(), cas.NewBatch(castest.NewMemory()), cas.SHA256, execRoot(t, c.root...),
				c.want, r)
			wantError(t, err, c.kind, c.text)
			if c.kind == tree.ErrOutput {
				// One output is bad, and the other is kept.
				expect.Equal(t, len(r.OutputFiles)+len(r.OutputDirectories), 1, "outputs, of which one is valid: %v", r)
			} else if !proto.Equal(r, &repb.ActionResult{ExitCode: 3}) {
				t.Errorf("the failed call changed the result to %v", r)
			}
		})
	}
}

func TestRule115_TreeIsDeterministic(t *testing.T) {
	lines := []string{"d/b = 1", "d/a/x = 2", "d/c/x = 2", "d/l -> a"}
	store := castest.NewMemory()
	first := capture(t, store, execRoot(t, lines...), tree.OutputSpec{Paths: []string{"d"}})
	out := newRoot(t)
	for i := range lines { // in another creation order
		p := parse(t, lines[len(lines)-1-i])
		if err := out.Mkdir("d", 0o700); err != nil && !errors.Is(err, os.ErrExist) {
			t.Fatal(err)
		}
		sub := must.Get(out.OpenRoot("d"))(t)
		p.kids["d"].make(t, sub)
		must.Succeed(t, sub.Close())
	}
	second := capture(t, store, out, tree.OutputSpec{Paths: []string{"d"}})
	expect.That(t, proto.Equal(first, second), "equal directories gave\n%v\nand\n%v", first, second)
}

// Rule 115: Directories are stored separately only if requested.
func TestCaptureStoresDirectoriesOnlyForFormat(t *testing.T) {
	store := castest.NewMemory()
	capture(t, store, execRoot(t, "d/x = 1"), tree.OutputSpec{Paths: []string{"d"}})
	if store.Len() != 2 { // x and the Tree
		t.Errorf("%d blobs were stored, want 2", store.Len())
	}
}

// Rule 116. Root can read everything, so the test checks the modes.
func TestRule116_UnreadableOutputsAreRead(t *testing.T) {
	store := castest.NewMemory()
	out := execRoot(t, "p/d/f *= 1", "p/d/s/g = 2", "p/x *= 3")
	unreadable := []string{"p/d/s/g", "p/d/f", "p/x", "p/d/s", "p/d", "p"}
	for _, p := range unreadable {
		mode := os.FileMode(0)
		if p == "p/x" {
			mode = 0o011 // is still executable
		}
		must.Succeed(t, out.Chmod(p, mode))
	}
	r := capture(t, store, out, tree.OutputSpec{Paths: []string{"p/d", "p/x"}})
	expect.That(t, r.OutputFiles[0].IsExecutable, "a file of mode 0011 was captured as not executable")
	for _, p := range unreadable {
		info := must.Get(out.Lstat(p))(t)
		expect.That(t, info.Mode()&0o400 != 0, "%s still has mode %v", p, info.Mode())
	}
	into := newRoot(t)
	must.Succeed(t, tree.Extract(t.Context(), store, cas.SHA256, r, into))
	same(t, "output", read(t, into, "."), parse(t, "p/d/f = 1", "p/d/s/g = 2", "p/x *= 3"))
}

// A run can nest directories without limit, but outputs must be usable as inputs.
func TestCaptureLimitsDepth(t *testing.T) {
	t.Parallel()
	for depth, want := range map[int]error{1000: nil, 1001: tree.ErrOutput} {
		out := newRoot(t)
		must.Succeed(t, out.MkdirAll("d"+strings.Repeat("/d", depth), 0o755))
		err := captureError(t, out, tree.OutputSpec{Paths: []string{"d"}})
		expect.Error(t, err, want, "%d levels", depth)
	}
}

func TestRule075_LengthOfPathsOfOutputsIsLimited(t *testing.T) {
	t.Parallel()
	name := strings.Repeat("n", 199)
	for depth, want := range map[int]error{19: nil, 20: tree.ErrOutput} {
		out := newRoot(t)
		must.Succeed(t, out.MkdirAll("d"+strings.Repeat("/"+name, depth), 0o755))
		err := captureError(t, out, tree.OutputSpec{Paths: []string{"d"}})
		if !errors.Is(err, want) || err != nil && len(err.Error()) > 500 {
			t.Errorf("%d levels: got %v, want %v", depth, err, want)
		}
	}
}

// TestRule119_ManyOutputs checks that 5,000 outputs, some inside others, are stored in few calls.
func TestRule119_ManyOutputs(t *testing.T) {
	t.Parallel()
	if testing.Short() {
		t.Skip("5,000 files")
	}
	out := newRoot(t)
	var paths []string
	for i := range 50 {
		dir := fmt.Sprintf("d%02d", i)
		must.Succeed(t, out.Mkdir(dir, 0o755))
		paths = append(paths, dir)
		for j := range 99 {
			paths = append(paths, fmt.Sprintf("%s/%03d", dir, j))
			must.Succeed(t, out.WriteFile(paths[len(paths)-1], fmt.Append(nil, i, j), 0o644))
		}
	}
	store := &batches{Memory: castest.NewMemory()}
	r := capture(t, store, out, tree.OutputSpec{Paths: paths, Properties: []string{"mtime"}})
	expect.That(t, len(r.OutputFiles) == 4_950 && len(r.OutputDirectories) == 50,
		"got %d files and %d directories, want 4950 and 50", len(r.OutputFiles), len(r.OutputDirectories))
	if n := store.calls.Load(); n > 20 {
		t.Errorf("they were stored in %d calls, want at most 20", n)
	}
}

// A batches counts the calls that store blobs.
type batches struct {
	*castest.Memory
	calls atomic.Int64
}

func (b *batches) Put(ctx context.Context, d cas.Digest, r io.Reader) error {
	b.calls.Add(1)
	return b.Memory.Put(ctx, d, r)
}

func (b *batches) PutAll(ctx context.Context, blobs []cas.Blob) []error {
	b.calls.Add(1)
	return cas.PutAll(ctx, b.Memory, blobs)
}

func TestIngestKeepsModes(t *testing.T) {
	dir := execRoot(t, "f = 1")
	must.Succeed(t, dir.Chmod("f", 0o040))
	tree.Ingest(t.Context(), castest.NewMemory(), cas.SHA256, dir) // fails unless we are root
	info := must.Get(dir.Lstat("f"))(t)
	expect.That(t, info.Mode().Perm() == 0o040, "mode is %v, want 0040", info.Mode())
}

func TestExtractReplacesAndMerges(t *testing.T) {
	store := castest.NewMemory()
	out := execRoot(t, "d/same = new", "d/sub/f *= new", "d/l -> x", "file = new", "deep/er/f = new", "dl -> d")
	r := capture(t, store, out, tree.OutputSpec{Paths: []string{"d", "file", "deep/er/f", "dl"}})
	into := execRoot(t, "d/.cloister-extract = left by a crash", "d/same = old", "d/other = kept",
		"d/l = was a file", "file -> victim", "victim = kept", "dl = was a file")
	must.Succeed(t, tree.Extract(t.Context(), store, cas.SHA256, r, into))
	same(t, "directory", read(t, into, "."), parse(t, "d/same = new", "d/other = kept",
		"d/sub/f *= new", "d/l -> x", "file = new", "victim = kept", "deep/er/f = new", "dl -> d"))
}

func TestExtractStaysInside(t *testing.T) {
	store := castest.NewMemory()
	d := putBytes(t, store, []byte("evil")).Proto()
	outside := newRoot(t)
	for name, r := range map[string]*repb.ActionResult{
		"Absolute": {OutputFiles: []*repb.OutputFile{{Path: path.Join(outside.Name(), "f"), Digest: d}}},
		"DotDot":   {OutputFiles: []*repb.OutputFile{{Path: "../f", Digest: d}}},
		"Symlink":  {OutputFiles: []*repb.OutputFile{{Path: "way/f", Digest: d}}},
		"Link":     {OutputSymlinks: []*repb.OutputSymlink{{Path: "way/f", Target: "x"}}},
	} {
		t.Run(name, func(t *testing.T) {
			into := newRoot(t)
			must.Succeed(t, into.Symlink(outside.Name(), "way"))
			expect.That(t, tree.Extract(t.Context(), store, cas.SHA256, r, into) != nil, "Extract succeeded")
			if got := read(t, outside, "."); len(got.kids) > 0 {
				t.Errorf("written outside:\n%s", got)
			}
		})
	}
}

func TestExtractRefusesMalformedTree(t *testing.T) {
	store := castest.NewMemory()
	lost := parent("x", putBytes(t, store, []byte("no child")))
	for name, m := range map[string]*repb.Tree{
		"ChildAbsent":  {Root: lost},
		"NotCanonical": {Root: files("b", "a")},
		"EscapingName": {Root: files("../x")},
	} {
		t.Run(name, func(t *testing.T) {
			into := newRoot(t)
			d := &repb.OutputDirectory{Path: "d", TreeDigest: putProto(t, store, m).Proto()}
			r := &repb.ActionResult{OutputDirectories: []*repb.OutputDirectory{d}}
			wantError(t, tree.Extract(t.Context(), store, cas.SHA256, r, into), cas.ErrInvalid, `output directory "d"`)
		})
	}
}

// If a blob cannot be read, the old file stays unchanged.
func TestExtractReplacesWholeFilesOnly(t *testing.T) {
	store := castest.NewMemory()
	d := putBytes(t, store, []byte("new content"))
	store.Corrupt(d)
	into := execRoot(t, "f = old")
	r := &repb.ActionResult{OutputFiles: []*repb.OutputFile{{Path: "f", Digest: d.Proto()}}}
	wantError(t, tree.Extract(t.Context(), store, cas.SHA256, r, into), cas.ErrCorrupt, "f")
	same(t, "directory", read(t, into, "."), parse(t, "f = old"))
	store.Delete(d)
	wantError(t, tree.Extract(t.Context(), store, cas.SHA256, r, into), cas.ErrNotFound, d.String())
}
