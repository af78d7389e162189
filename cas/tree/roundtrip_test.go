// SPDX-License-Identifier: Apache-2.0

package tree_test

import (
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/castest"
	"github.com/cloister-build/cloister/cas/tree"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"google.golang.org/protobuf/proto"
)

// randomTree returns a tree of at most depth levels. It has few names and contents, so that equal files, equal
// directories and names that are hard to sort occur.
func randomTree(rng *rand.Rand, depth int) *node {
	names := []string{
		"a", "a.b", "a-b", "A", "b c", "ü", "日本", "-", "...", "new\nline", "~", strings.Repeat("n", 255),
	}
	n := dirNode()
	for _, i := range rng.Perm(len(names))[:1+rng.IntN(4)] {
		content := []string{"", "1", "two", strings.Repeat("L", tree.LargeFile)}[rng.IntN(4)]
		switch k := rng.IntN(8); {
		case k < 4 && depth > 0:
			n.kids[names[i]] = randomTree(rng, depth-1)
		case k == 4:
			n.kids[names[i]] = &node{target: []string{"a", "../..", "/abs", "dangling/x/"}[rng.IntN(4)]}
		default:
			n.kids[names[i]] = &node{content: content, exec: rng.IntN(3) == 0}
		}
	}
	return n
}

// FuzzRoundTrip checks that a directory survives Ingest, Load, Stage, Capture and Extract.
func FuzzRoundTrip(f *testing.F) {
	for seed := range uint64(24) {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, seed uint64) {
		t.Logf("seed %d", seed)
		want := randomTree(rand.New(rand.NewPCG(seed, 0)), 4)
		host := newRoot(t)
		want.make(t, host)
		digest := want.put(t, castest.NewMemory())

		store := newFiler(t)
		got := must.Get(tree.Ingest(t.Context(), store, cas.SHA256, host))(t)
		must.Be(t, got == digest, "Ingest: got %v, want %v", got, digest)
		in := must.Get(tree.Load(t.Context(), store, digest))(t)

		ws, staged := stage(t, store, in, "", "made/by/run")
		want.set("made/by", dirNode())
		same(t, "bound", view(t, ws, staged), want)
		delete(want.kids, "made")

		ws, staged = stage(t, store, in, "", "")
		expect.That(t, len(staged.Binds) == 0, "the input root is an output, but got binds %v", staged.Binds)
		same(t, "private", read(t, ws, "out"), want)

		out := must.Get(ws.OpenRoot("out"))(t)
		defer out.Close()
		formats := []repb.Command_OutputDirectoryFormat{repb.Command_DIRECTORY_ONLY, repb.Command_TREE_ONLY}
		for _, format := range formats {
			r := capture(t, store, out, tree.OutputSpec{Paths: []string{""}, Format: format})
			if root := r.OutputDirectories[0].RootDirectoryDigest; root != nil && !proto.Equal(root, digest.Proto()) {
				t.Errorf("Capture: got %v, want %v", root, digest)
			}
			into := newRoot(t)
			must.Succeed(t, tree.Extract(t.Context(), store, cas.SHA256, r, into))
			same(t, fmt.Sprintf("extracted %v", format), read(t, into, "."), want)
		}
	})
}
