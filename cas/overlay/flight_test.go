// SPDX-License-Identifier: Apache-2.0

package overlay_test

import (
	"sync"
	"testing"
	"testing/synctest"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/castest/faulty"
	"github.com/cloister-build/cloister/cas/overlay"
	"github.com/cloister-build/cloister/tests/expect"
)

// TestLargeBlobsAreFetchedOnce checks that calls with different blobs share the flight of a large one.
func TestLargeBlobsAreFetchedOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPair(t, overlay.WriteThrough)
		_, large := put(t, p.upstream, 1, 2<<20)
		var small []cas.Digest
		for i := range byte(4) {
			_, d := put(t, p.upstream, 2+i, 1000)
			small = append(small, d)
		}
		gate := p.faultyUpstream.Hold(faulty.Open)
		var group sync.WaitGroup
		for _, ds := range [][]cas.Digest{{small[0], large, small[1]}, {large}, {small[2], small[1], large, small[3]}} {
			group.Go(func() {
				expect.Error(t, cas.Fetch(t.Context(), p.store, ds), nil)
			})
			synctest.Wait()
		}
		group.Go(func() {
			expect.Error(t, expect.Err(cas.ReadAll(t.Context(), p.store, large, large.Size())), nil)
		})
		synctest.Wait()
		gate.Open()
		group.Wait()
		if n := p.faultyUpstream.Calls(faulty.Open); n != 5 || p.Stats().Fetched != 5 {
			t.Errorf("got %d upstream reads and %d fetched, want 5 and 5", n, p.Stats().Fetched)
		}
	})
}

// TestLargeBlobsAreLimitedPerCall: other calls must make progress, too.
func TestLargeBlobsAreLimitedPerCall(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPair(t, overlay.WriteThrough)
		var ds []cas.Digest
		for i := range byte(6) {
			_, d := put(t, p.upstream, i, 2<<20)
			ds = append(ds, d)
		}
		gate := p.faultyUpstream.Hold(faulty.Open)
		var group sync.WaitGroup
		group.Go(func() {
			expect.Error(t, cas.Fetch(t.Context(), p.store, ds), nil)
		})
		synctest.Wait()
		expect.Equal(t, p.faultyUpstream.Calls(faulty.Open), 4, "parallel reads")
		gate.Open()
		group.Wait()
		for _, d := range ds {
			expect.That(t, has(t, p.local, d), "blob %s is not local", d)
		}
	})
}

// TestJoinedFlightIsRetried checks that a call starts its own flight after a joined one failed for another blob.
func TestJoinedFlightIsRetried(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPair(t, overlay.WriteThrough)
		_, damaged := put(t, p.upstream, 1, 1000)
		_, a := put(t, p.upstream, 2, 1000)
		_, b := put(t, p.upstream, 3, 1000)
		p.upstream.Corrupt(damaged)
		gate := p.faultyUpstream.Hold(faulty.Open)
		var group sync.WaitGroup
		for _, ds := range [][]cas.Digest{{damaged, a, b}, {a, b}} {
			group.Go(func() {
				expect.Error(t, cas.Fetch(t.Context(), p.store, ds), nil)
			})
			synctest.Wait()
		}
		gate.Open()
		group.Wait()
		if !has(t, p.local, a) || !has(t, p.local, b) || has(t, p.local, damaged) {
			t.Errorf("local: got intact blobs %v, %v and damaged blob %v, want true, true, false", has(t, p.local, a),
				has(t, p.local, b), has(t, p.local, damaged))
		}
	})
}

// TestLargeBlobsDoNotWaitForOthers checks that a joined flight starts at once, even if its own call would start it
// later.
func TestLargeBlobsDoNotWaitForOthers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPair(t, overlay.WriteThrough)
		var ds []cas.Digest
		for i := range byte(10) {
			_, d := put(t, p.upstream, i, 2<<20)
			ds = append(ds, d)
		}
		gate := p.faultyUpstream.Hold(faulty.Open)
		var group sync.WaitGroup
		for _, want := range []int{4, 8, 10} {
			group.Go(func() {
				expect.Error(t, cas.Fetch(t.Context(), p.store, ds), nil)
			})
			synctest.Wait()
			expect.Equal(t, p.faultyUpstream.Calls(faulty.Open), want, "parallel reads")
		}
		gate.Open()
		group.Wait()
		expect.Equal(t, p.faultyUpstream.Calls(faulty.Open), len(ds), "upstream reads")
	})
}
