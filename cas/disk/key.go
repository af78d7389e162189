// SPDX-License-Identifier: Apache-2.0

package disk

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"path/filepath"
	"slices"
	"strconv"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/disk/internal/index"
)

// What an entry is; the upper half of an index.Kind is the digest function.
const (
	blob index.Kind = iota + 1
	result
	mapping

	kindBits = 4
	kindMask = 1<<kindBits - 1
)

// keyOf returns the key of d, which is a blob, an action with a result, or a blob with a mapping.
func keyOf(instance uint16, kind index.Kind, d cas.Digest) index.Key {
	k := index.Key{Size: d.Size(), Instance: instance, Kind: kind | index.Kind(d.Function())<<kindBits}
	// A Digest has been checked to be hexadecimal.
	if d.Function().Size() <= len(k.Hash) {
		_, _ = hex.Decode(k.Hash[:], []byte(d.Hash()))
		return k
	}
	// Folded, so that entries of the usual functions need not take twice the memory: as few digests share a key as blobs
	// share a SHA-256.
	hash, _ := hex.DecodeString(d.Hash())
	k.Hash = sha256.Sum256(hash)
	return k
}

// functionOf returns the digest function of k. It fails for a key that none has, which only a damaged log holds.
func functionOf(k index.Key) (cas.Function, error) {
	f := cas.Function(k.Kind >> kindBits)
	if !slices.Contains(functions, f) {
		return 0, fmt.Errorf("%w: digest function %d", cas.ErrInvalid, f)
	}
	return f, nil
}

var functions = cas.Functions()

// digestOf is the inverse of keyOf. It is the zero Digest for a hash that was folded, which nobody can tell any more, and
// for a key that none is the key of.
func digestOf(k index.Key) cas.Digest {
	f, err := functionOf(k)
	if err != nil || f.Size() > len(k.Hash) {
		return cas.Digest{}
	}
	d, _ := cas.NewDigest(f, hex.EncodeToString(k.Hash[:f.Size()]), k.Size)
	return d
}

// nameOf returns the last part of the name of a file for k.
func nameOf(f cas.Function, k index.Key) string {
	return hex.EncodeToString(k.Hash[:min(f.Size(), len(k.Hash))]) + "-" + strconv.FormatInt(k.Size, 10)
}

// is reports whether d, of the function of k, is what k is the key of.
func is(k index.Key, d cas.Digest) bool {
	other := keyOf(k.Instance, blob, d)
	return other.Hash == k.Hash && other.Size == k.Size
}

func isResult(k index.Key) bool { return k.Kind&kindMask == result }

// isRecord reports whether k is of what its digest does not determine, a result or a mapping: it brings its own
// checksum, and the last one holds.
func isRecord(k index.Key) bool { return k.Kind&kindMask != blob }

// pathBelow returns the path of a file for the blob k below DIR/room.
func (c *Cache) pathBelow(room string, k index.Key) (string, error) {
	f, err := functionOf(k)
	if err != nil {
		return "", err
	}
	instance, ok := c.instances.name(k.Instance)
	if !ok {
		return "", fmt.Errorf("%w: instance number %d", cas.ErrInvalid, k.Instance)
	}
	name := nameOf(f, k)
	return filepath.Join(c.dir, room, escape(instance), f.String(), name[:2], name), nil
}
