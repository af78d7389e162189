// SPDX-License-Identifier: Apache-2.0

package castest

import (
	"bytes"
	"sync"
	"testing"

	"github.com/cloister-build/cloister/cas"
)

// A Location has an extent for each digest, and stays valid until it is released.
func testLocate(t *testing.T, s cas.Store) {
	l := capability[cas.Locator](t, s)
	_, absent := Blob(200, 700)
	ds := []cas.Digest{absent, cas.SHA256.Sum(nil)}
	blobs := [][]byte{nil, nil}
	for i, size := range []int{1, 511, 512, 513, 5000, 60_000, 1 << 20} {
		b, d := Blob(byte(i), size)
		put(t, s, b)
		ds, blobs = append(ds, d), append(blobs, b)
	}
	ds, blobs = append(ds, absent, ds[4], ds[2]), append(blobs, nil, blobs[4], blobs[2])
	for _, n := range []int{len(ds), 2, 1, 0} {
		at, err := l.Locate(t.Context(), ds[:n])
		if err != nil {
			t.Fatal(err)
		}
		if len(at.Extents()) != n || !at.Valid() {
			t.Errorf("Locate of %d blobs: got %d extents, valid %v", n, len(at.Extents()), at.Valid())
		}
		for i, e := range at.Extents() {
			want := int32(0)
			switch {
			case ds[i] == absent:
				want = cas.Absent
			case ds[i].IsEmpty():
				want = cas.Unpacked
			}
			if e.File < cas.Absent || want < 0 && e.File != want || want == 0 && e.File == cas.Absent {
				t.Errorf("digest %d of %d bytes: got file %d, want %d", i, ds[i].Size(), e.File, want)
			}
		}
		wantExtents(t, at, blobs[:n])
		at.Release()
		at.Release()
	}
	at, err := l.Locate(t.Context(), ds)
	if err != nil {
		t.Fatal(err)
	}
	defer at.Release()
	for i := range byte(100) {
		b, _ := Blob(i, 30_000)
		put(t, s, b)
	}
	if !at.Valid() {
		t.Error("a Location is invalid after Puts")
	}
	wantExtents(t, at, blobs)
	for i, f := range at.Files() {
		if _, err := f.WriteAt([]byte{1}, 0); err == nil {
			t.Errorf("file %d is writable", i)
		}
	}
	ctx := cancelled(t)
	_, err = l.Locate(ctx, ds)
	wantCancelled(t, "Locate", err)
}

// Concurrent Puts do not invalidate a Location.
func testLocateWhilePutting(t *testing.T, s cas.Store) {
	l := capability[cas.Locator](t, s)
	var wg sync.WaitGroup
	for w := range byte(4) {
		wg.Go(func() {
			var ds []cas.Digest
			var blobs [][]byte
			for i := range byte(25) {
				b, d := Blob(32*w+i, 3000+int(i))
				if err := s.Put(t.Context(), d, bytes.NewReader(b)); err != nil {
					t.Errorf("Put: %v", err)
					return
				}
				ds, blobs = append(ds, d), append(blobs, b)
				at, err := l.Locate(t.Context(), ds)
				if err != nil {
					t.Errorf("Locate: %v", err)
					return
				}
				wantExtents(t, at, blobs)
				if !at.Valid() {
					t.Error("a Location is invalid during Puts")
				}
				at.Release()
			}
		})
	}
	wg.Wait()
}

// wantExtents checks that the extents hold the blobs followed by zeros.
func wantExtents(t *testing.T, at cas.Location, blobs [][]byte) {
	t.Helper()
	for i, e := range at.Extents() {
		if e.File < 0 {
			continue
		}
		want := append(bytes.Clone(blobs[i]), make([]byte, -len(blobs[i])&(cas.ExtentAlign-1))...)
		got := make([]byte, len(want))
		_, err := at.Files()[e.File].ReadAt(got, e.Offset)
		if err != nil || !bytes.Equal(got, want) || e.Offset%cas.ExtentAlign != 0 {
			t.Errorf("extent of blob %d of %d bytes, at %d: other content, %v", i, len(blobs[i]), e.Offset, err)
		}
	}
}
