// SPDX-License-Identifier: Apache-2.0

package cas_test

import (
	"bytes"
	"context"
	"slices"
	"sync"
	"testing"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/castest"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
)

// A packing store records the sizes of batches.
type packing struct {
	*castest.Memory
	mu     sync.Mutex
	blobs  []int // guarded by mu
	bytes  []int // guarded by mu
	refuse error
}

func (p *packing) PutAll(ctx context.Context, blobs []cas.Blob) []error {
	n := 0
	for _, b := range blobs {
		n += len(b.Data)
	}
	p.mu.Lock()
	p.blobs, p.bytes = append(p.blobs, len(blobs)), append(p.bytes, n)
	p.mu.Unlock()
	if p.refuse != nil {
		errs := make([]error, len(blobs))
		errs[len(errs)-1] = p.refuse
		return errs
	}
	return p.Memory.PutAll(ctx, blobs)
}

func TestBatchPutsTogether(t *testing.T) {
	p := &packing{Memory: castest.NewMemory()}
	b := cas.NewBatch(p)
	var want []cas.Digest
	add := func(data []byte) {
		t.Helper()
		d, err := b.AddBytes(t.Context(), cas.SHA256, data)
		expect.That(t, err == nil && d == cas.SHA256.Sum(data), "got %v, %v", d, err)
		if len(data) > 0 && !slices.Contains(want, d) {
			want = append(want, d)
		}
	}
	for i := range 100 {
		add([]byte{byte(i % 50)})
		add(nil)
	}
	expect.That(t, p.Len() == 0 && len(p.blobs) == 0, "%d blobs were put at once", p.Len())
	large, _ := castest.Blob(1, 2<<20)
	add(large)
	expect.That(t, p.Len() == 1 && len(p.blobs) == 0,
		"a large blob waits: %d blobs are stored, batches %v", p.Len(), p.blobs)
	other, _ := castest.Blob(2, 3<<20)
	d := must.Get(b.AddSeeker(t.Context(), cas.SHA256, bytes.NewReader(other)))(t)
	want = append(want, d)
	for range 2 { // the second Flush does nothing
		must.Succeed(t, b.Flush(t.Context()))
	}
	expect.Slices(t, p.blobs, []int{50}, "batches")
	expect.That(t, slices.Equal(b.Blobs(), want), "Blobs: got %d, want %d", len(b.Blobs()), len(want))
	expect.Equal(t, len(must.Get(p.Missing(t.Context(), want))(t)), 0)
}

// TestBatchIsBounded: Add flushes when too much is waiting.
func TestBatchIsBounded(t *testing.T) {
	for name, size := range map[string]int{"bytes": 50_000, "blobs": 16} {
		t.Run(name, func(t *testing.T) {
			p := &packing{Memory: castest.NewMemory()}
			b := cas.NewBatch(p)
			const each = 1500
			var wg sync.WaitGroup
			for g := range 4 {
				wg.Go(func() {
					for i := range each {
						data := bytes.Repeat([]byte{byte(g), byte(i), byte(i >> 8)}, size/3)
						expect.Error(t, expect.Err(b.AddBytes(t.Context(), cas.SHA256, data)), nil)
					}
				})
			}
			wg.Wait()
			must.Succeed(t, b.Flush(t.Context()))
			expect.That(t, p.Len() == 4*each && len(b.Blobs()) == 4*each,
				"%d blobs are stored, Blobs returns %d", p.Len(), len(b.Blobs()))
			if n := slices.Max(p.bytes); n > 5<<20 {
				t.Errorf("got a batch of %d bytes", n)
			}
			if n := slices.Max(p.blobs); n > 4*1000 {
				t.Errorf("got a batch of %d blobs", n)
			}
		})
	}
}

func TestBatchReturnsErrorOfStore(t *testing.T) {
	p := &packing{Memory: castest.NewMemory(), refuse: cas.ErrFull}
	b := cas.NewBatch(p)
	for i := range 3 {
		must.Get(b.AddBytes(t.Context(), cas.SHA256, []byte{byte(i)}))(t)
	}
	expect.Error(t, b.Flush(t.Context()), cas.ErrFull)
}
