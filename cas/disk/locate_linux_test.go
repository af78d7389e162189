// SPDX-License-Identifier: Apache-2.0

package disk_test

import (
	"errors"
	"testing"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/castest"
	"github.com/cloister-build/cloister/cas/disk"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
)

// TestFailedPutKeepsLocationsValid: truncating after a failed write is not a foreign write.
func TestFailedPutKeepsLocationsValid(t *testing.T) {
	config := disk.Config{Dir: t.TempDir()}
	s := store(t, open(t, config), "")
	p := locate(t, s, put(t, s, 1))
	restore := replaceOpen(t, segmentFiles(t, config.Dir, ".log")[0], "/dev/full")
	b, _ := castest.Blob(2, 3*block)
	if _, err := cas.PutBytes(t.Context(), s, cas.SHA256, b); !errors.Is(err, cas.ErrFull) {
		t.Fatalf("Put: %v", err)
	}
	restore()
	expect.That(t, p.Valid(), "the Location is invalid")
}

// TestLocateAllocations: neither method allocates for each blob, since every action calls them.
func TestLocateAllocations(t *testing.T) {
	s := store(t, open(t, disk.Config{Dir: t.TempDir(), MaxBytes: 64 << 20}), "")
	blobs := smallBlobs(0, 2000, 1000)
	must.Succeed(t, errors.Join(s.PutAll(t.Context(), blobs)...))
	ds := make([]cas.Digest, len(blobs))
	for i := range ds {
		ds[i] = blobs[i].Digest
	}
	p := locate(t, s, ds...)
	if n := testing.AllocsPerRun(10, func() { p.Valid() }); n > 0 {
		t.Errorf("Valid: got %v allocations", n)
	}
	n := testing.AllocsPerRun(10, func() {
		p := must.Get(s.Locate(t.Context(), ds))(t)
		p.Release()
	})
	expect.That(t, n <= 100, "Locate: got %v allocations", n)
}
