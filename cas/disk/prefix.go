// SPDX-License-Identifier: Apache-2.0

package disk

import (
	"context"
	"encoding/hex"
	"fmt"
	"regexp"
	"slices"
	"strings"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/disk/internal/index"
)

// digestPrefix matches what FindPrefix accepts: a digest function or nothing, and the beginning of HASH/SIZE.
var digestPrefix = regexp.MustCompile(`^(?:([a-z0-9]+):)?(([0-9a-f]{8})[0-9a-f]*(?:/[0-9]*)?)$`)

// FindPrefix returns at most limit blobs of the instance whose digest begins with prefix: at least 8 hexadecimal
// digits, optionally after the digest function and a colon. It returns cas.ErrInvalid for a malformed prefix. It visits
// the whole index, but reads no files and renews no leases. It does not find blobs of digest functions with hashes of
// more than 32 bytes, since the index does not contain these.
func (s *Store) FindPrefix(ctx context.Context, prefix string, limit int) ([]cas.Digest, error) {
	m := digestPrefix.FindStringSubmatch(prefix)
	if m == nil {
		return nil, fmt.Errorf("%w: %+.80q is not a prefix of a digest with at least 8 digits", cas.ErrInvalid, prefix)
	}
	end, err := s.cache.beginWith(ctx)
	if err != nil {
		return nil, err
	}
	defer end()
	instance, known := s.cache.instances.find(s.name)
	if !known {
		return nil, nil
	}
	function, text := m[1], m[2]
	first, _ := hex.DecodeString(m[3]) // the pattern admits only hexadecimal digits
	var found []cas.Digest
	s.cache.index.Each(func(e *index.Entry) bool {
		if e.Instance != instance || isResult(e.Key) || [4]byte(e.Hash[:4]) != [4]byte(first) {
			return true
		}
		d := digestOf(e.Key)
		matches := !d.IsZero() && (function == "" || function == d.Function().String()) &&
			strings.HasPrefix(fmt.Sprintf("%s/%d", d.Hash(), d.Size()), text)
		if matches && !slices.Contains(found, d) { // a blob may have an entry for its content and another one for its chunks
			found = append(found, d)
		}
		return len(found) < limit
	})
	slices.SortFunc(found, func(a, b cas.Digest) int { return strings.Compare(a.String(), b.String()) })
	return found, nil
}
