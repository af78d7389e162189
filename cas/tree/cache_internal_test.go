// SPDX-License-Identifier: Apache-2.0

package tree

import (
	"context"
	"io"
	"testing"
	"time"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/castest"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
)

// A hookedStore calls onOpen when a blob is opened.
type hookedStore struct {
	cas.Store
	onOpen func(cas.Digest)
}

func (n *hookedStore) Open(ctx context.Context, d cas.Digest, off int64) (io.ReadCloser, error) {
	n.onOpen(d)
	return n.Store.Open(ctx, d, off)
}

// TestCacheHoldsEachDirectoryOnce checks that concurrent loads of one Directory share its value, so that the cache
// counts what it holds.
func TestCacheHoldsEachDirectoryOnce(t *testing.T) {
	m := castest.NewMemory()
	put := func(dirs ...cas.Digest) cas.Digest {
		dir := &repb.Directory{}
		for i, d := range dirs {
			dir.Directories = append(dir.Directories, &repb.DirectoryNode{
				Name:   string(rune('a' + i)),
				Digest: d.Proto(),
			})
		}
		return must.Get(cas.PutProto(t.Context(), m, cas.SHA256, dir))(t)
	}
	leaf := put()
	sub := put(leaf, leaf)
	first, second := put(sub), put(sub, leaf)

	c := NewCache(1<<20, time.Hour)
	load := func(s cas.Store, root cas.Digest) *Input {
		return must.Get(c.Load(t.Context(), &cas.Instance{Store: s}, root))(t)
	}
	var one *Input
	two := load(&hookedStore{m, func(d cas.Digest) {
		if one == nil && d == leaf {
			one = load(m, first)
		}
	}}, second)
	expect.That(t, one.root.find("a").dir == two.root.find("a").dir, "two inputs have separate values of one directory")
	refs := map[*item]int{}
	var bytes int64
	for k, it := range c.items {
		bytes += it.bytes
		for _, e := range it.dir.entries {
			below := c.items[key{k.instance, e.digest, ""}]
			must.Be(t, below != nil && below.dir == e.dir, "a child of %s is not the cached value", k.digest)
			refs[below]++
		}
	}
	for k, it := range c.items {
		expect.That(t, it.refs == refs[it] && (it.element == nil) == (it.refs > 0),
			"%s has %d references, want %d", k.digest, it.refs, refs[it])
	}
	expect.That(t, len(c.items) == 4 && bytes == c.Bytes() && c.idle.Len() == 2,
		"got %d directories of %d bytes, %d without references", len(c.items), bytes, c.idle.Len())
}
