// SPDX-License-Identifier: Apache-2.0

package castest

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"runtime"
	"slices"
	"testing"

	"github.com/cloister-build/cloister/cas"
)

func testAbsent(t *testing.T, s cas.Store) {
	_, d := Blob(1, 100)
	wantAbsent(t, s, d)
}

// The zero Digest is an error in every method, and no panic.
func testZeroDigest(t *testing.T, s cas.Store) {
	none := cas.Digest{}
	wantOpen(t, s, none, 0, cas.ErrInvalid)
	wantPut(t, s, none, nil, cas.ErrInvalid)
	wantPut(t, s, none, []byte("x"), cas.ErrInvalid)
	_, err := s.Missing(t.Context(), []cas.Digest{cas.SHA256.Sum([]byte("x")), none})
	wantError(t, "Missing of the zero Digest", err, cas.ErrInvalid)
	if b, ok := cas.As[cas.Batcher](s); ok {
		wantError(t, "PutAll of the zero Digest", b.PutAll(t.Context(), []cas.Blob{{Data: []byte("x")}})[0], cas.ErrInvalid)
	}
	if f, ok := cas.As[cas.Filer](s); ok {
		_, _, err := f.File(t.Context(), none, false)
		wantError(t, "File of the zero Digest", err, cas.ErrInvalid)
	}
	if sp, ok := cas.As[cas.Splicer](s); ok {
		wantError(t, "Splice of the zero Digest", sp.Splice(t.Context(), none, cas.ChunkList{}), cas.ErrInvalid)
	}
}

// Rule 48.
func testOffset(t *testing.T, s cas.Store) {
	const size = 100_000
	b, d := Blob(1, size)
	put(t, s, b)
	for _, off := range []int64{0, 1, size / 2, size - 1, size} {
		wantContent(t, s, d, off, b[off:])
	}
	for _, off := range []int64{-1, size + 1, 1 << 62} {
		wantOpen(t, s, d, off, cas.ErrRange)
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
		wantPut(t, s, other, b, cas.ErrMismatch)
		wantAbsent(t, s, other)
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

func testCancelled(t *testing.T, s cas.Store) {
	b, d := Blob(1, 100)
	put(t, s, b)
	b2, d2 := Blob(2, 100)
	ctx := cancelled(t)
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

func testFetch(t *testing.T, s cas.Store) {
	f := capability[cas.Fetcher](t, s)
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
	ctx := cancelled(t)
	_, err := f.Fetch(ctx, []cas.Digest{absent})
	wantCancelled(t, "Fetch", err)
}

func testFile(t *testing.T, s cas.Store) {
	f := capability[cas.Filer](t, s)
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
		{b, false, 0o644},
		{b, true, 0o755},
		{b, true, 0o755},
		{b, false, 0o644},
		{nil, false, 0o644},
		{nil, true, 0o755},
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
