// SPDX-License-Identifier: Apache-2.0

package castest

import (
	"bytes"
	"errors"
	"fmt"
	"sync"
	"testing"

	"github.com/cloister-build/cloister/cas"
)

// PutAll returns each blob's error at its index.
func testPutAll(t *testing.T, s cas.Store) {
	all := capability[cas.Batcher](t, s)
	if errs := all.PutAll(t.Context(), nil); len(errs) != 0 {
		t.Errorf("PutAll of nothing: got %v", errs)
	}
	var blobs []cas.Blob
	var good []bool
	for i := range 20 {
		b, d := Blob(byte(i), 1000+i)
		good = append(good, i%3 != 0)
		if !good[i] {
			b[i] ^= 1
		}
		blobs = append(blobs, cas.Blob{Digest: d, Data: b})
	}
	// The empty blob, and blob 1 a second time.
	blobs = append(blobs, cas.Blob{Digest: cas.SHA256.Sum(nil)}, blobs[1])
	good = append(good, true, true)
	put(t, s, blobs[2].Data)
	errs := all.PutAll(t.Context(), blobs)
	if len(errs) != len(blobs) {
		t.Fatalf("PutAll of %d blobs returned %d errors", len(blobs), len(errs))
	}
	for i, err := range errs {
		switch {
		case good[i] && err != nil:
			t.Errorf("blob %d: %v", i, err)
		case !good[i] && !errors.Is(err, cas.ErrMismatch):
			t.Errorf("blob %d with other content: got %v, want ErrMismatch", i, err)
		}
		if !good[i] {
			wantAbsent(t, s, blobs[i].Digest)
			continue
		}
		want := bytes.Clone(blobs[i].Data)
		clear(blobs[i].Data) // the store must not retain it
		if got := get(t, s, blobs[i].Digest, 0); i < 20 && !bytes.Equal(got, want) {
			t.Errorf("Open of blob %d: got %d other bytes", i, len(got))
		}
	}
}

// PutAll verifies content even for blobs that are present or twice in the batch.
func testPutAllWrong(t *testing.T, s cas.Store) {
	all := capability[cas.Batcher](t, s)
	b, present := Blob(1, 5000)
	put(t, s, b)
	c, other := Blob(2, 5000)
	flipped := bytes.Clone(b)
	flipped[0] ^= 1
	errs := all.PutAll(t.Context(), []cas.Blob{
		{Digest: present, Data: flipped},
		{Digest: present, Data: b[1:]},
		{Digest: present, Data: append(bytes.Clone(b), 0)},
		{Digest: present},
		{Digest: other, Data: b},
		{Digest: other, Data: c},
		{Digest: other, Data: c[1:]},
		{Digest: cas.SHA256.Sum(nil), Data: b},
	})
	for i, err := range errs {
		if i == 5 && err != nil {
			t.Errorf("correct content: %v", err)
		} else if i != 5 && !errors.Is(err, cas.ErrMismatch) {
			t.Errorf("wrong content %d: got %v, want ErrMismatch", i, err)
		}
	}
	for d, want := range map[cas.Digest][]byte{present: b, other: c} {
		wantContent(t, s, d, 0, want)
	}
}

// PutAll accepts blobs of any size.
func testPutAllSizes(t *testing.T, s cas.Store) {
	all := capability[cas.Batcher](t, s)
	var blobs []cas.Blob
	for i, size := range []int{1, 511, 512, 513, 64<<10 - 1, 64 << 10, 1 << 20, 1<<20 + 1, 5 << 20} {
		b, d := Blob(byte(i), size)
		blobs = append(blobs, cas.Blob{Digest: d, Data: b})
	}
	for i := range 1000 {
		b := fmt.Append(nil, "small blob ", i)
		blobs = append(blobs, cas.Blob{Digest: cas.SHA256.Sum(b), Data: b})
	}
	if err := errors.Join(all.PutAll(t.Context(), blobs)...); err != nil {
		t.Fatal(err)
	}
	var ds []cas.Digest
	for i, b := range blobs {
		ds = append(ds, b.Digest)
		if i < 20 || i%100 == 0 {
			wantContent(t, s, b.Digest, 0, b.Data)
		}
	}
	if missing, err := s.Missing(t.Context(), ds); err != nil || len(missing) > 0 {
		t.Errorf("%d of %d blobs are absent, %v", len(missing), len(ds), err)
	}
}

// Concurrent batches and Puts share blobs.
func testConcurrentPutAll(t *testing.T, s cas.Store) {
	all := capability[cas.Batcher](t, s)
	var blobs []cas.Blob
	for i := range 40 {
		b, d := Blob(byte(i), 2000)
		blobs = append(blobs, cas.Blob{Digest: d, Data: b})
	}
	var wg sync.WaitGroup
	for i := range 8 {
		wg.Go(func() {
			if err := errors.Join(all.PutAll(t.Context(), blobs[4*i:4*i+12])...); err != nil {
				t.Errorf("PutAll: %v", err)
			}
		})
		wg.Go(func() {
			if err := s.Put(t.Context(), blobs[4*i].Digest, bytes.NewReader(blobs[4*i].Data)); err != nil {
				t.Errorf("Put: %v", err)
			}
		})
	}
	wg.Wait()
	for _, b := range blobs {
		wantContent(t, s, b.Digest, 0, b.Data)
	}
}

func testCancelledPutAll(t *testing.T, s cas.Store) {
	all := capability[cas.Batcher](t, s)
	b, d := Blob(1, 100)
	c, e := Blob(2, 3<<20)
	ctx := cancelled(t)
	errs := all.PutAll(ctx, []cas.Blob{{Digest: d, Data: b}, {Digest: e, Data: c}})
	if len(errs) != 2 {
		t.Fatalf("PutAll of 2 blobs returned %d errors", len(errs))
	}
	for _, err := range errs {
		wantCancelled(t, "PutAll", err)
	}
	wantAbsent(t, s, d)
	wantAbsent(t, s, e)
}
