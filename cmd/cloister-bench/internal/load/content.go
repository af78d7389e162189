// SPDX-License-Identifier: Apache-2.0

package load

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"math/rand/v2"
	"slices"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/klauspost/compress/zstd"
)

// A blob is half-compressible content, determined by a salt, a name and a number.
type blob struct {
	data []byte
	hash string // SHA-256 in hexadecimal
	zip  []byte // compressed data, or nil to transfer the blob uncompressed
}

// runBytes is the length of the alternating random and zero parts of a blob.
const runBytes = 512

// newBlobs returns blobs 0 to n-1 of a salt and a name.
func newBlobs(salt, name string, n int, size int64) []blob {
	all := make([]byte, int64(n)*size)
	bs := make([]blob, n)
	for i := range bs {
		bs[i] = fill(all[int64(i)*size:][:size:size], salt, name, i)
	}
	return bs
}

// newBlob returns blob i of a salt and a name.
func newBlob(salt, name string, i int, size int64) blob {
	return fill(make([]byte, size), salt, name, i)
}

// fill turns data, which must be zero, into blob i of a salt and a name.
func fill(data []byte, salt, name string, i int) blob {
	random := rand.NewChaCha8(sha256.Sum256(fmt.Appendf(nil, "%s\n%s\n%d", salt, name, i)))
	for off := 0; off < len(data); off += 2 * runBytes {
		random.Read(data[off:min(off+runBytes, len(data))])
	}
	return blob{data: data, hash: hash(data)}
}

func hash(b []byte) string {
	sum := sha256.Sum256(b)
	return hex.EncodeToString(sum[:])
}

func (b *blob) digest() *repb.Digest {
	return &repb.Digest{Hash: b.hash, SizeBytes: int64(len(b.data))}
}

// resource returns the blob's ByteStream resource name without the instance.
func (b *blob) resource() string {
	kind := "blobs"
	if b.zip != nil {
		kind = "compressed-blobs/zstd"
	}
	return fmt.Sprintf("%s/%s/%d", kind, b.hash, len(b.data))
}

// wire returns the bytes to transfer.
func (b *blob) wire() []byte {
	if b.zip != nil {
		return b.zip
	}
	return b.data
}

// content is what one round writes, reads and looks up.
type content struct {
	batched, streamed, zipped []blob
	large, largeZipped        []blob // at most one
	absent                    []*repb.Digest
}

// newContent generates the content of a round. It compresses blobs only if a server supports that.
func newContent(c *Config, round int, servers []*Server) (*content, error) {
	salt := fmt.Sprintf("%s/%d", c.Salt, round)
	large := int(min(1, c.Large))
	x := &content{
		batched:  newBlobs(salt, "batched", c.Blobs, c.Size),
		streamed: newBlobs(salt, "streamed", c.Blobs, c.Size),
		large:    newBlobs(salt, "large", large, c.Large),
		absent:   make([]*repb.Digest, c.Blobs),
	}
	for i := range x.absent {
		x.absent[i] = &repb.Digest{Hash: hash(fmt.Appendf(nil, "%s\nabsent\n%d", salt, i)), SizeBytes: c.Size}
	}
	if !c.Zstd || !slices.ContainsFunc(servers, func(s *Server) bool { return s.zstd }) {
		return x, nil
	}
	x.zipped = newBlobs(salt, "zipped", c.Blobs, c.Size)
	x.largeZipped = newBlobs(salt, "large zipped", large, c.Large)
	encoder, err := zstd.NewWriter(nil, zstd.WithEncoderLevel(zstd.SpeedFastest))
	if err != nil {
		return nil, err
	}
	defer encoder.Close()
	for _, bs := range [][]blob{x.zipped, x.largeZipped} {
		for i := range bs {
			bs[i].zip = encoder.EncodeAll(bs[i].data, nil)
		}
	}
	return x, nil
}
