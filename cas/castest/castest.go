// SPDX-License-Identifier: Apache-2.0

// Package castest holds the contracts of package cas as test suites, Memory, an in-memory store, and Faulty, which adds
// faults to any store. Only tests import it.
package castest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"runtime"
	"slices"
	"sync"
	"testing"
	"testing/iotest"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"
)

// Blob returns size pseudo-random bytes that depend only on seed and size, and their digest.
func Blob(seed byte, size int) ([]byte, cas.Digest) {
	b := make([]byte, size)
	rand.NewChaCha8([32]byte{seed, byte(size), byte(size >> 8), byte(size >> 16), byte(size >> 24)}).Read(b)
	return b, cas.SHA256.Sum(b)
}

// TestStore checks that stores keep the contract of cas.Store, and those of cas.Batcher, cas.Fetcher, cas.Filer,
// cas.Locator and cas.Splicer if they implement them. Each store must be empty and have room for 32 MiB.
func TestStore(t *testing.T, newStore func(t *testing.T) cas.Store) {
	for _, c := range []struct {
		name string
		test func(t *testing.T, s cas.Store)
	}{
		{"RoundTrip", testRoundTrip},
		{"EmptyBlobIsAlwaysPresent", testEmptyBlob},
		{"FunctionsDoNotAlias", testFunctions},
		{"AbsentBlobIsNotFound", testAbsent},
		{"OpenHonoursOffset", testOffset},
		{"SizeIsPartOfTheDigest", testSizeInName},
		{"PutRejectsMismatch", testMismatch},
		{"PutStopsReadingTooMuch", testTooMany},
		{"PutRejectsHugeSize", testHuge},
		{"PutStoresNothingOfFailingReader", testFailingReader},
		{"PutOfPresentBlob", testPutPresent},
		{"MissingKeepsOrderAndDeduplicates", testMissing},
		{"ConcurrentPutsOfOneBlob", testConcurrentPut},
		{"ConcurrentPutAndOpen", testConcurrentOpen},
		{"CancelledContext", testCancelled},
		{"CancelledDuringPut", testCancelledPut},
		{"PutAll", testPutAll},
		{"PutAllVerifiesEveryBlob", testPutAllWrong},
		{"PutAllOfManySizes", testPutAllSizes},
		{"ConcurrentPutAll", testConcurrentPutAll},
		{"CancelledPutAll", testCancelledPutAll},
		{"Fetch", testFetch},
		{"File", testFile},
		{"Locate", testLocate},
		{"LocateWhilePutting", testLocateWhilePutting},
		{"SplicedBlobIsABlob", testSpliced},
		{"SpliceRejectsInvalidLists", testSpliceRejects},
		{"SpliceReplacesAndFlattens", testSpliceFlattens},
		{"CancelledSplice", testCancelledSplice},
	} {
		t.Run(c.name, func(t *testing.T) { c.test(t, newStore(t)) })
	}
}

func testRoundTrip(t *testing.T, s cas.Store) {
	for _, size := range []int{0, 1, 64 << 10, 5 << 20} {
		b, d := Blob(1, size)
		put(t, s, b)
		if got := get(t, s, d, 0); !bytes.Equal(got, b) {
			t.Errorf("Open of %d bytes: got %d other bytes", size, len(got))
		}
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
		if r, err := s.Open(t.Context(), d, 1); !errors.Is(err, cas.ErrRange) {
			closeIfOpen(r)
			t.Errorf("Open of the empty blob at 1: got %v, want ErrRange", err)
		}
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
				if err := s.Put(t.Context(), d, bytes.NewReader(b)); !errors.Is(err, cas.ErrInvalid) {
					t.Errorf("Put with a function that is not served, %v: got %v, want ErrInvalid", d, err)
				}
				if r, err := s.Open(t.Context(), d, 0); !errors.Is(err, cas.ErrInvalid) {
					closeIfOpen(r)
					t.Errorf("Open with a function that is not served, %v: got %v, want ErrInvalid", d, err)
				}
				continue
			}
			ds = append(ds, d)
		}
		for _, d := range ds {
			wantAbsent(t, s, d)
			if err := s.Put(t.Context(), d, bytes.NewReader(b)); err != nil {
				t.Fatalf("Put of %v: %v", d, err)
			}
			if got := get(t, s, d, 0); !bytes.Equal(got, b) {
				t.Errorf("Open of %v: got %d other bytes", d, len(got))
			}
			other := d.Function().Sum(append([]byte("not "), b...))
			if err := s.Put(t.Context(), other, bytes.NewReader(b)); !errors.Is(err, cas.ErrMismatch) {
				t.Errorf("Put of other content as %v: got %v, want ErrMismatch", other, err)
			}
		}
		for _, d := range ds {
			wantPresent(t, s, d)
		}
	}
}

func testAbsent(t *testing.T, s cas.Store) {
	_, d := Blob(1, 100)
	wantAbsent(t, s, d)
}

// Rule 48.
func testOffset(t *testing.T, s cas.Store) {
	const size = 100_000
	b, d := Blob(1, size)
	put(t, s, b)
	for _, off := range []int64{0, 1, size / 2, size - 1, size} {
		if got := get(t, s, d, off); !bytes.Equal(got, b[off:]) {
			t.Errorf("Open at %d: got %d bytes, want the last %d", off, len(got), size-off)
		}
	}
	for _, off := range []int64{-1, size + 1, 1 << 62} {
		r, err := s.Open(t.Context(), d, off)
		if !errors.Is(err, cas.ErrRange) {
			closeIfOpen(r)
			t.Errorf("Open at %d: got %v, want ErrRange", off, err)
		}
	}
}

// Rule 17.
func testSizeInName(t *testing.T, s cas.Store) {
	b, d := Blob(1, 100)
	put(t, s, b)
	for _, size := range []int64{0, 99, 101} {
		other, err := cas.NewDigest(d.Function(), d.Hash(), size)
		if err != nil {
			t.Fatal(err)
		}
		wantAbsent(t, s, other)
		if err := s.Put(t.Context(), other, bytes.NewReader(b)); !errors.Is(err, cas.ErrMismatch) {
			t.Errorf("Put of 100 bytes as %d: got %v, want ErrMismatch", size, err)
		}
		wantAbsent(t, s, other)
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
		if err := s.Put(t.Context(), d, bytes.NewReader(c.data)); !errors.Is(err, cas.ErrMismatch) {
			t.Errorf("%s: got %v, want ErrMismatch", c.name, err)
		}
		wantAbsent(t, s, d)
		if len(c.data) > 0 {
			wantAbsent(t, s, d.Function().Sum(c.data))
		}
	}
	put(t, s, b)
	if got := get(t, s, d, 0); !bytes.Equal(got, b) {
		t.Error("after rejected Puts, Open returned other content")
	}
}

// Rule 42: content that is too long is rejected early.
func testTooMany(t *testing.T, s cas.Store) {
	const size, slack = 1000, 1 << 20
	_, d := Blob(1, size)
	r := &endless{max: 64 * slack}
	if err := s.Put(t.Context(), d, r); !errors.Is(err, cas.ErrMismatch) {
		t.Errorf("Put of an endless reader: got %v, want ErrMismatch", err)
	}
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
		if !errors.Is(err, cas.ErrMismatch) && !errors.Is(err, cas.ErrFull) {
			t.Errorf("Put of 100 bytes as %d: got %v, want ErrMismatch or ErrFull", size, err)
		}
		wantAbsent(t, s, d)
	}
}

func testFailingReader(t *testing.T, s cas.Store) {
	errBroken := errors.New("broken pipe to the client")
	b, d := Blob(1, 200_000)
	for _, n := range []int{0, 1, len(b) / 2, len(b)} {
		r := io.MultiReader(bytes.NewReader(b[:n]), iotest.ErrReader(errBroken))
		if err := s.Put(t.Context(), d, r); !errors.Is(err, errBroken) {
			t.Errorf("Put of a reader that fails after %d bytes: got %v, want that error", n, err)
		}
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
	if got := get(t, s, d, 0); !bytes.Equal(got, b) {
		t.Error("after three Puts of a blob, Open returned other content")
	}
}

// Rule 23.
func testMissing(t *testing.T, s cas.Store) {
	var ds []cas.Digest
	for i := range 20 {
		b, d := Blob(byte(i), 10+i)
		ds = append(ds, d)
		if i%3 == 0 {
			put(t, s, b)
		}
	}
	asked := append(slices.Clone(ds), cas.SHA256.Sum(nil))
	slices.Reverse(asked)
	asked = append(asked, ds...)
	var want []cas.Digest
	for i, d := range slices.Backward(ds) {
		if i%3 != 0 {
			want = append(want, d)
		}
	}
	got, err := s.Missing(t.Context(), asked)
	if err != nil {
		t.Fatal(err)
	}
	if !slices.Equal(got, want) {
		t.Errorf("Missing of %d digests:\n got %v\nwant %v", len(asked), got, want)
	}
	if got, err := s.Missing(t.Context(), nil); err != nil || len(got) != 0 {
		t.Errorf("Missing of nothing: got %v, %v", got, err)
	}
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
	if got := get(t, s, d, 0); !bytes.Equal(got, b) {
		t.Error("after concurrent Puts, Open returned other content")
	}
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

func testCancelled(t *testing.T, s cas.Store) {
	b, d := Blob(1, 100)
	put(t, s, b)
	b2, d2 := Blob(2, 100)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	r, err := s.Open(ctx, d, 0)
	closeIfOpen(r)
	wantCancelled(t, "Open", err)
	wantCancelled(t, "Put", s.Put(ctx, d2, bytes.NewReader(b2)))
	_, err = s.Missing(ctx, []cas.Digest{d})
	wantCancelled(t, "Missing", err)
	if f, ok := cas.As[cas.Filer](s); ok {
		_, release, err := f.File(ctx, d, false)
		if err == nil {
			release()
		}
		wantCancelled(t, "File", err)
	}
	wantAbsent(t, s, d2)
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

func batcher(t *testing.T, s cas.Store) cas.Batcher {
	t.Helper()
	b, ok := cas.As[cas.Batcher](s)
	if !ok {
		t.Skip("the store is not a cas.Batcher")
	}
	return b
}

// PutAll returns each blob's error at its index.
func testPutAll(t *testing.T, s cas.Store) {
	all := batcher(t, s)
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
	all := batcher(t, s)
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
		if got := get(t, s, d, 0); !bytes.Equal(got, want) {
			t.Error("after rejected blobs, Open returned other content")
		}
	}
}

// PutAll accepts blobs of any size.
func testPutAllSizes(t *testing.T, s cas.Store) {
	all := batcher(t, s)
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
			if got := get(t, s, b.Digest, 0); !bytes.Equal(got, b.Data) {
				t.Errorf("Open of a blob of %d bytes returned other content", len(b.Data))
			}
		}
	}
	if missing, err := s.Missing(t.Context(), ds); err != nil || len(missing) > 0 {
		t.Errorf("%d of %d blobs are absent, %v", len(missing), len(ds), err)
	}
}

// Concurrent batches and Puts share blobs.
func testConcurrentPutAll(t *testing.T, s cas.Store) {
	all := batcher(t, s)
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
		if got := get(t, s, b.Digest, 0); !bytes.Equal(got, b.Data) {
			t.Error("after concurrent batches, Open returned other content")
		}
	}
}

func testCancelledPutAll(t *testing.T, s cas.Store) {
	all := batcher(t, s)
	b, d := Blob(1, 100)
	c, e := Blob(2, 3<<20)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
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

func testFetch(t *testing.T, s cas.Store) {
	f, ok := cas.As[cas.Fetcher](s)
	if !ok {
		t.Skip("the store is not a cas.Fetcher")
	}
	if absent, err := f.Fetch(t.Context(), nil); err != nil || len(absent) > 0 {
		t.Errorf("Fetch of nothing: %v, %v", absent, err)
	}
	ds := []cas.Digest{cas.SHA256.Sum(nil)}
	for i := range 10 {
		b, d := Blob(byte(i), 1000<<i)
		ds = append(ds, d, d)
		if i%2 == 0 {
			put(t, s, b)
		}
	}
	for range 2 {
		absent, err := f.Fetch(t.Context(), ds)
		if err != nil {
			t.Errorf("Fetch of present and absent blobs: %v", err)
		}
		seen := map[cas.Digest]bool{}
		for _, d := range absent {
			missing, err := s.Missing(t.Context(), []cas.Digest{d})
			if err != nil || len(missing) == 0 || seen[d] || !slices.Contains(ds, d) {
				t.Errorf("Fetch reported %s as absent: it is present, or a duplicate", d)
			}
			seen[d] = true
		}
	}
	for i := range 10 {
		b, d := Blob(byte(i), 1000<<i)
		if i%2 != 0 {
			wantAbsent(t, s, d)
		} else if got := get(t, s, d, 0); !bytes.Equal(got, b) {
			t.Errorf("Open of a blob of %d bytes after Fetch returned other content", len(b))
		}
	}
	_, absent := Blob(99, 99)
	if _, err := f.Fetch(t.Context(), []cas.Digest{absent}); err != nil {
		t.Errorf("Fetch of an absent blob: %v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err := f.Fetch(ctx, []cas.Digest{absent})
	wantCancelled(t, "Fetch", err)
}

func testFile(t *testing.T, s cas.Store) {
	f, ok := cas.As[cas.Filer](s)
	if !ok {
		t.Skip("the store is not a cas.Filer")
	}
	b, d := Blob(1, 10_000)
	for _, executable := range []bool{false, true} {
		if _, _, err := f.File(t.Context(), d, executable); !errors.Is(err, cas.ErrNotFound) {
			t.Errorf("File of an absent blob: got %v, want ErrNotFound", err)
		}
	}
	put(t, s, b)
	put(t, s, nil)
	for _, c := range []struct {
		data       []byte
		executable bool
		mode       os.FileMode
	}{
		{b, false, 0o444},
		{b, true, 0o555},
		{b, true, 0o555},
		{b, false, 0o444},
		{nil, false, 0o444},
		{nil, true, 0o555},
	} {
		name := fmt.Sprintf("File of %d bytes, executable %v", len(c.data), c.executable)
		path, release, err := f.File(t.Context(), cas.SHA256.Sum(c.data), c.executable)
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		fi, err := os.Lstat(path)
		if err != nil {
			t.Fatal(err)
		}
		if !fi.Mode().IsRegular() {
			t.Errorf("%s: %s has mode %v, want a regular file", name, path, fi.Mode())
		}
		// Windows supports only the read-only bit.
		if runtime.GOOS != "windows" && fi.Mode().Perm() != c.mode {
			t.Errorf("%s: mode %v, want %v", name, fi.Mode().Perm(), c.mode)
		}
		if got, err := os.ReadFile(path); err != nil || !bytes.Equal(got, c.data) {
			t.Errorf("%s: got %d other bytes, %v", name, len(got), err)
		}
		release()
	}
}

func locator(t *testing.T, s cas.Store) cas.Locator {
	t.Helper()
	l, ok := cas.As[cas.Locator](s)
	if !ok {
		t.Skip("the store is not a cas.Locator")
	}
	return l
}

// A Location has an extent for each digest, and stays valid until it is released.
func testLocate(t *testing.T, s cas.Store) {
	l := locator(t, s)
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
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err = l.Locate(ctx, ds)
	wantCancelled(t, "Locate", err)
}

// Concurrent Puts do not invalidate a Location.
func testLocateWhilePutting(t *testing.T, s cas.Store) {
	l := locator(t, s)
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

// TestActionCache checks that action caches keep the contract of cas.ActionCache. Each must be empty.
func TestActionCache(t *testing.T, newCache func(t *testing.T) cas.ActionCache) {
	result := func(exit int32) *repb.ActionResult {
		_, out := Blob(byte(exit), 10)
		aux, err := anypb.New(out.Proto())
		if err != nil {
			t.Fatal(err)
		}
		return &repb.ActionResult{
			OutputFiles: []*repb.OutputFile{{Path: "bin/cc", Digest: out.Proto(), IsExecutable: true}},
			StdoutRaw:   []byte("ünï\x00"),
			ExitCode:    exit,
			ExecutionMetadata: &repb.ExecutedActionMetadata{
				Worker: "w1", AuxiliaryMetadata: []*anypb.Any{aux},
			},
		}
	}
	_, action := Blob(1, 100)
	wantMiss := func(t *testing.T, ac cas.ActionCache, d cas.Digest) {
		t.Helper()
		if r, err := ac.Lookup(t.Context(), d); !errors.Is(err, cas.ErrNotFound) {
			t.Errorf("Lookup of %s: got %v, %v, want ErrNotFound", d, r, err)
		}
	}
	wantHit := func(t *testing.T, ac cas.ActionCache, d cas.Digest, want *repb.ActionResult) {
		t.Helper()
		got, err := ac.Lookup(t.Context(), d)
		if err != nil {
			t.Errorf("Lookup of %s: %v", d, err)
		} else if !proto.Equal(got, want) {
			t.Errorf("Lookup of %s:\n got %v\nwant %v", d, got, want)
		}
	}
	record := func(t *testing.T, ac cas.ActionCache, d cas.Digest, r *repb.ActionResult) {
		t.Helper()
		if err := ac.Record(t.Context(), d, r); err != nil {
			t.Fatal(err)
		}
	}
	t.Run("MissIsNotFound", func(t *testing.T) {
		wantMiss(t, newCache(t), action)
	})
	t.Run("RecordThenLookup", func(t *testing.T) {
		ac := newCache(t)
		record(t, ac, action, result(7))
		wantHit(t, ac, action, result(7))
	})
	t.Run("EmptyResult", func(t *testing.T) {
		ac := newCache(t)
		record(t, ac, action, &repb.ActionResult{})
		wantHit(t, ac, action, &repb.ActionResult{})
	})
	t.Run("RecordReplaces", func(t *testing.T) {
		ac := newCache(t)
		big := result(2)
		big.StdoutRaw, _ = Blob(1, 50_000)
		for _, r := range []*repb.ActionResult{result(1), big, result(3)} {
			record(t, ac, action, r)
			wantHit(t, ac, action, r)
		}
	})
	t.Run("KeyIsWholeDigest", func(t *testing.T) {
		ac := newCache(t)
		record(t, ac, action, result(1))
		longer, err := cas.NewDigest(action.Function(), action.Hash(), action.Size()+1)
		if err != nil {
			t.Fatal(err)
		}
		_, other := Blob(2, 100)
		wantMiss(t, ac, longer)
		wantMiss(t, ac, other)
		record(t, ac, longer, result(2))
		record(t, ac, other, result(3))
		wantHit(t, ac, action, result(1))
		wantHit(t, ac, longer, result(2))
		wantHit(t, ac, other, result(3))
	})
	t.Run("ResultBelongsToCaller", func(t *testing.T) {
		ac := newCache(t)
		r := result(1)
		record(t, ac, action, r)
		r.ExitCode = 99
		got, err := ac.Lookup(t.Context(), action)
		if err != nil {
			t.Fatal(err)
		}
		got.OutputFiles[0].Path = "changed"
		wantHit(t, ac, action, result(1))
	})
	t.Run("ConcurrentRecordAndLookup", func(t *testing.T) {
		ac := newCache(t)
		record(t, ac, action, result(1))
		var wg sync.WaitGroup
		for i := range 4 {
			wg.Go(func() {
				for range 20 {
					if err := ac.Record(t.Context(), action, result(int32(i+1))); err != nil {
						t.Errorf("Record: %v", err)
					}
				}
			})
			wg.Go(func() {
				for range 20 {
					r, err := ac.Lookup(t.Context(), action)
					if err != nil {
						t.Errorf("Lookup during Record: %v", err)
					} else if !proto.Equal(r, result(r.ExitCode)) {
						t.Errorf("Lookup during Record returned a mixture: %v", r)
					}
				}
			})
		}
		wg.Wait()
	})
	t.Run("CancelledContext", func(t *testing.T) {
		ac := newCache(t)
		record(t, ac, action, result(1))
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		_, err := ac.Lookup(ctx, action)
		wantCancelled(t, "Lookup", err)
		wantCancelled(t, "Record", ac.Record(ctx, action, result(2)))
		wantHit(t, ac, action, result(1))
	})
}

func put(t *testing.T, s cas.Store, b []byte) {
	t.Helper()
	if _, err := cas.PutBytes(t.Context(), s, cas.SHA256, b); err != nil {
		t.Fatalf("Put of %d bytes: %v", len(b), err)
	}
}

func get(t *testing.T, s cas.Store, d cas.Digest, off int64) []byte {
	t.Helper()
	r, err := s.Open(t.Context(), d, off)
	if err != nil {
		t.Fatalf("Open of %s at %d: %v", d, off, err)
	}
	b, err := io.ReadAll(r)
	if err := errors.Join(err, r.Close()); err != nil {
		t.Fatalf("read of %s from %d: %v", d, off, err)
	}
	return b
}

func wantPresent(t *testing.T, s cas.Store, d cas.Digest) {
	t.Helper()
	if missing, err := s.Missing(t.Context(), []cas.Digest{d}); err != nil || len(missing) > 0 {
		t.Errorf("Missing of %s: got %v, %v, want it present", d, missing, err)
	}
}

func wantAbsent(t *testing.T, s cas.Store, d cas.Digest) {
	t.Helper()
	if missing, err := s.Missing(t.Context(), []cas.Digest{d}); err != nil || len(missing) != 1 {
		t.Errorf("Missing of %s: got %v, %v, want it absent", d, missing, err)
	}
	r, err := s.Open(t.Context(), d, 0)
	closeIfOpen(r)
	if !errors.Is(err, cas.ErrNotFound) {
		t.Errorf("Open of %s: got %v, want ErrNotFound", d, err)
	}
}

func wantCancelled(t *testing.T, what string, err error) {
	t.Helper()
	if !errors.Is(err, context.Canceled) {
		t.Errorf("%s: got %v, want context.Canceled", what, err)
	}
}

func closeIfOpen(r io.Closer) {
	if r != nil {
		r.Close()
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

type readerFunc func([]byte) (int, error)

func (f readerFunc) Read(p []byte) (int, error) { return f(p) }
