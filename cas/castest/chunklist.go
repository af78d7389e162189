// SPDX-License-Identifier: Apache-2.0

package castest

import (
	"bytes"
	"errors"
	"io"
	"os"
	"slices"
	"strings"
	"testing"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
)

// PutChunks puts blobs of the given sizes, and returns their concatenation, its digest and its chunk list.
func PutChunks(t testing.TB, s cas.Store, seed byte, sizes ...int) ([]byte, cas.Digest, cas.ChunkList) {
	t.Helper()
	var all []byte
	m := cas.ChunkList{Function: repb.ChunkingFunction_REP_MAX_CDC}
	for i, size := range sizes {
		b, d := Blob(seed+byte(i), size)
		if err := s.Put(t.Context(), d, bytes.NewReader(b)); err != nil {
			t.Fatal(err)
		}
		all, m.Chunks = append(all, b...), append(m.Chunks, d)
	}
	return all, cas.SHA256.Sum(all), m
}

// A spliced blob behaves like any other.
func testSpliced(t *testing.T, s cas.Store) {
	m := capability[cas.Splicer](t, s)
	b, d, want := PutChunks(t, s, 50, 100_000, 1, 70_000, 200_000, 300)
	wantAbsent(t, s, d)
	if _, err := m.Split(t.Context(), d); !errors.Is(err, cas.ErrNotFound) {
		t.Errorf("Split of an absent blob: got %v, want ErrNotFound", err)
	}
	for range 2 { // the second call replaces the list
		if err := m.Splice(t.Context(), d, want); err != nil {
			t.Fatal(err)
		}
	}
	got, err := m.Split(t.Context(), d)
	if err != nil || got.Function != want.Function || !slices.Equal(got.Chunks, want.Chunks) {
		t.Errorf("Split: got %v, %v, want %v", got, err, want)
	}
	wantPresent(t, s, d)
	for _, off := range []int64{0, 1, 99_999, 100_000, 100_001, 370_000, int64(len(b))} {
		wantContent(t, s, d, off, b[off:])
	}
	for _, off := range []int64{-1, int64(len(b)) + 1} {
		wantOpen(t, s, d, off, cas.ErrRange)
	}
	if f, ok := cas.As[cas.Filer](s); ok {
		for _, executable := range []bool{false, true, true} {
			path, release, err := f.File(t.Context(), d, executable)
			if err != nil {
				t.Fatal(err)
			}
			if got, err := os.ReadFile(path); err != nil || !bytes.Equal(got, b) {
				t.Errorf("File: got %d other bytes, %v", len(got), err)
			}
			release()
		}
	}
	if p, ok := cas.As[cas.Locator](s); ok {
		at, err := p.Locate(t.Context(), []cas.Digest{d, want.Chunks[4], d})
		if err != nil {
			t.Fatal(err)
		}
		for _, i := range []int{0, 2} {
			if e := at.Extents()[i]; e.File != cas.Unpacked {
				t.Errorf("Locate: got %v, want Unpacked", e)
			}
		}
		at.Release()
	}
	put(t, s, b) // present already
	wantContent(t, s, d, 0, b)
}

func testSpliceRejects(t *testing.T, s cas.Store) {
	m := capability[cas.Splicer](t, s)
	_, d, good := PutChunks(t, s, 60, 1000, 2000)
	_, absent := Blob(70, 2000)
	_, empty := Blob(0, 0)
	for name, c := range map[string]struct {
		chunks []cas.Digest
		want   error
		text   string
	}{
		"absent chunk":     {[]cas.Digest{good.Chunks[0], absent}, cas.ErrNotFound, absent.Hash()},
		"too short":        {good.Chunks[:1], cas.ErrInvalid, "have 1000 bytes"},
		"too long":         {append(slices.Clone(good.Chunks), good.Chunks[0]), cas.ErrInvalid, "exceed its size"},
		"empty chunk":      {append(slices.Clone(good.Chunks), empty), cas.ErrInvalid, "is empty"},
		"nothing":          {nil, cas.ErrInvalid, "have 0 bytes"},
		"the blob by name": {[]cas.Digest{d}, cas.ErrNotFound, d.Hash()},
	} {
		err := m.Splice(t.Context(), d, cas.ChunkList{Chunks: c.chunks})
		if !errors.Is(err, c.want) || err != nil && !strings.Contains(err.Error(), c.text) {
			t.Errorf("%s: got %v, want %v with %q", name, err, c.want, c.text)
		}
		wantAbsent(t, s, d)
		if _, err := m.Split(t.Context(), d); !errors.Is(err, cas.ErrNotFound) {
			t.Errorf("%s: Split: got %v, want ErrNotFound", name, err)
		}
	}
	// The store never returns other content as the blob, even if nobody verified the list.
	lie := cas.ChunkList{Chunks: []cas.Digest{good.Chunks[1], good.Chunks[0]}}
	err := m.Splice(t.Context(), d, lie)
	if err == nil {
		var r io.ReadCloser
		if r, err = s.Open(t.Context(), d, 0); err == nil {
			_, err = io.ReadAll(r)
			r.Close()
		}
	}
	if !errors.Is(err, cas.ErrCorrupt) {
		t.Errorf("Open of a blob with chunks of another: got %v, want ErrCorrupt", err)
	}
}

// A chunk that is a chunk list is replaced by its chunks.
func testSpliceFlattens(t *testing.T, s cas.Store) {
	m := capability[cas.Splicer](t, s)
	inner, x, of := PutChunks(t, s, 80, 5000, 6000)
	if err := m.Splice(t.Context(), x, of); err != nil {
		t.Fatal(err)
	}
	tail, y := Blob(90, 700)
	put(t, s, tail)
	whole := append(bytes.Clone(inner), tail...)
	d := cas.SHA256.Sum(whole)
	nested := cas.ChunkList{Function: repb.ChunkingFunction_FAST_CDC_2020, Chunks: []cas.Digest{x, y}}
	if err := m.Splice(t.Context(), d, nested); err != nil {
		t.Fatal(err)
	}
	got, err := m.Split(t.Context(), d)
	want := []cas.Digest{of.Chunks[0], of.Chunks[1], y}
	if err != nil || !slices.Equal(got.Chunks, want) || got.Function != repb.ChunkingFunction_UNKNOWN {
		t.Errorf("Split: got %v, %v, want %v of UNKNOWN", got, err, want)
	}
	if b := get(t, s, d, 0); !bytes.Equal(b, whole) {
		t.Errorf("Open: got %d other bytes", len(b))
	}
	other := cas.ChunkList{Function: repb.ChunkingFunction_FAST_CDC_2020, Chunks: want}
	if err := m.Splice(t.Context(), d, other); err != nil {
		t.Fatal(err)
	}
	if got, err := m.Split(t.Context(), d); err != nil || got.Function != other.Function {
		t.Errorf("Split after another Splice: got %v, %v, want %v", got.Function, err, other.Function)
	}
}

func testCancelledSplice(t *testing.T, s cas.Store) {
	m := capability[cas.Splicer](t, s)
	_, d, of := PutChunks(t, s, 95, 5000, 6000)
	ctx := cancelled(t)
	wantCancelled(t, "Splice", m.Splice(ctx, d, of))
	_, err := m.Split(ctx, d)
	wantCancelled(t, "Split", err)
	wantAbsent(t, s, d)
}
