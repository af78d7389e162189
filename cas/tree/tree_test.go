// SPDX-License-Identifier: Apache-2.0

package tree_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/castest"
	"github.com/cloister-build/cloister/cas/tree"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
)

// empty is the digest of both the empty file and the empty Directory.
var empty = cas.SHA256.Sum(nil).Proto()

func file(name string) *repb.FileNode     { return &repb.FileNode{Name: name, Digest: empty} }
func sub(name string) *repb.DirectoryNode { return &repb.DirectoryNode{Name: name, Digest: empty} }
func link(name, target string) *repb.SymlinkNode {
	return &repb.SymlinkNode{Name: name, Target: target}
}

// parent returns a Directory with one subdirectory.
func parent(name string, d cas.Digest) *repb.Directory {
	return &repb.Directory{Directories: []*repb.DirectoryNode{{Name: name, Digest: d.Proto()}}}
}

func files(names ...string) *repb.Directory {
	m := &repb.Directory{}
	for _, n := range names {
		m.Files = append(m.Files, file(n))
	}
	return m
}

func TestRule074_DirectoryThatIsNotCanonicalIsRefused(t *testing.T) {
	const long = "0123456789012345678901234567890123456789012345678901234567890123"
	for _, c := range []struct {
		name string
		dir  *repb.Directory
		want string // in the error
	}{
		{"UnsortedFiles", files("b", "a"), `file "a" follows "b"`},
		{"FileTwice", files("a", "a"), `file "a" follows "a"`},
		{
			"UnsortedDirectories", &repb.Directory{Directories: []*repb.DirectoryNode{sub("b"), sub("a")}},
			`directory "a" follows "b"`,
		},
		{
			"DirectoryTwice", &repb.Directory{Directories: []*repb.DirectoryNode{sub("b"), sub("b")}},
			`directory "b" follows "b"`,
		},
		{
			"UnsortedSymlinks", &repb.Directory{Symlinks: []*repb.SymlinkNode{link("b", "x"), link("a", "x")}},
			`symlink "a" follows "b"`,
		},
		{
			"FileAndDirectory",
			&repb.Directory{Files: files("a", "b").Files, Directories: []*repb.DirectoryNode{sub("b")}},
			`"b" is both`,
		},
		{
			"FileAndSymlink",
			&repb.Directory{Files: files("b").Files, Symlinks: []*repb.SymlinkNode{link("a", "x"), link("b", "x")}},
			`"b" is both`,
		},
		{
			"DirectoryAndSymlink",
			&repb.Directory{
				Directories: []*repb.DirectoryNode{sub("a")},
				Symlinks:    []*repb.SymlinkNode{link("a", "x")},
			},
			`"a" is both`,
		},
		{"EmptyName", files(""), `name "" of a file is empty`},
		{"Dot", files("."), "reserved"},
		{
			"DotDot", &repb.Directory{Directories: []*repb.DirectoryNode{sub("..")}},
			`name ".." of a directory is reserved`,
		},
		{"Slash", files("a/b"), "slash"},
		{"AbsoluteName", &repb.Directory{Symlinks: []*repb.SymlinkNode{link("/a", "x")}}, "slash"},
		{"NUL", files("a\x00b"), "NUL"},
		{"LongName", files(strings.Repeat("a", 256)), "longer than 255"},
		{"NoDigest", &repb.Directory{Files: []*repb.FileNode{{Name: "a"}}}, `file "a": digest is not set`},
		{
			"NoDirectoryDigest", &repb.Directory{Directories: []*repb.DirectoryNode{{Name: "a"}}},
			`directory "a": digest is not set`,
		},
		{
			"ShortHash",
			&repb.Directory{Files: []*repb.FileNode{{Name: "a", Digest: &repb.Digest{Hash: "ab"}}}},
			"2 characters",
		},
		{
			"UpperCaseHash",
			&repb.Directory{Files: []*repb.FileNode{{Name: "a", Digest: &repb.Digest{Hash: "A" + long[1:]}}}},
			"lower-case",
		},
		{
			"NegativeSize",
			&repb.Directory{Files: []*repb.FileNode{{Name: "a", Digest: &repb.Digest{Hash: long, SizeBytes: -1}}}},
			"negative",
		},
		{
			"EmptyTarget", &repb.Directory{Symlinks: []*repb.SymlinkNode{link("a", "")}},
			`symlink "a" has the target ""`,
		},
		{"TargetWithNUL", &repb.Directory{Symlinks: []*repb.SymlinkNode{link("a", "x\x00y")}}, `symlink "a"`},
		{
			"LongTarget", &repb.Directory{Symlinks: []*repb.SymlinkNode{link("a", strings.Repeat("x", 4096))}},
			`symlink "a"`,
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			store := castest.NewMemory()
			bad := putProto(t, store, c.dir)
			// Not the root, since the message must name the Directory.
			root := putProto(t, store, parent("d", bad))
			_, err := tree.Load(t.Context(), store, root)
			wantError(t, err, cas.ErrInvalid, c.want)
			wantError(t, err, cas.ErrInvalid, bad.String())
		})
	}
}

func TestRule075_BlobThatIsNoDirectoryIsRefused(t *testing.T) {
	for name, b := range map[string]string{
		"Text":        "not a message",
		"NameNotUTF8": "\x0a\x03\x0a\x01\xff", // files { name: "\xff" }
	} {
		t.Run(name, func(t *testing.T) {
			store := castest.NewMemory()
			bad := putBytes(t, store, []byte(b))
			root := putProto(t, store, parent("d", bad))
			_, err := tree.Load(t.Context(), store, root)
			wantError(t, err, cas.ErrInvalid, bad.String())
		})
	}
}

func TestRule072_AllMissingBlobsAreReported(t *testing.T) {
	store := castest.NewMemory()
	n := parse(t, "a/b/lost = 1", "a/kept = 2", "lost = 3", "gone/below = 4", "z/lost = 3")
	root := n.put(t, store)
	want := []cas.Digest{
		n.kids["gone"].put(t, castest.NewMemory()),
		cas.SHA256.Sum([]byte("3")), cas.SHA256.Sum([]byte("1")),
	}
	for _, d := range want {
		store.Delete(d)
	}
	_, err := tree.Load(t.Context(), store, root)
	wantMissingBlobs(t, err, want...)
	for _, text := range []string{"3 blobs", want[0].String(), want[2].String()} {
		wantError(t, err, cas.ErrNotFound, text)
	}

	store.Delete(root)
	_, err = tree.Load(t.Context(), store, root)
	wantMissingBlobs(t, err, root)
}

func TestLoadReportsCorruption(t *testing.T) {
	store := castest.NewMemory()
	root := parse(t, "a = 1").put(t, store)
	store.Corrupt(root)
	_, err := tree.Load(t.Context(), store, root)
	wantError(t, err, cas.ErrCorrupt, "")
}

// chain returns a tree of depth directories below the root, and at the end the given Directory.
func chain(t testing.TB, store cas.Store, depth int, name string, end *repb.Directory) cas.Digest {
	d := putProto(t, store, end)
	for range depth {
		d = putProto(t, store, parent(name, d))
	}
	return d
}

func TestRule075_DepthIsLimited(t *testing.T) {
	t.Parallel()
	store := castest.NewMemory()
	expect.Error(t, expect.Err(tree.Load(t.Context(), store, chain(t, store, 1000, "d", files("f")))), nil,
		"1000 levels")
	_, err := tree.Load(t.Context(), store, chain(t, store, 1001, "d", files("f")))
	wantError(t, err, cas.ErrInvalid, "deeper than 1000")
	// Much deeper, with every Directory also a child of the root, so that a breadth-first depth is wrong.
	d := putProto(t, store, files("f"))
	all := &repb.Directory{}
	for i := range 3000 {
		n := &repb.DirectoryNode{Name: fmt.Sprintf("%04d", i), Digest: d.Proto()}
		all.Directories = append(all.Directories, n)
		d = putProto(t, store, parent("d", d))
	}
	for range 2 { // shallowest first, then deepest first
		_, err = tree.Load(t.Context(), store, putProto(t, store, all))
		wantError(t, err, cas.ErrInvalid, "deeper than 1000")
		slices.Reverse(all.Directories)
		for i, n := range all.Directories {
			n.Name = fmt.Sprintf("%04d", i)
		}
	}
}

func TestRule075_LengthOfPathsIsLimited(t *testing.T) {
	store := castest.NewMemory()
	name := strings.Repeat("n", 99)
	expect.Error(t, expect.Err(tree.Load(t.Context(), store, chain(t, store, 39, name, files(name)))), nil,
		"path of 3999 bytes")
	_, err := tree.Load(t.Context(), store, chain(t, store, 40, name, files(name)))
	wantError(t, err, cas.ErrInvalid, "longer than 4000")
}

// Twenty-four small Directories describe 10^24 files.
func TestLoadLimitsExpansion(t *testing.T) {
	t.Parallel()
	store := castest.NewMemory()
	d := putProto(t, store, files("f"))
	for range 24 {
		m := &repb.Directory{}
		for i := range 10 {
			m.Directories = append(m.Directories, &repb.DirectoryNode{Name: fmt.Sprint(i), Digest: d.Proto()})
		}
		d = putProto(t, store, m)
	}
	_, err := tree.Load(t.Context(), store, d)
	wantError(t, err, cas.ErrInvalid, "more than 1000000 entries")
}

func TestLoadLimitsDistinctDirectories(t *testing.T) {
	t.Parallel()
	store := castest.NewMemory()
	root := &repb.Directory{}
	for i := range 20 {
		m := &repb.Directory{}
		for j := range 10_000 {
			// They need not exist, since the limit is checked before they are read.
			d := cas.SHA256.Sum(fmt.Append(nil, i, j))
			m.Directories = append(m.Directories,
				&repb.DirectoryNode{Name: fmt.Sprintf("%05d", j), Digest: d.Proto()})
		}
		root.Directories = append(root.Directories,
			&repb.DirectoryNode{Name: fmt.Sprintf("%02d", i), Digest: putProto(t, store, m).Proto()})
	}
	c := &counter{Store: store, opened: map[cas.Digest]int{}}
	_, err := tree.Load(t.Context(), c, putProto(t, store, root))
	wantError(t, err, cas.ErrInvalid, "more than 200000 distinct directories")
	expect.Equal(t, len(c.opened), 21, "Directories were read before the error")
}

// A level is rejected as soon as it exceeds the limit, before all of it is decoded.
func TestLoadLimitsEntriesOfOneLevel(t *testing.T) {
	t.Parallel()
	store := castest.NewMemory()
	root := &repb.Directory{}
	for i := range 16 {
		m := &repb.Directory{}
		for j := range 100_000 {
			m.Symlinks = append(m.Symlinks, link(fmt.Sprintf("%02d%05d", i, j), "x"))
		}
		root.Directories = append(root.Directories,
			&repb.DirectoryNode{Name: fmt.Sprintf("%02d", i), Digest: putProto(t, store, m).Proto()})
	}
	c := &counter{Store: store, opened: map[cas.Digest]int{}}
	_, err := tree.Load(t.Context(), c, putProto(t, store, root))
	wantError(t, err, cas.ErrInvalid, "more than 1000000 entries")
	if len(c.opened) > 1+10+4 { // the root, ten that fit, and the parallel reads
		t.Errorf("%d Directories were read before the error, want at most 15", len(c.opened))
	}
}

// An endingContext ends at the first call of Err.
type endingContext struct {
	context.Context
	end context.CancelFunc
}

func (e endingContext) Err() error {
	e.end()
	return e.Context.Err()
}

func TestLoadEndsBetweenLevelsWithContext(t *testing.T) {
	c := &counter{Store: castest.NewMemory(), opened: map[cas.Digest]int{}}
	root := parse(t, "a/1/", "b/2/", "c/3/").put(t, c)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	expect.Error(t, expect.Err(tree.Load(endingContext{ctx, cancel}, c, root)), context.Canceled)
	expect.Equal(t, len(c.opened), 1, "Directories were read (only the root)")
}

// A counter counts the calls of Open for each blob.
type counter struct {
	cas.Store
	mu     sync.Mutex
	opened map[cas.Digest]int // guarded by mu
}

func (c *counter) Open(ctx context.Context, d cas.Digest, off int64) (io.ReadCloser, error) {
	c.mu.Lock()
	c.opened[d]++
	c.mu.Unlock()
	return c.Store.Open(ctx, d, off)
}

func TestLoadReadsEachDirectoryOnce(t *testing.T) {
	c := &counter{Store: castest.NewMemory(), opened: map[cas.Digest]int{}}
	root := parse(t, "a/same/f = 1", "b/c/same/f = 1", "same/f = 1").put(t, c)
	must.Get(tree.Load(t.Context(), c, root))(t)
	for d, n := range c.opened {
		expect.Equal(t, n, 1, "Directory %s was read", d)
	}
	if len(c.opened) != 4 { // root, a (also b/c), b, same
		t.Errorf("%d blobs were read, want 4", len(c.opened))
	}
}

func TestInputTotalsAndLookup(t *testing.T) {
	store := castest.NewMemory()
	n := parse(t, "a/same/f = 123", "b/same/f = 123", "l -> a/same", "tool *= 12", "empty/")
	in := load(t, store, n)
	expect.Equal(t, in.Digest(), n.put(t, store), "Digest")
	expect.That(t, in.Files() == 3 && in.Bytes() == 8, "got %d files of %d bytes, want 3 of 8", in.Files(), in.Bytes())
	for p, want := range map[string]tree.Kind{
		"": tree.Directory, ".": tree.Directory, "a": tree.Directory, "a/same": tree.Directory,
		"empty":    tree.Directory,
		"a/same/f": tree.File, "tool": tree.File, "l": tree.Symlink,
		"l/f": 0, "tool/x": 0, "zzz": 0, "a/zzz": 0, "a/same/f/g": 0, "empty/x": 0,
	} {
		if got, ok := in.Lookup(p); got != want || ok != (want != 0) {
			t.Errorf("Lookup(%q): got %v, %v, want %v", p, got, ok, want)
		}
	}
}

// wantMissingBlobs checks that err is a MissingError with exactly the blobs want.
func wantMissingBlobs(t testing.TB, err error, want ...cas.Digest) {
	t.Helper()
	var missing *tree.MissingError
	expect.That(t, errors.As(err, &missing) && slices.Equal(missing.Blobs, want),
		"got error %v, want MissingError for %v", err, want)
}

// wantError checks that err is kind and contains text.
func wantError(t testing.TB, err, kind error, text string) {
	t.Helper()
	expect.That(t, errors.Is(err, kind) && strings.Contains(fmt.Sprint(err), text),
		"got error %v, want %v with %q", err, kind, text)
}

// Errors name the missing argument, and nothing panics.
func TestMissingArgumentsAreErrors(t *testing.T) {
	ctx, f, m := t.Context(), cas.SHA256, castest.NewMemory()
	dir := must.Get(os.OpenRoot(t.TempDir()))(t)
	defer dir.Close()
	result := &repb.ActionResult{}
	s := tree.NewStager(tree.StagerConfig{})
	for name, call := range map[string]func() error{
		"store: Load":      func() error { _, err := tree.Load(ctx, nil, f.Sum(nil)); return err },
		"digest: Load":     func() error { _, err := tree.Load(ctx, m, cas.Digest{}); return err },
		"store: Extract":   func() error { return tree.Extract(ctx, nil, f, result, dir) },
		"directory: Extr.": func() error { return tree.Extract(ctx, m, f, result, nil) },
		"store: Ingest":    func() error { _, err := tree.Ingest(ctx, nil, f, dir); return err },
		"directory: Ing.":  func() error { _, err := tree.Ingest(ctx, m, f, nil); return err },
		"function: Ingest": func() error { _, err := tree.Ingest(ctx, m, 0, dir); return err },
		"store: Capture": func() error {
			_, err := tree.Capture(ctx, nil, f, dir, tree.OutputSpec{}, result)
			return err
		},
		"store: Stage": func() error { _, err := s.Stage(ctx, nil, &cas.Instance{}, nil); return err },
	} {
		word, _, _ := strings.Cut(name, ":")
		expect.Message(t, call(), word, "%s", name)
	}
}
