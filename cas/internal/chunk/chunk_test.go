// SPDX-License-Identifier: Apache-2.0

package chunk

import (
	"bufio"
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"math/bits"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"testing"
	"testing/iotest"

	"github.com/buildbarn/go-cdc"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
)

// noise returns n pseudorandom bytes determined by seed.
func noise(seed byte, n int) []byte {
	b := make([]byte, n)
	rand.NewChaCha8([32]byte{seed}).Read(b)
	return b
}

// lengths returns the sizes of the chunks of r, whose contents must be want.
func lengths(t testing.TB, r io.Reader, p Params, want []byte) (all []int) {
	t.Helper()
	c := must.Get(NewReader(r, p))(t)
	for {
		b, err := c.Next()
		if err == io.EOF {
			break
		} else if err != nil {
			t.Fatal(err)
		}
		must.Be(t, len(b) != 0 && len(b) <= len(want) && bytes.Equal(b, want[:len(b)]),
			"chunk %d of %d bytes differs from the stream", len(all), len(b))
		want = want[len(b):]
		all = append(all, len(b))
	}
	must.Be(t, len(want) == 0, "last %d bytes of the stream are in no chunk", len(want))
	return all
}

// A vector is one line of the API's test vectors.
type vector struct {
	seed           uint32
	offset, length int
	sum            string
	fingerprint    uint64
}

func vectors(t *testing.T) (all []vector) {
	t.Helper()
	f := must.Get(os.Open("testdata/fastcdc2020_test_vectors.txt"))(t)
	defer f.Close()
	var seed uint32
	for lines := bufio.NewScanner(f); lines.Scan(); {
		line := lines.Text()
		if _, err := fmt.Sscanf(line, "# Seed: %d", &seed); err == nil || line == "" || line[0] == '#' {
			continue
		}
		v := vector{seed: seed}
		if _, err := fmt.Sscan(line, &v.offset, &v.length, &v.sum, &v.fingerprint); err != nil {
			t.Fatalf("line %q: %v", line, err)
		}
		all = append(all, v)
	}
	must.Be(t, len(all) == 12, "got %d vectors, want 12", len(all))
	return all
}

// picture is the input of the vectors. It is not in this tree because of its licence; without it the vector test skips.
const picture = "testdata/SekienAkashita.jpg"

func TestRule061_FastCDCTestVectors(t *testing.T) {
	all := vectors(t)
	b, err := os.ReadFile(picture)
	if errors.Is(err, os.ErrNotExist) {
		t.Skipf("%s is missing: add the input of the vectors, 109,466 bytes with SHA-256 d9e749d9367fc908...", picture)
	} else if err != nil {
		t.Fatal(err)
	}
	sum := sha256.Sum256(b)
	must.Be(t, hex.EncodeToString(sum[:]) == "d9e749d9367fc908876749d6502eb212fee88c9a94892fb07da5ef3ba8bc39ed",
		"SHA-256 of %s: got %x, want d9e749d9367fc908...", picture, sum)
	for _, v := range all {
		n, hash := newFastCDC(4096, 16384, 65535, v.seed).cut(b[v.offset:])
		sum := sha256.Sum256(b[v.offset:][:n])
		// When the paper's loop stops at the first byte of a pair, it has already shifted the hash.
		if n%2 == 0 && v.offset+n < len(b) {
			hash <<= 1
		}
		expect.That(t, n == v.length && hex.EncodeToString(sum[:]) == v.sum && hash == v.fingerprint,
			"seed %d, offset %d: got length %d, sum %x, hash %d, want %+v", v.seed, v.offset, n, sum, hash, v)
	}
}

// TestVectorHashesFitTheMasks checks the vectors without their input: the hash at each cut has the bits of the mask
// clear.
func TestVectorHashesFitTheMasks(t *testing.T) {
	c := newFastCDC(4096, 16384, 65535, 0)
	for _, v := range vectors(t) {
		mask := c.hard
		if v.length >= 16384 {
			mask = c.easy
		}
		if v.length%2 == 0 {
			mask <<= 1
		}
		if end := v.offset + v.length; end < 109_466 && v.fingerprint&mask != 0 {
			t.Errorf("seed %d, offset %d: got hash %#x, want no bits of %#x", v.seed, v.offset, v.fingerprint, mask)
		}
		expect.That(t, v.length <= c.most && v.length >= c.least,
			"seed %d, offset %d: got length %d, want %d to %d", v.seed, v.offset, v.length, c.least, c.most)
	}
}

// TestMasksHaveTheirNumberOfBits covers the masks of averages above 64 KiB too, which go-cdc does not have.
func TestMasksHaveTheirNumberOfBits(t *testing.T) {
	for i, m := range masks {
		if n := bits.OnesCount64(m); m != 0 && n != i {
			t.Errorf("mask %d: got %d bits", i, n)
		}
	}
}

// TestRule061_FastCDCUsesTheHashOfGoCDC compares table and masks with go-cdc up to its largest average, 64 KiB. That
// module cuts after the byte whose hash fits, one byte later than the paper and the API's vectors, so each chunk is
// compared on its own.
func TestRule061_FastCDCUsesTheHashOfGoCDC(t *testing.T) {
	for name, b := range inputs(4 << 20) {
		for average := 1 << 10; average <= 64<<10; average *= 2 {
			ours := lengths(t, bytes.NewReader(b), FastCDC{Average: average}, b)
			theirs := cdc.NewFastContentDefinedChunker(&cdc.FastContentDefinedChunkerGearTable, average)
			at := 0
			for _, got := range ours {
				rest := b[at:]
				src := bufio.NewReaderSize(bytes.NewReader(rest), 4*average)
				chunk := must.Get(theirs.NewChunkReader(src).ReadNextChunk())(t)
				want := len(chunk)
				if got < 4*average && got < len(rest) {
					want--
				}
				must.Be(t, got == want,
					"%s, average %d, offset %d: got chunk of %d bytes, want %d", name, average, at, got, want)
				at += got
			}
		}
	}
}

// naiveFastCDC is the paper's definition: it computes the hash of every offset from scratch.
func naiveFastCDC(b []byte, average int, seed uint32) (all []int) {
	p := 0
	for p < len(b) {
		rest := b[p:]
		n := min(len(rest), 4*average)
		for i := average / 4; i < min(len(rest), 4*average)&^1 && len(rest) > average/4; i++ {
			var h uint64
			for j := max(average/4, i-63); j <= i; j++ {
				h += (gear[rest[j]] ^ uint64(seed)) << (i - j)
			}
			log := bits.Len(uint(average)) - 1
			mask := masks[log+2]
			if i >= average {
				mask = masks[log-2]
			}
			if h&mask == 0 {
				n = i
				break
			}
		}
		all = append(all, n)
		p += n
	}
	return all
}

// naiveRepMax is the definition of RepMaxCDC: it computes the hash of every offset from scratch.
func naiveRepMax(b []byte, least, horizon int) (all []int) {
	hash := func(at int) (h uint64) {
		for _, v := range b[at-window : at] {
			h = h<<1 + gear[v]
		}
		return h
	}
	p := 0
	for len(b)-p >= 2*least {
		for limit := min(p+least+horizon, len(b)-least); ; {
			best := p + least
			for at := best; at <= limit; at++ {
				if hash(at) > hash(best) {
					best = at
				}
			}
			if best-p < 2*least {
				all = append(all, best-p)
				p = best
				break
			}
			limit = best - least
		}
	}
	if p < len(b) {
		all = append(all, len(b)-p)
	}
	return all
}

// inputs returns various streams of about n bytes.
func inputs(n int) map[string][]byte {
	text := []byte(strings.Repeat("the quick brown fox jumps over the lazy dog\n", n/44+1))
	steps := make([]byte, n)
	for i := range steps {
		steps[i] = byte(i * i >> 9)
	}
	few := noise(3, n)
	for i := range few {
		few[i] &= 1
	}
	return map[string][]byte{
		"noise": noise(1, n), "more noise": noise(2, n+1), "zeros": make([]byte, n),
		"text": text, "steps": steps, "few": few,
		"nothing": nil, "a byte": {7}, "noise and zeros": append(noise(4, n/2), make([]byte, n/2)...),
	}
}

func TestFastCDCMatchesItsDefinition(t *testing.T) {
	for name, b := range inputs(100_000) {
		for _, seed := range []uint32{0, 666} {
			for _, average := range []int{1 << 10, 4 << 10} {
				got := lengths(t, bytes.NewReader(b), FastCDC{average, seed}, b)
				expect.Slices(t, got, naiveFastCDC(b, average, seed), "%s, average %d, seed %d", name, average, seed)
			}
		}
	}
}

func TestRule061_RepMaxCDCMatchesItsDefinition(t *testing.T) {
	for name, b := range inputs(30_000) {
		for _, p := range []RepMaxCDC{
			{64, 0},
			{64, 1},
			{64, 63},
			{64, 64},
			{64, 100},
			{64, 130},
			{64, 200},
			{64, 300},
			{64, 512},
			{100, 77},
			{256, 2048},
			{1000, 3000},
			{2000, 100_000},
		} {
			if name == "zeros" && p.Horizon > 3000 {
				continue // the definition takes quadratic time
			}
			got := lengths(t, bytes.NewReader(b), p, b)
			expect.Slices(t, got, naiveRepMax(b, p.Min, p.Horizon), "%s, %+v", name, p)
		}
	}
}

func TestInsertionChangesFewChunks(t *testing.T) {
	b := noise(9, 4<<20)
	changed := slices.Concat(b[:1<<20], []byte("inserted"), b[1<<20:])
	for name, p := range map[string]Params{
		"FastCDC": FastCDC{Average: 16 << 10}, "RepMaxCDC": RepMaxCDC{8 << 10, 64 << 10},
	} {
		sums := map[[32]byte]bool{}
		fresh, total := 0, 0
		for i, data := range [][]byte{b, changed} {
			for _, n := range lengths(t, bytes.NewReader(data), p, data) {
				sum := sha256.Sum256(data[:n])
				data = data[n:]
				if total++; i == 1 && !sums[sum] {
					fresh++
				}
				sums[sum] = true
			}
		}
		expect.That(t, fresh != 0 && fresh <= 10,
			"%s, %d chunks: got %d new chunks after an insertion, want 1 to 10", name, total, fresh)
	}
}

func TestNewReaderRejectsParamsOutOfRange(t *testing.T) {
	for _, p := range []Params{
		FastCDC{},
		FastCDC{Average: 512},
		FastCDC{Average: 1000},
		FastCDC{Average: 1025},
		FastCDC{Average: 16 << 20},
		FastCDC{Average: -1024},
		RepMaxCDC{},
		RepMaxCDC{Min: 63},
		RepMaxCDC{Min: 64, Horizon: -1},
		RepMaxCDC{Min: 64, Horizon: maxHorizon + 1},
		RepMaxCDC{Min: maxAverage + 1},
	} {
		expect.That(t, expect.Err(NewReader(bytes.NewReader(nil), p)) != nil, "NewReader(%+v): got no error", p)
	}
}

func TestNextKeepsReturningReadErrors(t *testing.T) {
	broken := errors.New("broken")
	for name, p := range map[string]Params{
		"FastCDC": FastCDC{Average: 1 << 10}, "RepMaxCDC": RepMaxCDC{1 << 10, 8 << 10},
	} {
		b := noise(1, 100_000)
		c := must.Get(NewReader(io.MultiReader(bytes.NewReader(b), iotest.ErrReader(broken), bytes.NewReader(b)), p))(t)
		var err error
		for err == nil {
			_, err = c.Next()
		}
		if _, again := c.Next(); !errors.Is(err, broken) || !errors.Is(again, broken) {
			t.Errorf("%s: got errors %v and %v, want %v twice", name, err, again, broken)
		}
	}
}

// checkChunks checks that the chunks are in range and do not depend on the sizes of the reads.
func checkChunks(t *testing.T, p Params, least int, b []byte, step byte) {
	all := lengths(t, bytes.NewReader(b), p, b)
	for i, n := range all {
		if n > p.Max() || n < least && i < len(all)-1 {
			t.Errorf("chunk %d of %d: got %d bytes, want %d to %d", i, len(all), n, least, p.Max())
		}
	}
	for name, r := range map[string]io.Reader{
		"in halves": iotest.HalfReader(bytes.NewReader(b)), "with the end": iotest.DataErrReader(bytes.NewReader(b)),
		"by steps": &stepReader{bytes.NewReader(b), int(step) + 1},
	} {
		expect.Slices(t, lengths(t, r, p, b), all, "read %s", name)
	}
}

// A stepReader reads at most n bytes at a time.
type stepReader struct {
	r io.Reader
	n int
}

func (r *stepReader) Read(p []byte) (int, error) { return r.r.Read(p[:min(len(p), r.n)]) }

func FuzzFastCDC(f *testing.F) {
	f.Add([]byte(nil), byte(0), uint16(1), uint32(0))
	f.Add([]byte("abc"), byte(200), uint16(4000), uint32(666))
	f.Fuzz(func(t *testing.T, b []byte, step byte, times uint16, seed uint32) {
		b = bytes.Repeat(b, min(int(times), 1<<18/(len(b)+1)))
		checkChunks(t, FastCDC{1 << 10, seed}, 256, b, step)
	})
}

func FuzzRepMaxCDC(f *testing.F) {
	f.Add([]byte(nil), byte(0), uint16(1), uint16(0))
	f.Add([]byte("abcdefgh"), byte(200), uint16(4000), uint16(512))
	f.Fuzz(func(t *testing.T, b []byte, step byte, times, horizon uint16) {
		b = bytes.Repeat(b, min(int(times), 1<<14/(len(b)+1)))
		horizon %= 2048
		p := RepMaxCDC{64, int(horizon)}
		least := 64
		if len(b) < 64 {
			least = 0
		}
		checkChunks(t, p, least, b, step)
		got := lengths(t, bytes.NewReader(b), p, b)
		expect.Slices(t, got, naiveRepMax(b, 64, int(horizon)))
	})
}
