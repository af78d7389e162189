// SPDX-License-Identifier: Apache-2.0

package blobview

import (
	"context"
	"fmt"
	"math"
	"strings"
	"testing"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/castest"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
)

// tree stores a tree and returns its root: a/ has files x (2 bytes) and y (3), b/ has a/ again, z has 5 bytes.
func tree(t *testing.T, s cas.Store) cas.Digest {
	file := func(name, data string) *repb.FileNode {
		return &repb.FileNode{Name: name, Digest: put(t, s, data).Proto()}
	}
	sub := func(name string, d cas.Digest) []*repb.DirectoryNode {
		return []*repb.DirectoryNode{{Name: name, Digest: d.Proto()}}
	}
	a := putMessage(t, s, &repb.Directory{Files: []*repb.FileNode{file("x", "xx"), file("y", "yyy")}})
	b := putMessage(t, s, &repb.Directory{Directories: sub("a", a), Symlinks: []*repb.SymlinkNode{{Name: "l", Target: "\x1b"}}})
	return putMessage(t, s, &repb.Directory{Files: []*repb.FileNode{file("z", "zzzzz")}, Directories: append(sub("a", a), sub("b", b)...)})
}

func show(entries []Entry) string {
	var all []string
	for _, e := range entries {
		all = append(all, strings.TrimSpace(fmt.Sprintf("%s %d %d %s", e.Path, e.Files, e.Bytes, e.Read)))
	}
	return strings.Join(all, ", ")
}

func TestInputs(t *testing.T) {
	s := castest.NewMemory()
	root := tree(t, s)
	log := put(t, s, "action x\n2 of 5 inputs were never read\nunread   a/x\nunread   b/a/x\nunread   b/a/y\n")
	unread := must.Get(ReadUnread(t.Context(), s, log))(t)
	must.Succeed(t, WithInputs(t.Context(), s, root, nil, func(in *Inputs) error {
		expect.Equal(t, show(must.Get(in.Listing(""))(t)), "a 2 5, b 2 5, z 1 5")
		expect.Equal(t, show(must.Get(in.Listing("/b/"))(t)), "b/a 2 5, b/l 0 0")
		_, err := in.Listing("b/c")
		expect.Error(t, err, cas.ErrNotFound)
		found, all, err := in.Search("y")
		expect.That(t, err == nil && all && show(found) == "a/y 1 3, b/a/y 1 3", "%v %t %v", found, all, err)
		return nil
	}))
	must.Succeed(t, WithInputs(t.Context(), s, root, unread, func(in *Inputs) error {
		listing := must.Get(in.Listing(""))(t)
		expect.Equal(t, show(listing), "a 2 5 1 unread, b 2 5 unread, z 1 5 read")
		expect.Equal(t, show(must.Get(in.Listing("a"))(t)), "a/x 1 2 unread, a/y 1 3 read")
		var area float64
		for _, r := range in.Treemap(listing) {
			expect.That(t, r.W > 0 && r.H > 0 && r.X >= 0 && r.Y >= 0 && r.X+r.W <= mapWidth+1e-6 && r.Y+r.H <= mapHeight+1e-6, "%+v", r)
			if !r.Inner {
				area += r.W * r.H
			}
		}
		expect.That(t, math.Abs(area-mapWidth*mapHeight) < 1, "the treemap covers %v of %d", area, mapWidth*mapHeight)
		return nil
	}))
	for text, want := range map[string]string{"exit code 0\n": "", "unread   z\nand 3 more\n": "at least 0 unread"} {
		u := must.Get(ReadUnread(t.Context(), s, put(t, s, text)))(t)
		e := Entry{Kind: Directory, Path: "a", Sum: Sum{Files: 2}}
		u.mark(&e)
		expect.Equal(t, e.Read, want)
	}
}

// Absent directories make sums partial, and are no error below the root.
func TestAbsentDirectories(t *testing.T) {
	s := castest.NewMemory()
	absent := cas.SHA256.Sum([]byte("absent"))
	root := putMessage(t, s, &repb.Directory{Directories: []*repb.DirectoryNode{{Name: "d", Digest: absent.Proto()}}})
	must.Succeed(t, WithInputs(t.Context(), s, root, nil, func(in *Inputs) error {
		all := must.Get(in.Listing(""))(t)
		expect.That(t, len(all) == 1 && all[0].Partial, "%+v", all)
		_, err := in.Listing("d")
		expect.Error(t, err, cas.ErrNotFound)
		_, whole, err := in.Search("x")
		expect.That(t, !whole && err == nil, "%t, %v", whole, err)
		return nil
	}))
	must.Succeed(t, WithInputs(t.Context(), s, absent, nil, func(in *Inputs) error {
		_, err := in.Listing("")
		expect.Error(t, err, cas.ErrNotFound)
		return nil
	}))
}

// Forty Directories describe 2^40 files; a search visits and finds a bounded number of them.
func TestHostileTree(t *testing.T) {
	s := castest.NewMemory()
	d := putMessage(t, s, &repb.Directory{Files: []*repb.FileNode{{Name: "f", Digest: (&repb.Digest{Hash: strings.Repeat("0", 64), SizeBytes: 1 << 40})}}})
	for range 40 {
		d = putMessage(t, s, &repb.Directory{Directories: []*repb.DirectoryNode{{Name: "a", Digest: d.Proto()}, {Name: "b", Digest: d.Proto()}}})
	}
	must.Succeed(t, WithInputs(t.Context(), s, d, nil, func(in *Inputs) error {
		all := must.Get(in.Listing(""))(t)
		expect.That(t, all[0].Files == 1<<39 && all[0].Bytes == math.MaxInt64, "%+v", all[0].Sum)
		found, whole, err := in.Search("f")
		expect.That(t, len(found) == maxHits && !whole && err == nil, "%d found, %t, %v", len(found), whole, err)
		_, whole, err = in.Search("nowhere")
		expect.That(t, !whole && err == nil, "%t, %v", whole, err)
		return nil
	}))
}

// A large Directory that many others name is searched a bounded number of times, and only while somebody waits.
func TestSearchesAreBounded(t *testing.T) {
	s := castest.NewMemory()
	large, root := &repb.Directory{}, &repb.Directory{}
	for i := range 50_000 {
		large.Symlinks = append(large.Symlinks, &repb.SymlinkNode{Name: fmt.Sprint(i), Target: "t"})
	}
	below := putMessage(t, s, large).Proto()
	for i := range 30_000 {
		root.Directories = append(root.Directories, &repb.DirectoryNode{Name: fmt.Sprint(i), Digest: below})
	}
	ctx, cancel := context.WithCancel(t.Context())
	must.Succeed(t, WithInputs(ctx, s, putMessage(t, s, root), nil, func(in *Inputs) error {
		_, whole, err := in.Search("nowhere")
		expect.That(t, !whole && err == nil, "%t, %v", whole, err)
		cancel()
		_, _, err = in.Search("nowhere")
		expect.Error(t, err, context.Canceled)
		return nil
	}))
}
