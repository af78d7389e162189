// SPDX-License-Identifier: Apache-2.0

package tree

import (
	"context"
	"io"
	"testing"
	"time"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/castest"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
)

// A nested store calls between when a blob is opened.
type nested struct {
	cas.Store
	between func(cas.Digest)
}

func (n *nested) Open(ctx context.Context, d cas.Digest, off int64) (io.ReadCloser, error) {
	n.between(d)
	return n.Store.Open(ctx, d, off)
}

// TestCacheHoldsEachDirectoryOnce: of those who load the same at the same time all get what the first has kept, so that
// what is counted is what is held.
func TestCacheHoldsEachDirectoryOnce(t *testing.T) {
	m := castest.NewMemory()
	put := func(dirs ...cas.Digest) cas.Digest {
		dir := &repb.Directory{}
		for i, d := range dirs {
			dir.Directories = append(dir.Directories, &repb.DirectoryNode{Name: string(rune('a' + i)), Digest: d.Proto()})
		}
		d, err := cas.PutProto(t.Context(), m, cas.SHA256, dir)
		if err != nil {
			t.Fatal(err)
		}
		return d
	}
	leaf := put()
	sub := put(leaf, leaf)
	first, second := put(sub), put(sub, leaf)

	c := NewCache(1<<20, time.Hour)
	load := func(s cas.Store, root cas.Digest) *Input {
		in, err := c.Load(t.Context(), &cas.Instance{Store: s}, root)
		if err != nil {
			t.Fatal(err)
		}
		return in
	}
	var one *Input
	two := load(&nested{m, func(d cas.Digest) {
		if one == nil && d == leaf {
			one = load(m, first)
		}
	}}, second)
	if a, b := one.root.find("a").dir, two.root.find("a").dir; a != b {
		t.Error("two trees have a directory of theirs twice")
	}
	holders := map[*item]int{}
	var bytes int64
	for k, it := range c.items {
		bytes += it.bytes
		for _, e := range it.dir.entries {
			below := c.items[key{k.instance, e.digest, ""}]
			if below == nil || below.dir != e.dir {
				t.Fatalf("what is below %s is not what is counted", k.digest)
			}
			holders[below]++
		}
	}
	for k, it := range c.items {
		if it.holders != holders[it] || (it.place == nil) != (it.holders > 0) {
			t.Errorf("%s is held %d times, by %d", k.digest, it.holders, holders[it])
		}
	}
	if len(c.items) != 4 || bytes != c.Bytes() || c.idle.Len() != 2 {
		t.Errorf("there are %d directories of %d bytes, %d of which are held by none", len(c.items), bytes, c.idle.Len())
	}
}
