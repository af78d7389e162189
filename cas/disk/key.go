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

// The types of entries, in the lower half of an index.Kind. The upper half is the digest function.
const (
	blob index.Kind = iota + 1
	result
	chunkList

	kindBits = 4
	kindMask = 1<<kindBits - 1
)

// keyOf returns the key of a blob d, of the result of action d, or of the chunk list of blob d.
func keyOf(instance uint16, kind index.Kind, d cas.Digest) index.Key {
	k := index.Key{Size: d.Size(), Instance: instance, Kind: kind | index.Kind(d.Function())<<kindBits}
	// A Digest is always valid hexadecimal.
	if d.Function().Size() <= len(k.Hash) {
		_, _ = hex.Decode(k.Hash[:], []byte(d.Hash()))
		return k
	}
	// Longer hashes are hashed again: this saves memory for the common functions, and collisions are as unlikely as
	// those of SHA-256.
	hash, _ := hex.DecodeString(d.Hash())
	k.Hash = sha256.Sum256(hash)
	return k
}

// functionOf returns the digest function of k. It fails for an invalid key, which only a damaged log has.
func functionOf(k index.Key) (cas.Function, error) {
	f := cas.Function(k.Kind >> kindBits)
	if !slices.Contains(functions, f) {
		return 0, fmt.Errorf("%w: digest function %d", cas.ErrInvalid, f)
	}
	return f, nil
}

var functions = cas.Functions()

// digestOf is the inverse of keyOf. It returns the zero Digest for hashes that keyOf hashed again and for invalid keys.
func digestOf(k index.Key) cas.Digest {
	f, err := functionOf(k)
	if err != nil || f.Size() > len(k.Hash) {
		return cas.Digest{}
	}
	d, _ := cas.NewDigest(f, hex.EncodeToString(k.Hash[:f.Size()]), k.Size)
	return d
}

// nameOf returns the base name of a file for k.
func nameOf(f cas.Function, k index.Key) string {
	return hex.EncodeToString(k.Hash[:min(f.Size(), len(k.Hash))]) + "-" + strconv.FormatInt(k.Size, 10)
}

// is reports whether d, with the digest function of k, has the hash and size of k.
func is(k index.Key, d cas.Digest) bool {
	other := keyOf(k.Instance, blob, d)
	return other.Hash == k.Hash && other.Size == k.Size
}

func isResult(k index.Key) bool { return k.Kind&kindMask == result }

// isRecord reports whether k is a result or a chunk list: its content has a checksum since the digest does not
// determine it, and the latest one counts.
func isRecord(k index.Key) bool { return k.Kind&kindMask != blob }

// pathBelow returns the path of a file for the blob k below DIR/sub.
func (c *Cache) pathBelow(sub string, k index.Key) (string, error) {
	f, err := functionOf(k)
	if err != nil {
		return "", err
	}
	instance, ok := c.instances.name(k.Instance)
	if !ok {
		return "", fmt.Errorf("%w: instance number %d", cas.ErrInvalid, k.Instance)
	}
	name := nameOf(f, k)
	return filepath.Join(c.dir, sub, escape(instance), f.String(), name[:2], name), nil
}
