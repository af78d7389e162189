// SPDX-License-Identifier: Apache-2.0

package load

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"math/rand/v2"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
)

// A blob is half-compressible content, determined by a salt, a name and a number.
type blob struct {
	data []byte
	hash string // SHA-256 in hexadecimal
}

// runBytes is the length of the alternating random and zero parts of a blob.
const runBytes = 512

// newBlobs returns blobs 0 to n-1 of a salt and a name.
func newBlobs(salt, name string, n int, size int64) []blob {
	bs := make([]blob, n)
	for i := range bs {
		bs[i] = newBlob(salt, name, i, size)
	}
	return bs
}

// newBlob returns blob i of a salt and a name.
func newBlob(salt, name string, i int, size int64) blob {
	data := make([]byte, size)
	random := rand.NewChaCha8(sha256.Sum256(fmt.Appendf(nil, "%s\n%s\n%d", salt, name, i)))
	for off := 0; off < len(data); off += 2 * runBytes {
		random.Read(data[off:min(off+runBytes, len(data))])
	}
	return blob{data, hash(data)}
}

func hash(b []byte) string {
	sum := sha256.Sum256(b)
	return hex.EncodeToString(sum[:])
}

func (b *blob) digest() *repb.Digest {
	return &repb.Digest{Hash: b.hash, SizeBytes: int64(len(b.data))}
}

// content is what one round writes, reads and looks up.
type content struct {
	batched, streamed []blob
	large             []blob // at most one
	absent            []*repb.Digest
}

// newContent generates the content of a round.
func newContent(c *Config, round int) *content {
	salt := fmt.Sprintf("%s/%d", c.Salt, round)
	x := &content{
		batched:  newBlobs(salt, "batched", c.Blobs, c.Size),
		streamed: newBlobs(salt, "streamed", c.Blobs, c.Size),
		large:    newBlobs(salt, "large", int(min(1, c.Large)), c.Large),
		absent:   make([]*repb.Digest, c.Blobs),
	}
	for i := range x.absent {
		x.absent[i] = &repb.Digest{Hash: hash(fmt.Appendf(nil, "%s\nabsent\n%d", salt, i)), SizeBytes: c.Size}
	}
	return x
}
