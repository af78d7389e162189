// SPDX-License-Identifier: Apache-2.0

package tree_test

import (
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/castest"
	"github.com/cloister-build/cloister/cas/tree"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
)

// records splits an encoded Tree into the records of is_topologically_sorted: a tag byte, a varint, a Directory.
func records(b []byte) (dirs [][]byte, err error) {
	for len(b) > 0 {
		want := byte(2<<3 | 2)
		if dirs == nil {
			want = 1<<3 | 2
		}
		if b[0] != want {
			return nil, fmt.Errorf("record %d has the tag %#x, want %#x", len(dirs), b[0], want)
		}
		dir, n := protowire.ConsumeBytes(b[1:])
		if n < 0 {
			return nil, fmt.Errorf("record %d is cut off", len(dirs))
		}
		dirs, b = append(dirs, dir), b[1+n:]
	}
	return dirs, nil
}

// sorted returns an error if an encoded Tree violates is_topologically_sorted.
func sorted(b []byte) error {
	dirs, err := records(b)
	if err != nil {
		return err
	}
	if len(dirs) == 0 {
		return fmt.Errorf("the Tree has no root")
	}
	met, referred := map[string]bool{}, map[string]bool{}
	for i, dir := range dirs {
		hash := cas.SHA256.Sum(dir).Hash()
		switch {
		case met[hash]:
			return fmt.Errorf("record %d is a duplicate", i)
		case i > 0 && !referred[hash]:
			return fmt.Errorf("record %d comes before its parents, or has none", i)
		}
		met[hash] = true
		var m repb.Directory
		if err := proto.Unmarshal(dir, &m); err != nil {
			return err
		}
		for _, sub := range m.Directories {
			if met[sub.Digest.Hash] {
				return fmt.Errorf("record %d comes after its child %q", i, sub.Name)
			}
			referred[sub.Digest.Hash] = true
		}
	}
	if len(referred) != len(dirs)-1 {
		return fmt.Errorf("%d directories are referenced, but the Tree has %d besides the root", len(referred),
			len(dirs)-1)
	}
	return nil
}

func join(dirs ...[]byte) (b []byte) {
	tag := byte(1<<3 | 2)
	for _, d := range dirs {
		b = append(binary.AppendUvarint(append(b, tag), uint64(len(d))), d...)
		tag = 2<<3 | 2
	}
	return b
}

// TestRule115_TreesAreTopologicallySorted uses random trees of few names and contents, in which directories repeat at
// all depths. It also checks that sorted rejects wrong orders.
func TestRule115_TreesAreTopologicallySorted(t *testing.T) {
	t.Parallel()
	store := castest.NewMemory()
	refused := 0
	for seed := range uint64(24) {
		r := rand.New(rand.NewPCG(seed, 1))
		n := dirNode()
		n.kids["d"] = randomTree(r, 4)
		n.set("d/z/again", n.at("d").copy())
		n.set("d/0", n.at("d").copy())
		out := newRoot(t)
		n.make(t, out)
		o := capture(t, store, out, tree.OutputSpec{
			Paths:  []string{"d"},
			Format: repb.Command_TREE_AND_DIRECTORY,
		}).OutputDirectories[0]
		td := must.Get(cas.FromProto(cas.SHA256, o.TreeDigest))(t)
		b := must.Get(cas.ReadAll(t.Context(), store, td, 1<<20))(t)
		if err := sorted(b); err != nil || !o.IsTopologicallySorted {
			t.Fatalf("seed %d: is_topologically_sorted %v: %v", seed, o.IsTopologicallySorted, err)
		}
		dirs := must.Get(records(b))(t)
		expect.That(t, cas.SHA256.Sum(dirs[0]).Hash() == o.RootDirectoryDigest.Hash,
			"seed %d: root_directory_digest differs from Tree.root", seed)
		for _, wrong := range [][][]byte{
			// A record twice, one missing, and an unreferenced one; then other orders.
			append(slices.Clone(dirs), dirs[len(dirs)-1]),
			dirs[:len(dirs)-1],
			append(slices.Clone(dirs), []byte{}),
			append([][]byte{dirs[0]}, reversed(dirs[1:])...),
			reversed(dirs),
		} {
			if b := join(wrong...); !slices.EqualFunc(wrong, dirs,
				func(a, b []byte) bool { return string(a) == string(b) }) {
				if sorted(b) != nil {
					refused++
				} else if len(wrong) != len(dirs) {
					t.Errorf("seed %d: sorted accepts %d directories instead of %d", seed, len(wrong), len(dirs))
				}
			}
		}
	}
	expect.That(t, refused >= 60, "sorted rejected %d wrong orders, want most of 120", refused)
}

func reversed(dirs [][]byte) [][]byte {
	r := slices.Clone(dirs)
	slices.Reverse(r)
	return r
}

// copy returns a deep copy of r.
func (r *node) copy() *node {
	c := *r
	if r.kids != nil {
		c.kids = map[string]*node{}
		for name, k := range r.kids {
			c.kids[name] = k.copy()
		}
	}
	return &c
}
