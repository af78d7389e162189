// SPDX-License-Identifier: Apache-2.0

package interop_test

import (
	"bufio"
	"bytes"
	"io"
	"math/rand/v2"
	"testing"

	"github.com/buildbarn/go-cdc"
	"github.com/cloister-build/cloister/cas/chunk"
)

// next returns the size of the next chunk of a stream of theirs; 0 is its end.
func next(t *testing.T, r cdc.ChunkReader) int {
	t.Helper()
	b, err := r.ReadNextChunk()
	if err != nil && err != io.EOF {
		t.Fatal(err)
	}
	return len(b)
}

// begin returns chunks of b as they cut it.
func begin(c cdc.ContentDefinedChunker, b []byte) cdc.ChunkReader {
	return c.NewChunkReader(bufio.NewReaderSize(bytes.NewReader(b), c.GetMaximumPeekSizeBytes()))
}

// streams are of noise, of few different bytes, and of both.
func streams(n int) [][]byte {
	b := make([]byte, n)
	rand.NewChaCha8([32]byte{1}).Read(b)
	few := bytes.Clone(b)
	for i := range few {
		few[i] &= 3
	}
	return [][]byte{b, few, append(bytes.Clone(b[:n/2]), make([]byte, n/2)...), b[:n/3+1], b[:1000], nil}
}

// RepMaxCDC is theirs: what they cut is the definition.
func TestRule061_RepMaxCDCIsThatOfGoCDC(t *testing.T) {
	for i, b := range streams(16 << 20) {
		for _, p := range []chunk.RepMaxCDC{{Min: 256 << 10, Horizon: 2 << 20}, {Min: 1024, Horizon: 8 << 10}, {Min: 64, Horizon: 640}, {Min: 4096}} {
			theirs := begin(cdc.NewRepMaxContentDefinedChunker(&cdc.FastContentDefinedChunkerGearTable, p.Min, p.Horizon), b)
			ours, err := chunk.NewReader(bytes.NewReader(b), p)
			if err != nil {
				t.Fatal(err)
			}
			for n := 0; ; n++ {
				got, err := ours.Next()
				if err != nil && err != io.EOF {
					t.Fatal(err)
				}
				if want := next(t, theirs); len(got) != want {
					t.Fatalf("stream %d, %+v: chunk %d has %d bytes, theirs %d", i, p, n, len(got), want)
				}
				if err == io.EOF {
					break
				}
			}
		}
	}
}

// Their FastCDC has the table and the masks of the paper's, up to chunks of 64 KiB, but cuts one byte later than it and
// than the API's vectors: behind the byte at which the hash fits. So each chunk is compared by itself.
func TestRule061_FastCDCHasTheHashOfGoCDC(t *testing.T) {
	for i, b := range streams(16 << 20) {
		for average := 1 << 10; average <= 64<<10; average *= 2 {
			ours, err := chunk.NewReader(bytes.NewReader(b), chunk.FastCDC{Average: average})
			if err != nil {
				t.Fatal(err)
			}
			theirs := cdc.NewFastContentDefinedChunker(&cdc.FastContentDefinedChunkerGearTable, average)
			for rest := b; ; {
				got, err := ours.Next()
				if err == io.EOF {
					break
				} else if err != nil {
					t.Fatal(err)
				}
				n := len(got)
				want := next(t, begin(theirs, rest))
				if n < 4*average && n < len(rest) {
					want--
				}
				if n != want {
					t.Fatalf("stream %d, %d bytes on average: at %d a chunk has %d bytes, theirs %d", i, average, len(b)-len(rest), n, want)
				}
				rest = rest[n:]
			}
		}
	}
}
