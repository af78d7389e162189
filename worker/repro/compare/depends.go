// SPDX-License-Identifier: Apache-2.0

package compare

import (
	"crypto/md5"  //nolint:gosec // recognizes digests, protects nothing
	"crypto/sha1" //nolint:gosec // as above
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"io"
	"maps"
	"regexp"
	"strings"

	"github.com/cloister-build/cloister/sandbox/printable"
)

// sums are the digests of files that differ, in hexadecimal, and their names. A text that contains those of both sides
// depends on the file.
type sums struct {
	a, b map[string]string
	left int64 // bytes that may still be hashed
}

// maxHashed limits the bytes hashed in one comparison.
const maxHashed = 32 << 20

func newSums(k Known) *sums {
	s := &sums{a: map[string]string{}, b: map[string]string{}, left: maxHashed}
	maps.Copy(s.a, k.A.Digests)
	maps.Copy(s.b, k.B.Digests)
	return s
}

// add adds the digests of a pair of files, unless they take too much.
func (s *sums) add(name string, a, b *io.SectionReader) error {
	size := a.Size() + b.Size()
	if size > min(s.left, 2*maxSearched) {
		return nil
	}
	s.left -= size
	for _, side := range []struct {
		file *io.SectionReader
		of   map[string]string
	}{{a, s.a}, {b, s.b}} {
		m, h1, h2 := md5.New(), sha1.New(), sha256.New() //nolint:gosec // as above
		if _, err := io.Copy(io.MultiWriter(m, h1, h2), fromStart(side.file)); err != nil {
			return err
		}
		for _, sum := range [][]byte{m.Sum(nil), h1.Sum(nil), h2.Sum(nil)} {
			side.of[hex.EncodeToString(sum)] = name
		}
	}
	return nil
}

// digestText matches digests in hexadecimal, and SHA-256 in base64 as in Python's RECORD files.
var digestText = regexp.MustCompile(`\b[0-9a-f]{64}\b|\b[0-9a-f]{40}\b|\b[0-9a-f]{32}\b|[0-9A-Za-z_+/-]{43}`)

// source returns the name of a file with another digest in each text, "" if there is none.
func (s *sums) source(a, b string) string {
	inA := map[string]string{}
	for _, sum := range digestsIn(a) {
		if name := s.a[sum]; name != "" {
			inA[name] = sum
		}
	}
	for _, sum := range digestsIn(b) {
		if other := inA[s.b[sum]]; other != "" && other != sum {
			return s.b[sum]
		}
	}
	return ""
}

func digestsIn(text string) []string {
	all := digestText.FindAllString(text, -1)
	for i, s := range all {
		if len(s) == 43 {
			s = strings.NewReplacer("-", "+", "_", "/").Replace(s)
			if sum, err := base64.RawStdEncoding.DecodeString(s); err == nil {
				all[i] = hex.EncodeToString(sum)
			}
		}
	}
	return all
}

// name marks differences of digests of other files that differ.
func (s *sums) name(ds []Difference) []Difference {
	for i := range ds {
		d := &ds[i]
		if name := s.source(d.A, d.B); name != "" {
			what := dependsOn + printable.Head(name, maxText/2)
			d.What, d.Fix = printable.Head(d.What, maxText-len(what))+what, ""
		}
	}
	return ds
}

const (
	dependsOn   = ", which depends on "
	followsRest = "follows from the rest"
)

// Follows reports whether a difference is only a consequence of another one.
func Follows(d *Difference) bool {
	return strings.Contains(d.What, dependsOn) || strings.Contains(d.What, followsRest)
}
