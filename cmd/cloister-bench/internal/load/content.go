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

// A blob is content that depends on a salt, a name and a number alone. It is half compressible.
type blob struct {
	data []byte
	hash string // SHA-256 in hexadecimal
	zip  []byte // data compressed, or nil if it is not to be
}

// run is how many bytes of a blob in a row are random, and then how many are not.
const run = 512

// blobs returns n blobs of size bytes each. Those of another salt or name are others.
func blobs(salt, name string, n int, size int64) []blob {
	all := make([]byte, int64(n)*size)
	bs := make([]blob, n)
	for i := range bs {
		bs[i] = fill(all[int64(i)*size:][:size:size], salt, name, i)
	}
	return bs
}

// newBlob returns the blob i of a salt and a name.
func newBlob(salt, name string, i int, size int64) blob {
	return fill(make([]byte, size), salt, name, i)
}

// fill makes data, which is zero, the blob i of a salt and a name.
func fill(data []byte, salt, name string, i int) blob {
	random := rand.NewChaCha8(sha256.Sum256(fmt.Appendf(nil, "%s\n%s\n%d", salt, name, i)))
	for off := 0; off < len(data); off += 2 * run {
		random.Read(data[off:min(off+run, len(data))])
	}
	return blob{data: data, hash: hash(data)}
}

func hash(b []byte) string {
	sum := sha256.Sum256(b)
	return hex.EncodeToString(sum[:])
}

// digest returns the blob's name as the API has it.
func (b *blob) digest() *repb.Digest {
	return &repb.Digest{Hash: b.hash, SizeBytes: int64(len(b.data))}
}

// resource returns the blob's name as ByteStream has it.
func (b *blob) resource() string {
	kind := "blobs"
	if b.zip != nil {
		kind = "compressed-blobs/zstd"
	}
	return fmt.Sprintf("%s/%s/%d", kind, b.hash, len(b.data))
}

// sent returns what of the blob is sent and received.
func (b *blob) sent() []byte {
	if b.zip != nil {
		return b.zip
	}
	return b.data
}

// content is what one round writes, reads and asks for.
type content struct {
	batched, streamed, zipped []blob
	large, largeZipped        []blob // one, or none
	absent                    []*repb.Digest
}

// newContent makes the content of a round; what is compressed only if one of servers serves it.
func newContent(c *Config, round int, servers []*Server) (*content, error) {
	salt := fmt.Sprintf("%s/%d", c.Salt, round)
	one := int(min(1, c.Large))
	x := &content{
		batched:  blobs(salt, "batched", c.Blobs, c.Size),
		streamed: blobs(salt, "streamed", c.Blobs, c.Size),
		large:    blobs(salt, "large", one, c.Large),
		absent:   make([]*repb.Digest, c.Blobs),
	}
	for i := range x.absent {
		x.absent[i] = &repb.Digest{Hash: hash(fmt.Appendf(nil, "%s\nabsent\n%d", salt, i)), SizeBytes: c.Size}
	}
	if c.Zstd && slices.ContainsFunc(servers, func(s *Server) bool { return s.zstd }) {
		x.zipped = blobs(salt, "zipped", c.Blobs, c.Size)
		x.largeZipped = blobs(salt, "large zipped", one, c.Large)
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
	}
	return x, nil
}
