// SPDX-License-Identifier: Apache-2.0

package overlay_test

import (
	"bytes"
	"testing"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/castest"
	"github.com/cloister-build/cloister/cas/castest/faulty"
	"github.com/cloister-build/cloister/cas/overlay"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
)

// newLocator returns an overlay of a disk and a faulty store in memory, with a few blobs in the upstream.
func newLocator(t *testing.T) (s cas.Store, local *faulty.Store, mem *castest.Memory, upstream *faulty.Store,
	ds []cas.Digest,
) {
	t.Helper()
	mem = castest.NewMemory()
	upstream = faulty.New(mem, mem)
	in := must.Get(onDisk(t, t.TempDir())(""))(t)
	local = faulty.New(in.Store, in.Actions)
	disk := struct {
		*faulty.Store
		cas.Filer
		cas.Locator
	}{local, in.Store.(cas.Filer), in.Store.(cas.Locator)}
	over := instance(t, open(t, overlay.Config{Local: one(disk, in.Actions), Upstream: one(upstream, upstream)}))
	for i := range byte(5) {
		_, d := put(t, mem, i, 3000)
		ds = append(ds, d)
	}
	return over.Store, local, mem, upstream, ds
}

func locate(t *testing.T, s cas.Store, ds []cas.Digest) (cas.Location, error) {
	t.Helper()
	l, ok := cas.As[cas.Locator](s)
	must.Be(t, ok, "the overlay is not a cas.Locator")
	return l.Locate(t.Context(), ds)
}

// absent returns the indexes of absent blobs.
func absent(p cas.Location) (is []int) {
	for i, e := range p.Extents() {
		if e.File == cas.Absent {
			is = append(is, i)
		}
	}
	return is
}

// TestLocateFetches checks that Locate fetches absent blobs once.
func TestLocateFetches(t *testing.T) {
	s, _, _, upstream, ds := newLocator(t)
	_, nowhere := castest.Blob(9, 3000)
	for i, want := range [][]int{nil, nil, {0, 3}} {
		asked := ds
		if want != nil {
			asked = []cas.Digest{nowhere, ds[0], ds[1], nowhere, cas.SHA256.Sum(nil)}
		}
		p := must.Get(locate(t, s, asked))(t)
		defer p.Release()
		expect.Slices(t, absent(p), want, "absent")
		if want == nil {
			b, _ := castest.Blob(4, 3000)
			got := make([]byte, 3000)
			e := p.Extents()[4]
			if _, err := p.Files()[e.File].ReadAt(got, e.Offset); err != nil || !bytes.Equal(got, b) {
				t.Errorf("the last blob has wrong bytes, %v", err)
			}
		}
		if n := upstream.Calls(faulty.Open); i == 1 && n != len(ds) {
			t.Errorf("got %d upstream reads, want %d", n, len(ds))
		}
	}
	expect.Equal(t, upstream.Calls(faulty.Missing), 1, "upstream queries (whether it lists the blob that it did not deliver)")
}

// TestLocateSkipsDamagedBlobs checks that a blob damaged in the upstream is absent, and others are located.
func TestLocateSkipsDamagedBlobs(t *testing.T) {
	s, _, mem, _, ds := newLocator(t)
	mem.Corrupt(ds[1])
	p := must.Get(locate(t, s, ds))(t)
	defer p.Release()
	expect.Slices(t, absent(p), []int{1}, "absent (the damaged one)")
}

// TestLocateReportsErrors checks that a failed fetch is an error, and not an absent blob.
func TestLocateReportsErrors(t *testing.T) {
	s, local, _, upstream, ds := newLocator(t)
	disconnect(upstream)
	_, err := locate(t, s, ds)
	wantError(t, "upstream unavailable", err, cas.ErrUnavailable)
	upstream.Heal()
	local.Fail(cas.ErrFull, faulty.Put, faulty.PutAll)
	_, err = locate(t, s, ds)
	wantError(t, "local store full", err, cas.ErrFull)
	local.Heal()
	p, err := locate(t, s, ds)
	must.Be(t, err == nil && len(absent(p)) == 0, "absent: got %v, %v", absent(p), err)
	p.Release()
}
