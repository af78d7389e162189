// SPDX-License-Identifier: Apache-2.0

package reapi_test

import (
	"bytes"
	"fmt"
	"slices"
	"strings"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	bspb "google.golang.org/genproto/googleapis/bytestream"
	"google.golang.org/grpc/codes"
)

const zstdCompressor = repb.Compressor_ZSTD

// wantCompressed checks that messages write b, compressed as zipped.
func (c *client) wantCompressed(what string, b, zipped []byte, ms ...*bspb.WriteRequest) {
	c.Helper()
	r, err := c.write(ms...)
	if c.wantCode(what, err, codes.OK) && r.CommittedSize != int64(len(zipped)) && r.CommittedSize != -1 {
		c.Errorf("%s: committed_size is %d, want the %d compressed bytes, or -1", what, r.CommittedSize, len(zipped))
	}
	c.wantBlob("after "+what, c.readName(cas.SHA256.Sum(b).Proto()), b)
}

func compressedWrite(c *client) {
	for _, v := range c.compressors() {
		for _, size := range []int{1, 1000, 3 << 20} {
			b := compressible(size)
			z, d := compress(v, b), cas.SHA256.Sum(b).Proto()
			what := fmt.Sprintf("Write of %d bytes of %v, for %d", len(z), v, size)
			r, err := c.write(pieces(c.compressedUpload(v, d), z, 64<<10)...)
			// The blob is new, so the call cannot end early, except for the 256 possible blobs of one byte.
			if c.wantCode(what, err, codes.OK) && r.CommittedSize != int64(len(z)) && (size > 1 || r.CommittedSize != -1) {
				c.Errorf("%s: committed_size is %d, want %d", what, r.CommittedSize, len(z))
			}
			c.wantBlob("after "+what, c.readName(d), b)
			c.wantCompressed("another "+what, b, z, pieces(c.compressedUpload(v, d), z, 64<<10)...)
		}
		b, other := compressible(10_000), compressible(10_000)
		d := cas.SHA256.Sum(b).Proto()
		c.wantRefused(fmt.Sprintf("Write of %v of other bytes", v), d, pieces(c.compressedUpload(v, d), compress(v, other), 1000), codes.InvalidArgument)
		z := compress(v, b)
		ofZip := cas.SHA256.Sum(z).Proto()
		c.wantRefused(fmt.Sprintf("Write of %v with the digest of the compressed data", v), ofZip, pieces(c.compressedUpload(v, ofZip), z, 1000), codes.InvalidArgument)
		c.wantRefused(fmt.Sprintf("Write of no %v at all", v), d, pieces(c.compressedUpload(v, d), fresh(10_000), 1000), codes.InvalidArgument)
		bomb := absentDigest(1000)
		c.wantRefused(fmt.Sprintf("Write of %v of 100 MiB for 1000 bytes", v), bomb,
			pieces(c.compressedUpload(v, bomb), bombs[v](), 4096), codes.InvalidArgument)
	}
	b := compressible(2 << 20)
	d := c.put(b)
	for _, v := range c.compressors() {
		if r, err := c.write(pieces(c.compressedUpload(v, d), compress(v, b), 100)[0]); c.ours && (err != nil || r.CommittedSize != -1) {
			c.Errorf("the first message of a present blob of %v: got committed_size %d, %v, want -1 at once", v, r.GetCommittedSize(), err)
		}
	}
}

func compressedOffsets(c *client) {
	b := compressible(1 << 20)
	z, d := zstdOf(b), cas.SHA256.Sum(b).Proto()
	ms := pieces(c.zstdUpload(d), z, 100_000)
	ms[2].WriteOffset = 300_000 // as if uncompressed bytes were counted
	c.wantRefused("compressed Write with an uncompressed offset", d, ms, codes.InvalidArgument, codes.OutOfRange)

	// An interrupted write resumes where the server reports.
	name := c.zstdUpload(d)
	c.write(pieces(name, z, 100_000)[:2]...)
	c.wantPresent("after part of a compressed Write", d, false)
	q, err := c.bs.QueryWriteStatus(c.Context(), &bspb.QueryWriteStatusRequest{ResourceName: name})
	c.wantCode("QueryWriteStatus of part of a compressed Write", err, codes.OK, codes.NotFound)
	if q.GetComplete() || q.GetCommittedSize() > d.SizeBytes {
		c.Errorf("QueryWriteStatus of part of a compressed Write: got %v", q)
	}
	if q.GetCommittedSize() == 0 {
		c.wantCompressed("restarted compressed Write", b, z, pieces(name, z, 100_000)...)
		return
	}
	// The offset counts uncompressed bytes; the rest follows as a new compressed stream.
	rest := zstdOf(b[q.GetCommittedSize():])
	ms = pieces(name, rest, 100_000)
	for _, m := range ms {
		m.WriteOffset += q.GetCommittedSize()
	}
	_, err = c.write(ms...)
	c.wantCode(fmt.Sprintf("compressed Write resumed at %d", q.GetCommittedSize()), err, codes.OK)
	c.wantBlob("after the write", c.readName(d), b)
}

func compressedOddities(c *client) {
	b := compressible(100_000)
	z, d := zstdOf(b), cas.SHA256.Sum(b).Proto()
	for _, compressor := range []string{"lzma", "gzip", "ZSTD", "0", "unknown"} {
		name := c.resource("uploads/%s/compressed-blobs/%s/%s/%d", uuid(), compressor, d.Hash, d.SizeBytes)
		c.wantRefused(fmt.Sprintf("Write to compressed-blobs/%s", compressor), d, pieces(name, z, 1000), codes.InvalidArgument)
		_, _, err := c.read(c.resource("compressed-blobs/%s/%s/%d", compressor, d.Hash, d.SizeBytes), 0, 0)
		c.wantCode(fmt.Sprintf("Read of compressed-blobs/%s", compressor), err, codes.InvalidArgument)
	}
	for _, v := range c.compressors() {
		packed := compress(v, b)
		cases := map[string][]byte{
			"trailing garbage":               append(bytes.Clone(packed), "garbage"...),
			"a trailing byte":                append(bytes.Clone(packed), 0),
			"a truncated frame":              packed[:len(packed)-10],
			"a second frame with more bytes": slices.Concat(packed, compress(v, []byte("more"))),
			"no bytes":                       nil,
		}
		if c.ours {
			cases["a frame without its last byte"] = packed[:len(packed)-1]
			cases["too few bytes"] = compress(v, b[1:])
			cases["too many bytes"] = compress(v, append(bytes.Clone(b), 'x'))
		}
		for what, bad := range cases {
			c.wantRefused(fmt.Sprintf("Write of %v with %s", v, what), d, pieces(c.compressedUpload(v, d), bad, 1000), codes.InvalidArgument)
		}
	}
	frames := slices.Concat(zstdOf(b[:1]), zstdOf(b[1:50_000]), zstdOf(nil), zstdOf(b[50_000:]))
	c.wantCompressed("compressed Write of four frames", b, frames, pieces(c.zstdUpload(d), frames, 1000)...)

	empty := cas.SHA256.Sum(nil).Proto()
	for _, v := range c.compressors() {
		for _, data := range [][]byte{compress(v, nil), nil} {
			_, err := c.write(pieces(c.compressedUpload(v, empty), data, 1000)...)
			c.wantCode(fmt.Sprintf("Write of the empty blob of %v with %d bytes", v, len(data)), err, codes.OK)
		}
		c.wantDecompressed("the empty blob", c.compressedName(v, empty), v, 0, nil)
	}
}

func compressedRead(c *client) {
	for _, size := range []int{1, 100, 100_000, 3 << 20} {
		for _, b := range [][]byte{fresh(size), compressible(size)} {
			plain, zipped := c.put(b), compressible(size)
			d := cas.SHA256.Sum(zipped).Proto()
			c.wantCompressed(fmt.Sprintf("compressed Write of %d bytes", size), zipped, zstdOf(zipped), pieces(c.zstdUpload(d), zstdOf(zipped), 1<<20)...)
			for _, v := range c.compressors() {
				c.wantDecompressed(fmt.Sprintf("a blob that was uploaded uncompressed, of %d bytes", size), c.compressedName(v, plain), v, 0, b)
				c.wantDecompressed(fmt.Sprintf("a blob that was uploaded as zstd, of %d bytes", size), c.compressedName(v, d), v, 0, zipped)
			}
		}
	}
	for _, v := range c.caps.GetCacheCapabilities().GetSupportedCompressors() {
		_, _, err := c.read(c.compressedName(v, absentDigest(100)), 0, 0)
		c.wantCode(fmt.Sprintf("Read of an absent blob as %v", v), err, codes.NotFound)
		if _, _, err = c.read(c.compressedName(v, c.put(fresh(1000))), 0, 0); err != nil {
			c.Errorf("Read of a blob as %v: %v", v, err)
		}
	}
}

// wantDecompressed checks that a compressed Read from an offset returns b.
func (c *client) wantDecompressed(what, name string, v repb.Compressor_Value, off int64, b []byte) {
	c.Helper()
	z, largest, err := c.read(name, off, 0)
	if err != nil {
		c.Errorf("%s: Read as %v from offset %d: %v", what, v, off, err)
		return
	}
	got, err := decompress(v, z)
	if err != nil || !bytes.Equal(got, b) || largest > 4<<20 || c.ours && largest > 1<<20 {
		c.Errorf("%s: Read as %v from offset %d: got %s, %v, want %s", what, v, off, brief(got), err, brief(b))
	}
}

func compressedReadOffsets(c *client) {
	b := compressible(500_000)
	d := c.put(b)
	for _, v := range c.compressors() {
		name := c.compressedName(v, d)
		for _, off := range []int64{0, 1, 123_456, 499_999, 500_000} {
			c.wantDecompressed("a blob of 500,000 bytes", name, v, off, b[off:])
		}
		for _, off := range []int64{500_001, -1} {
			_, _, err := c.read(name, off, 0)
			c.wantCode(fmt.Sprintf("Read of 500,000 bytes as %v from offset %d", v, off), err, codes.OutOfRange)
		}
		for _, limit := range []int64{1, 500_000, -1} {
			_, _, err := c.read(name, 0, limit)
			c.wantCode(fmt.Sprintf("Read as %s with read_limit %d", strings.ToLower(v.String()), limit), err, codes.InvalidArgument)
		}
	}
}
