// SPDX-License-Identifier: Apache-2.0

package overlay_test

import (
	"sync"
	"testing"
	"testing/synctest"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/castest"
	"github.com/cloister-build/cloister/cas/overlay"
)

// TestLargeBlobsComeOnce: also for those who want other blobs besides, or this one alone.
func TestLargeBlobsComeOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPair(t, overlay.WriteThrough)
		_, large := put(t, p.far, 1, 2<<20)
		var small []cas.Digest
		for i := range byte(4) {
			_, d := put(t, p.far, 2+i, 1000)
			small = append(small, d)
		}
		gate := p.faulty.Hold(castest.Open)
		var group sync.WaitGroup
		for _, ds := range [][]cas.Digest{{small[0], large, small[1]}, {large}, {small[2], small[1], large, small[3]}} {
			group.Go(func() {
				if err := cas.Fetch(t.Context(), p.store, ds); err != nil {
					t.Error(err)
				}
			})
			synctest.Wait()
		}
		group.Go(func() {
			if _, err := cas.ReadAll(t.Context(), p.store, large, large.Size()); err != nil {
				t.Error(err)
			}
		})
		synctest.Wait()
		gate.Open()
		group.Wait()
		if n := p.faulty.Calls(castest.Open); n != 5 || p.Stats().Fetched != 5 {
			t.Errorf("far was asked %d times, %d were fetched, want 5 blobs once each", n, p.Stats().Fetched)
		}
	})
}

// TestLargeBlobsTakeTurns: of one call, so that they leave the way to others.
func TestLargeBlobsTakeTurns(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPair(t, overlay.WriteThrough)
		var ds []cas.Digest
		for i := range byte(6) {
			_, d := put(t, p.far, i, 2<<20)
			ds = append(ds, d)
		}
		gate := p.faulty.Hold(castest.Open)
		var group sync.WaitGroup
		group.Go(func() {
			if err := cas.Fetch(t.Context(), p.store, ds); err != nil {
				t.Error(err)
			}
		})
		synctest.Wait()
		if n := p.faulty.Calls(castest.Open); n != 4 {
			t.Errorf("%d come at once, want 4", n)
		}
		gate.Open()
		group.Wait()
		for _, d := range ds {
			if !has(t, p.near, d) {
				t.Errorf("blob %s is not near", d)
			}
		}
	})
}

// TestFailureOfOthers: who joined a flight that failed for a blob that he did not want begins his own.
func TestFailureOfOthers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPair(t, overlay.WriteThrough)
		_, damaged := put(t, p.far, 1, 1000)
		_, a := put(t, p.far, 2, 1000)
		_, b := put(t, p.far, 3, 1000)
		p.far.Corrupt(damaged)
		gate := p.faulty.Hold(castest.Open)
		var group sync.WaitGroup
		for _, ds := range [][]cas.Digest{{damaged, a, b}, {a, b}} {
			group.Go(func() {
				if err := cas.Fetch(t.Context(), p.store, ds); err != nil {
					t.Error(err)
				}
			})
			synctest.Wait()
		}
		gate.Open()
		group.Wait()
		if !has(t, p.near, a) || !has(t, p.near, b) || has(t, p.near, damaged) {
			t.Errorf("near has the two that are sound: %v, %v, and the damaged one: %v", has(t, p.near, a), has(t, p.near, b), has(t, p.near, damaged))
		}
	})
}

// TestLargeBlobsDoNotWaitForOthers: whoever wants one that another call would fetch later has it now, and it comes once.
func TestLargeBlobsDoNotWaitForOthers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPair(t, overlay.WriteThrough)
		var ds []cas.Digest
		for i := range byte(10) {
			_, d := put(t, p.far, i, 2<<20)
			ds = append(ds, d)
		}
		gate := p.faulty.Hold(castest.Open)
		var group sync.WaitGroup
		for _, want := range []int{4, 8, 10} {
			group.Go(func() {
				if err := cas.Fetch(t.Context(), p.store, ds); err != nil {
					t.Error(err)
				}
			})
			synctest.Wait()
			if n := p.faulty.Calls(castest.Open); n != want {
				t.Errorf("%d come at once, want %d", n, want)
			}
		}
		gate.Open()
		group.Wait()
		if n := p.faulty.Calls(castest.Open); n != len(ds) {
			t.Errorf("far was asked %d times for %d blobs", n, len(ds))
		}
	})
}
