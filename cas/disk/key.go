// SPDX-License-Identifier: Apache-2.0

package disk

import (
	"encoding/hex"
	"fmt"
	"path/filepath"
	"strconv"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/disk/internal/index"
)

// What an entry is; the upper half of an index.Kind is the digest function.
const (
	blob index.Kind = iota + 1
	result

	kindBits = 4
	kindMask = 1<<kindBits - 1
)

// keyOf returns the key of d, which is a blob or an action with a result.
func keyOf(instance uint16, kind index.Kind, d cas.Digest) index.Key {
	k := index.Key{Size: d.Size(), Instance: instance, Kind: kind | index.Kind(d.Function())<<kindBits}
	// A Digest has been checked to be hexadecimal.
	_, _ = hex.Decode(k.Hash[:], []byte(d.Hash()))
	return k
}

// digestOf is the inverse of keyOf. It fails for a key that none is the key of, which only a damaged log holds.
func digestOf(k index.Key) (cas.Digest, error) {
	f := cas.Function(k.Kind >> kindBits)
	for _, served := range cas.Functions() {
		if f == served {
			return cas.NewDigest(f, hex.EncodeToString(k.Hash[:f.New().Size()]), k.Size)
		}
	}
	return cas.Digest{}, fmt.Errorf("%w: digest function %d", cas.ErrInvalid, f)
}

func isResult(k index.Key) bool { return k.Kind&kindMask == result }

// pathBelow returns the path of a file for the blob k below DIR/room.
func (c *Cache) pathBelow(room string, k index.Key) (string, error) {
	d, err := digestOf(k)
	if err != nil {
		return "", err
	}
	name, ok := c.instances.name(k.Instance)
	if !ok {
		return "", fmt.Errorf("%w: instance number %d", cas.ErrInvalid, k.Instance)
	}
	return filepath.Join(c.dir, room, escape(name), d.Function().String(), d.Hash()[:2],
		d.Hash()+"-"+strconv.FormatInt(d.Size(), 10)), nil
}
