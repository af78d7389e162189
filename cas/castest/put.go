// SPDX-License-Identifier: Apache-2.0

package castest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"runtime"
	"sync"
	"testing"
	"testing/iotest"

	"github.com/cloister-build/cloister/cas"
)

func testRoundTrip(t *testing.T, s cas.Store) {
	for _, size := range []int{0, 1, 64 << 10, 5 << 20} {
		b, d := Blob(1, size)
		put(t, s, b)
		wantContent(t, s, d, 0, b)
		wantPresent(t, s, d)
	}
}

// Rule 18.
func testEmptyBlob(t *testing.T, s cas.Store) {
	for _, f := range cas.Functions() {
		d := f.Sum(nil)
		wantPresent(t, s, d)
		if got := get(t, s, d, 0); len(got) != 0 {
			t.Errorf("Open of the empty blob: got %d bytes", len(got))
		}
		wantOpen(t, s, d, 1, cas.ErrRange)
		err := s.Put(t.Context(), d, bytes.NewReader(nil))
		if err != nil && (f == cas.SHA256 || !errors.Is(err, cas.ErrInvalid)) {
			t.Errorf("Put of the empty blob of %v: %v", f, err) // a server may serve fewer functions
		}
	}
}

// Rule 20: a blob stored under a digest of one function is absent under those of others, even if the hashes are
// equal, as those of SHA256 and SHA256TREE can be.
func testFunctions(t *testing.T, s cas.Store) {
	small, large := []byte("the same under every name"), make([]byte, 300<<10)
	for i := range large {
		large[i] = byte(i * i >> 7)
	}
	for _, b := range [][]byte{small, large} {
		var ds []cas.Digest
		for _, f := range cas.Functions() {
			d := f.Sum(b)
			if _, err := s.Missing(t.Context(), []cas.Digest{d}); errors.Is(err, cas.ErrInvalid) && f != cas.SHA256 {
				// A server may serve fewer functions, and then rejects everything.
				wantPut(t, s, d, b, cas.ErrInvalid)
				wantOpen(t, s, d, 0, cas.ErrInvalid)
				continue
			}
			ds = append(ds, d)
		}
		for _, d := range ds {
			wantAbsent(t, s, d)
			if err := s.Put(t.Context(), d, bytes.NewReader(b)); err != nil {
				t.Fatalf("Put of %v: %v", d, err)
			}
			wantContent(t, s, d, 0, b)
			other := d.Function().Sum(append([]byte("not "), b...))
			wantPut(t, s, other, b, cas.ErrMismatch)
		}
		for _, d := range ds {
			wantPresent(t, s, d)
		}
	}
}

// Rule 42.
func testMismatch(t *testing.T, s cas.Store) {
	const size = 70_000
	b, d := Blob(1, size)
	flipped := bytes.Clone(b)
	flipped[size/2] ^= 1
	for _, c := range []struct {
		name string
		data []byte
	}{
		{"wrong hash", flipped},
		{"nothing", nil},
		{"one byte short", b[:size-1]},
		{"one byte long", append(bytes.Clone(b), 0)},
		{"twice", append(bytes.Clone(b), b...)},
	} {
		wantError(t, c.name, s.Put(t.Context(), d, bytes.NewReader(c.data)), cas.ErrMismatch)
		wantAbsent(t, s, d)
		if len(c.data) > 0 {
			wantAbsent(t, s, d.Function().Sum(c.data))
		}
	}
	put(t, s, b)
	wantContent(t, s, d, 0, b)
}

// Rule 42: content that is too long is rejected early.
func testTooMany(t *testing.T, s cas.Store) {
	const size, slack = 1000, 1 << 20
	_, d := Blob(1, size)
	r := &endless{max: 64 * slack}
	wantError(t, "Put of an endless reader", s.Put(t.Context(), d, r), cas.ErrMismatch)
	if r.n > size+slack {
		t.Errorf("Put read %d bytes for a blob of %d", r.n, size)
	}
	wantAbsent(t, s, d)
}

// A claimed size alone costs nothing.
func testHuge(t *testing.T, s cas.Store) {
	b, small := Blob(1, 100)
	for _, size := range []int64{1 << 40, 1<<63 - 1} {
		d, err := cas.NewDigest(small.Function(), small.Hash(), size)
		if err != nil {
			t.Fatal(err)
		}
		err = s.Put(t.Context(), d, bytes.NewReader(b))
		if !errors.Is(err, cas.ErrMismatch) && !errors.Is(err, cas.ErrFull) && !errors.Is(err, cas.ErrUpstreamFull) {
			t.Errorf("Put of 100 bytes as %d: got %v, want ErrMismatch, ErrFull or ErrUpstreamFull", size, err)
		}
		wantAbsent(t, s, d)
	}
}

func testFailingReader(t *testing.T, s cas.Store) {
	errBroken := errors.New("broken pipe to the client")
	b, d := Blob(1, 200_000)
	for _, n := range []int{0, 1, len(b) / 2, len(b)} {
		r := io.MultiReader(bytes.NewReader(b[:n]), iotest.ErrReader(errBroken))
		wantError(t, fmt.Sprintf("Put of a reader that fails after %d bytes", n), s.Put(t.Context(), d, r), errBroken)
		wantAbsent(t, s, d)
	}
	// A reader may return data together with io.EOF, and in pieces of any size.
	for i, r := range []io.Reader{
		iotest.DataErrReader(bytes.NewReader(b)), iotest.HalfReader(bytes.NewReader(b)),
	} {
		if err := s.Put(t.Context(), d, r); err != nil {
			t.Errorf("Put of reader %d: %v", i, err)
		}
	}
	wantPresent(t, s, d)
}

// Rule 41.
func testPutPresent(t *testing.T, s cas.Store) {
	b, d := Blob(1, 5000)
	for range 3 {
		put(t, s, b)
	}
	wantContent(t, s, d, 0, b)
}

// Rule 47.
func testConcurrentPut(t *testing.T, s cas.Store) {
	b, d := Blob(1, 300_000)
	errs := make([]error, 8)
	var wg sync.WaitGroup
	for i := range errs {
		wg.Go(func() { errs[i] = s.Put(t.Context(), d, bytes.NewReader(b)) })
	}
	wg.Wait()
	if err := errors.Join(errs...); err != nil {
		t.Error(err)
	}
	wantContent(t, s, d, 0, b)
}

// A blob is either absent or complete.
func testConcurrentOpen(t *testing.T, s cas.Store) {
	const blobs = 16
	var wg sync.WaitGroup
	for i := range blobs {
		b, d := Blob(byte(i), 100_000)
		wg.Go(func() {
			if err := s.Put(t.Context(), d, bytes.NewReader(b)); err != nil {
				t.Errorf("Put: %v", err)
			}
		})
		wg.Go(func() {
			for range 50 {
				got, err := cas.ReadAll(t.Context(), s, d, d.Size())
				switch {
				case errors.Is(err, cas.ErrNotFound):
					runtime.Gosched()
				case err != nil:
					t.Errorf("Open during Put: %v", err)
					return
				default:
					if !bytes.Equal(got, b) {
						t.Error("Open during Put returned other content")
					}
					return
				}
			}
		})
	}
	wg.Wait()
}

func testCancelledPut(t *testing.T, s cas.Store) {
	b, d := Blob(1, 3<<20)
	for _, n := range []int{len(b) / 2, len(b)} {
		ctx, cancel := context.WithCancel(t.Context())
		r := io.MultiReader(bytes.NewReader(b[:n]), readerFunc(func([]byte) (int, error) {
			cancel()
			return 0, io.EOF
		}), bytes.NewReader(b[n:]))
		wantCancelled(t, fmt.Sprintf("Put cancelled after %d of %d bytes", n, len(b)), s.Put(ctx, d, r))
		cancel()
		wantAbsent(t, s, d)
	}
}

// endless yields zeros and counts them. It ends at max to protect the machine from a store that never stops.
type endless struct{ n, max int }

func (e *endless) Read(p []byte) (int, error) {
	if e.n >= e.max {
		return 0, io.EOF
	}
	clear(p)
	e.n += len(p)
	return len(p), nil
}
