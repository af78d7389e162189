// SPDX-License-Identifier: Apache-2.0

package overlay_test

import (
	"bytes"
	"slices"
	"testing"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/castest"
	"github.com/cloister-build/cloister/cas/overlay"
)

// placed is an overlay over a disk, in front of a store in memory with faults, and a few blobs that are far.
func placed(t *testing.T) (s cas.Store, near *castest.Faulty, mem *castest.Memory, far *castest.Faulty, ds []cas.Digest) {
	t.Helper()
	mem = castest.NewMemory()
	far = castest.NewFaulty(mem, mem)
	in, err := onDisk(t, t.TempDir())("")
	if err != nil {
		t.Fatal(err)
	}
	near = castest.NewFaulty(in.Store, in.Actions)
	disk := struct {
		*castest.Faulty
		cas.Filer
		cas.Locator
	}{near, in.Store.(cas.Filer), in.Store.(cas.Locator)}
	over, err := open(t, overlay.Config{Local: one(disk, in.Actions), Upstream: one(far, far)}).Instance("")
	if err != nil {
		t.Fatal(err)
	}
	for i := range byte(5) {
		_, d := put(t, mem, i, 3000)
		ds = append(ds, d)
	}
	return over.Store, near, mem, far, ds
}

// absent returns the indexes of what is absent.
func absent(p cas.Location) (is []int) {
	for i, e := range p.Extents() {
		if e.File == cas.Absent {
			is = append(is, i)
		}
	}
	return is
}

// TestPlaceComesNear: what is far is placed when it is near, and far is asked no more.
func TestPlaceComesNear(t *testing.T) {
	s, _, _, far, ds := placed(t)
	_, nowhere := castest.Blob(9, 3000)
	for i, want := range [][]int{nil, nil, {0, 3}} {
		asked := ds
		if want != nil {
			asked = []cas.Digest{nowhere, ds[0], ds[1], nowhere, cas.SHA256.Sum(nil)}
		}
		p, err := s.(cas.Locator).Locate(t.Context(), asked)
		if err != nil {
			t.Fatal(err)
		}
		defer p.Release()
		if got := absent(p); !slices.Equal(got, want) {
			t.Errorf("absent are %v, want %v", got, want)
		}
		if want == nil {
			b, _ := castest.Blob(4, 3000)
			got := make([]byte, 3000)
			e := p.Extents()[4]
			if _, err := p.Files()[e.File].ReadAt(got, e.Offset); err != nil || !bytes.Equal(got, b) {
				t.Errorf("the last blob has other bytes, %v", err)
			}
		}
		if n := far.Calls(castest.Open); i == 1 && n != len(ds) {
			t.Errorf("far was asked for %d blobs, want %d", n, len(ds))
		}
	}
	if n := far.Calls(castest.Missing); n != 0 {
		t.Errorf("far was asked %d times what it lacks", n)
	}
}

// TestPlaceBesideDamage: one blob that is damaged far is absent, and keeps no other away.
func TestPlaceBesideDamage(t *testing.T) {
	s, _, mem, _, ds := placed(t)
	mem.Corrupt(ds[1])
	p, err := s.(cas.Locator).Locate(t.Context(), ds)
	if err != nil {
		t.Fatal(err)
	}
	defer p.Release()
	if got := absent(p); !slices.Equal(got, []int{1}) {
		t.Errorf("absent are %v", got)
	}
}

// TestPlaceSaysWhyNothingComesNear: what far has is not called absent.
func TestPlaceSaysWhyNothingComesNear(t *testing.T) {
	s, near, _, far, ds := placed(t)
	far.Fail(cas.ErrUnavailable, castest.Open)
	_, err := s.(cas.Locator).Locate(t.Context(), ds)
	wantError(t, "far is down", err, cas.ErrUnavailable)
	far.Heal()
	near.Fail(cas.ErrFull, castest.Put, castest.PutAll)
	_, err = s.(cas.Locator).Locate(t.Context(), ds)
	wantError(t, "near is full", err, cas.ErrFull)
	near.Heal()
	p, err := s.(cas.Locator).Locate(t.Context(), ds)
	if err != nil || len(absent(p)) > 0 {
		t.Fatalf("absent are %v, %v", absent(p), err)
	}
	p.Release()
}
