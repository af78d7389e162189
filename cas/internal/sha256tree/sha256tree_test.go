// SPDX-License-Identifier: Apache-2.0

package sha256tree_test

import (
	"bufio"
	"crypto/sha256"
	"encoding/hex"
	"os"
	"strconv"
	"strings"
	"testing"

	"github.com/cloister-build/cloister/cas/internal/sha256tree"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
)

// sequence returns n bytes: 0 to 250, repeated.
func sequence(n int) []byte {
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(i % 251)
	}
	return b
}

// sum hashes b in writes of at most step bytes.
func sum(b []byte, step int) string {
	h := sha256tree.New()
	for len(b) > 0 {
		n := min(step, len(b))
		h.Write(b[:n])
		b = b[n:]
	}
	return hex.EncodeToString(h.Sum(nil))
}

// TestRule061_SHA256TREEVectors uses the vectors of the API (sha256tree_test_vectors.txt): a length, and the hash of
// that many bytes of the sequence.
func TestRule061_SHA256TREEVectors(t *testing.T) {
	f := must.Get(os.Open("testdata/vectors.txt"))(t)
	defer f.Close()
	checked := 0
	for lines := bufio.NewScanner(f); lines.Scan(); checked++ {
		length, want, _ := strings.Cut(lines.Text(), "\t")
		n, err := strconv.Atoi(length)
		must.Be(t, err == nil, "line %q: %v", lines.Text(), err)
		for _, step := range []int{n, 1024, 1000, 1} {
			expect.Equal(t, sum(sequence(n), step), want, "%d bytes in steps of %d", n, step)
		}
	}
	expect.Equal(t, checked, 18, "vectors")
}

func TestOneLeafIsPlainSHA256(t *testing.T) {
	for _, n := range []int{0, 1, 1023, 1024} {
		want := sha256.Sum256(sequence(n))
		expect.Equal(t, sum(sequence(n), 100), hex.EncodeToString(want[:]), "%d bytes", n)
	}
}

func TestSumAndReset(t *testing.T) {
	h := sha256tree.New()
	h.Write(sequence(5000))
	first := hex.EncodeToString(h.Sum(nil))
	expect.Equal(t, hex.EncodeToString(h.Sum(nil)), first, "second Sum")
	h.Write(sequence(3000))
	h.Reset()
	h.Write(sequence(5000))
	expect.Equal(t, hex.EncodeToString(h.Sum(nil)), first, "after Reset")
}
