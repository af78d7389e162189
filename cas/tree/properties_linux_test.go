// SPDX-License-Identifier: Apache-2.0

package tree_test

import (
	"fmt"
	"testing"

	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
)

// TestRule098_NodePropertiesInImages covers images of one run, cached images, and files bound from the store.
func TestRule098_NodePropertiesInImages(t *testing.T) {
	r := newRig(t, plenty)
	n, outputs, want := propertied(t)
	l := plan(t, load(t, r.store, n), "", outputs, nil)
	for i := range 4 {
		ws, s := r.stageLayout(t, "", l)
		must.Be(t, s.Form == "image", "got form %q (%s), want image", s.Form, s.CopyReason)
		expect.That(t, i <= 0 || len(images(s)) >= 2, "run %d uses no cached image", i)
		root := r.overlay(t, ws, s)
		checkFacts(t, want, func(p string) string { return facts(t, ws, root, s, p) })
		must.Succeed(t, root.Close())
		seen := r.see(ws, s)
		n.at("suid").exec = true // as its mode says
		same(t, "exec root", seen, n)
		s.Release()
	}
}

// TestRule098_CachedImagesRespectProperties checks that runs whose inputs differ only in their properties do not share
// cached subtrees.
func TestRule098_CachedImagesRespectProperties(t *testing.T) {
	r := newRig(t, plenty)
	for range 3 {
		for _, s := range []int64{0, 1, 2} {
			n := dirNode()
			for i := range 10 {
				n.set(fmt.Sprintf("d/%d", i), &node{content: "x"})
			}
			files := n.at("d").kids
			for _, f := range files {
				f.own = withTime(s, 0)
			}
			l := plan(t, load(t, r.store, n), "", nil, nil)
			ws, staged := r.stageLayout(t, "", l)
			root := r.overlay(t, ws, staged)
			for f := range files {
				got := facts(t, ws, root, staged, "d/"+f)
				expect.Equal(t, got, fmt.Sprintf("-rw-r--r-- %d.000000000", s), "%s", f)
			}
			must.Succeed(t, root.Close())
			staged.Release()
		}
	}
}
