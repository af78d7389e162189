// SPDX-License-Identifier: Apache-2.0

package reapi_test

import (
	"bufio"
	"bytes"
	"crypto/md5"
	"encoding/binary"
	"fmt"
	"math/bits"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/internal/bazelrun"
	"github.com/cloister-build/cloister/tests/must"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"
)

// chunkRules are the rules 57 to 61.
var chunkRules = []rule{
	{57, "chunk", "splitting a blob returns its chunks", splitting, splitBlob},
	{58, "chunk", "chunk mappings are streamed, with the function first", splitting, streamedMapping},
	{59, "chunk", "the first message of a chunk mapping decides", splicing, firstMessage},
	{60, "chunk", "chunk mappings are verified", splicing, splice},
	{61, "chunk", "FastCDC and SHA256TREE match the published vectors", anything, vectors},
}

// streamsMappings reports whether the server has the methods of 2.13.
func (c *client) streamsMappings() bool { return c.caps.GetHighApiVersion().GetMinor() >= 13 }

// unaryMappings reports whether the server has the methods of 2.12.
func (c *client) unaryMappings() bool { return c.caps.GetLowApiVersion().GetMinor() < 13 }

// chunksOf returns the chunks and the chunking function of a blob, by all methods that the server has, which must
// agree.
func (c *client) chunksOf(d *repb.Digest, f repb.ChunkingFunction_Value) (chunks []*repb.Digest, by repb.ChunkingFunction_Value, err error) {
	if c.streamsMappings() {
		ms, err := c.mapping(&repb.GetChunkMappingRequest{
			InstanceName: c.instance, BlobDigest: d,
			DigestFunction: repb.DigestFunction_SHA256, ChunkingFunction: f,
		})
		if err != nil {
			return nil, 0, err
		}
		for i, m := range ms {
			if i == 0 {
				by = m.GetChunkingFunction()
			}
			chunks = append(chunks, m.GetChunkDigests()...)
		}
	}
	if c.unaryMappings() {
		r, err := c.cas.SplitBlob(c.Context(), &repb.SplitBlobRequest{
			InstanceName: c.instance, BlobDigest: d,
			DigestFunction: repb.DigestFunction_SHA256, ChunkingFunction: f,
		})
		if err != nil {
			return nil, 0, err
		}
		same := slices.EqualFunc(chunks, r.GetChunkDigests(), func(a, b *repb.Digest) bool { return proto.Equal(a, b) })
		if chunks == nil {
			chunks, by = r.GetChunkDigests(), r.GetChunkingFunction()
		} else if !same || by != r.GetChunkingFunction() {
			c.Errorf("GetChunkMapping of %s: %d chunks by %v; SplitBlob: %d by %v; want the same", name(d), len(chunks), by, len(r.GetChunkDigests()), r.GetChunkingFunction())
		}
	}
	return chunks, by, nil
}

// splices registers chunks by one of the two methods.
func (c *client) splices(unary bool, d *repb.Digest, f repb.ChunkingFunction_Value, chunks ...*repb.Digest) error {
	if unary {
		_, err := c.cas.SpliceBlob(c.Context(), &repb.SpliceBlobRequest{
			InstanceName: c.instance, BlobDigest: d,
			DigestFunction: repb.DigestFunction_SHA256, ChunkDigests: chunks, ChunkingFunction: f,
		})
		return err
	}
	return c.register(&repb.RegisterChunkMappingRequest{
		InstanceName: c.instance, BlobDigest: d,
		DigestFunction: repb.DigestFunction_SHA256, ChunkDigests: chunks, ChunkingFunction: f,
	})
}

// wantChunks checks that the chunks are present and make up b.
func (c *client) wantChunks(what string, b []byte, chunks []*repb.Digest) {
	c.Helper()
	if missing, err := c.absent(c.Context(), chunks...); err != nil || len(missing) > 0 {
		c.Errorf("%s: %d of %d chunks are missing: %v", what, len(missing), len(chunks), err)
		return
	}
	var all []byte
	for _, d := range chunks {
		got, _, err := c.read(c.readName(d), 0, 0)
		if err != nil || cas.SHA256.Sum(got).Hash() != d.GetHash() {
			c.Errorf("%s: Read of chunk %s: got %s, %v", what, name(d), brief(got), err)
			return
		}
		all = append(all, got...)
	}
	expect.That(c, bytes.Equal(all, b), "%s: got chunks of %s, want %s", what, brief(all), brief(b))
}

func splitBlob(c *client) {
	b, d := freshBlob(8 << 20)
	c.put(b)
	for _, f := range []repb.ChunkingFunction_Value{repb.ChunkingFunction_UNKNOWN, repb.ChunkingFunction_FAST_CDC_2020, repb.ChunkingFunction_REP_MAX_CDC} {
		chunks, _, err := c.chunksOf(d, f)
		if !c.wantCode(fmt.Sprintf("chunks of a blob of 8 MiB by %v", f), err, codes.OK, codes.NotFound) || err != nil {
			continue
		}
		if c.ours && len(chunks) < 4 {
			c.Errorf("a blob of 8 MiB has %d chunks by %v", len(chunks), f)
		}
		c.wantChunks(fmt.Sprintf("chunks of a blob of 8 MiB by %v", f), b, chunks)
	}
	c.wantBlob("after it was split", c.readName(d), b)
	_, _, err := c.chunksOf(absentDigest(8<<20), 0)
	c.wantCode("chunks of an absent blob", err, codes.NotFound)
	if c.server == nil {
		return
	}
	// Blob and chunks must not be evicted.
	c = c.own(bazelrun.ServerConfig{NoJobs: true, MaxSize: "32MiB"})
	c.put(b)
	chunks, _, err := c.chunksOf(d, 0)
	c.wantCode("chunks of a blob of 8 MiB", err, codes.OK)
	c.fill(seeded(57), 1<<20, 64<<20)
	c.wantChunks("after a store was filled", b, chunks)
	c.wantBlob("a split blob after the store was filled", c.readName(d), b)
}

func streamedMapping(c *client) {
	small := fresh(1000)
	chunks, _, err := c.chunksOf(c.put(small), 0)
	if c.wantCode("chunks of a blob of 1000 bytes", err, codes.OK, codes.NotFound) && err == nil {
		c.wantChunks("a blob of 1000 bytes", small, chunks)
		expect.Equal(c, len(chunks), 1, "a blob of 1000 bytes has N chunks")
	}
	if !c.streamsMappings() {
		return
	}
	ms, err := c.mapping(&repb.GetChunkMappingRequest{InstanceName: c.instance, BlobDigest: c.put(fresh(8 << 20)), DigestFunction: repb.DigestFunction_SHA256})
	if c.wantCode("GetChunkMapping of 8 MiB", err, codes.OK, codes.NotFound) && err == nil {
		expect.That(c, len(ms) != 0 && ms[0].GetChunkingFunction() != repb.ChunkingFunction_UNKNOWN,
			"GetChunkMapping of 8 MiB: %d messages, want chunking_function in the first", len(ms))
	}
	if !splicing.met(c) {
		return
	}
	// Register more chunks than fit into a 4 MiB message. They have the smallest size that servers are likely to keep
	// as chunks.
	const n = 80_000
	a, z := fresh(1<<10), fresh(1<<10)
	var b bytes.Buffer
	var list []*repb.Digest
	da, dz := c.put(a), c.put(z)
	for i := range n {
		if i%3 == 0 {
			b.Write(a)
			list = append(list, da)
		} else {
			b.Write(z)
			list = append(list, dz)
		}
	}
	d := cas.SHA256.Sum(b.Bytes()).Proto()
	err = c.register(
		&repb.RegisterChunkMappingRequest{InstanceName: c.instance, BlobDigest: d, DigestFunction: repb.DigestFunction_SHA256, ChunkDigests: list[:n/2]},
		&repb.RegisterChunkMappingRequest{},
		&repb.RegisterChunkMappingRequest{ChunkDigests: list[n/2:]},
	)
	c.wantCode(fmt.Sprintf("RegisterChunkMapping of %d chunks in three messages", n), err, codes.OK)
	c.wantBlob(fmt.Sprintf("a blob of %d chunks", n), c.readName(d), b.Bytes())
	ms, err = c.mapping(&repb.GetChunkMappingRequest{InstanceName: c.instance, BlobDigest: d, DigestFunction: repb.DigestFunction_SHA256})
	c.wantCode(fmt.Sprintf("GetChunkMapping of %d chunks", n), err, codes.OK, codes.NotFound)
	got := 0
	for _, m := range ms {
		got += len(m.GetChunkDigests())
		expect.That(c, proto.Size(m) <= 4<<20, "GetChunkMapping of %d chunks: got a message of %d bytes", n, proto.Size(m))
	}
	if c.ours {
		expect.That(c, got == n && len(ms) > 1, "%d registered chunks: got %d in %d messages", n, got, len(ms))
		_, err = c.cas.SplitBlob(c.Context(), &repb.SplitBlobRequest{InstanceName: c.instance, BlobDigest: d})
		c.wantText("SplitBlob of a long mapping", err, []string{"GetChunkMapping", d.Hash}, codes.ResourceExhausted)
	}
	c.Logf("%d registered chunks are reported as %d in %d messages", n, got, len(ms))
}

// halves uploads the two halves of a new blob and returns the blob, its digest and theirs.
func (c *client) halves(size int) (b []byte, d *repb.Digest, chunks []*repb.Digest) {
	b = fresh(size)
	return b, cas.SHA256.Sum(b).Proto(), []*repb.Digest{c.put(b[:size/2]), c.put(b[size/2:])}
}

func firstMessage(c *client) {
	if !c.streamsMappings() {
		c.Skip("high_api_version 2.13")
	}
	b, d, chunks := c.halves(5000)
	err := c.register(
		&repb.RegisterChunkMappingRequest{InstanceName: c.instance, BlobDigest: d, DigestFunction: repb.DigestFunction_SHA256},
		&repb.RegisterChunkMappingRequest{ChunkDigests: chunks[:1]},
		&repb.RegisterChunkMappingRequest{
			InstanceName: "another/" + uuid(), BlobDigest: absentDigest(7), DigestFunction: repb.DigestFunction_MD5,
			ChunkingFunction: repb.ChunkingFunction_REP_MAX_CDC, ChunkDigests: chunks[1:],
		},
	)
	c.wantCode("RegisterChunkMapping with another instance, digest and functions in the last message", err, codes.OK)
	c.wantBlob("after the write", c.readName(d), b)
	c.wantCode("RegisterChunkMapping without a message", c.register(), codes.InvalidArgument, codes.Unknown)
	_, d, chunks = c.halves(5000)
	c.wantCode("RegisterChunkMapping without a blob_digest", c.register(&repb.RegisterChunkMappingRequest{
		InstanceName:   c.instance,
		DigestFunction: repb.DigestFunction_SHA256, ChunkDigests: chunks,
	}), codes.InvalidArgument)
	c.wantCode("RegisterChunkMapping with the blob_digest in its second message", c.register(
		&repb.RegisterChunkMappingRequest{InstanceName: c.instance, DigestFunction: repb.DigestFunction_SHA256},
		&repb.RegisterChunkMappingRequest{BlobDigest: d, ChunkDigests: chunks}), codes.InvalidArgument)
	c.wantPresent("after the write", d, false)
}

func splice(c *client) {
	for _, unary := range []bool{false, true} {
		method := "RegisterChunkMapping"
		if unary {
			method = "SpliceBlob"
		}
		if unary && !c.unaryMappings() || !unary && !c.streamsMappings() {
			continue
		}
		b, d, chunks := c.halves(2_000_000)
		c.wantCode(method+" of two chunks", c.splices(unary, d, 0, chunks...), codes.OK)
		c.wantPresent("after "+method, d, true)
		c.wantBlob("after "+method, c.readName(d), b)
		c.wantCode(method+" of a blob that is present", c.splices(unary, d, 0, chunks...), codes.OK, codes.AlreadyExists)

		_, d, chunks = c.halves(5000)
		absent := absentDigest(2500)
		err := c.splices(unary, d, 0, chunks[0], absent)
		c.wantText(method+" with an absent chunk", err, []string{absent.Hash}, codes.NotFound)
		c.wantPresent("after "+method+" with an absent chunk", d, false)
		for what, bad := range map[string][]*repb.Digest{
			"chunks in another order": {chunks[1], chunks[0]}, "a chunk too few": chunks[:1], "a chunk too many": append(chunks[:2:2], chunks[0]), "no chunks": nil,
		} {
			c.wantCode(method+" with "+what, c.splices(unary, d, 0, bad...), codes.InvalidArgument)
			c.wantPresent("after "+method+" with "+what, d, false)
			_, _, err := c.read(c.readName(d), 0, 0)
			c.wantCode("Read after "+method+" with "+what, err, codes.NotFound)
		}
		c.wantCode(method+" with a malformed chunk", c.splices(unary, d, 0, chunks[0], &repb.Digest{Hash: "x", SizeBytes: 2500}), codes.InvalidArgument)
	}
	// A blob stored as chunks must behave like any other.
	b, d, chunks := c.halves(3_000_000)
	c.wantCode("splice", c.splices(!c.streamsMappings(), d, 0, chunks...), codes.OK)
	if got, _, err := c.read(c.readName(d), 1_400_000, 200_000); err != nil || !bytes.Equal(got, b[1_400_000:1_600_000]) {
		c.Errorf("Read across two chunks: got %s, %v", brief(got), err)
	}
	if zstdStreams.met(c) {
		c.wantDecompressed("a blob of chunks", c.compressedName(zstdCompressor, d), zstdCompressor, 0, b)
	}
	rs, err := c.fetch(&repb.BatchReadBlobsRequest{Digests: []*repb.Digest{d}})
	if err := only(rs, err); err != nil || !bytes.Equal(rs[0].Data, b) {
		c.Errorf("BatchReadBlobs of a blob of chunks: %v", err)
	}
	c.wantWritten("Write of a blob stored as chunks", b, pieces(c.writeName(d), b, 1<<20)...)
}

// specification returns the lines of a file with published test vectors.
func specification(t testing.TB, file string) []string {
	t.Helper()
	dir := must.Get(exec.Command("go", "list", "-m", "-f", "{{.Dir}}", "github.com/bazelbuild/remote-apis").Output())(t)
	text, err := os.ReadFile(filepath.Join(strings.TrimSpace(string(dir)), "build/bazel/remote/execution/v2", file))
	must.Succeed(t, err)
	var lines []string
	for s := bufio.NewScanner(bytes.NewReader(text)); s.Scan(); {
		if s.Text() != "" && !strings.HasPrefix(s.Text(), "#") {
			lines = append(lines, s.Text())
		}
	}
	return lines
}

// gears and masks are the constants of FastCDC 2020: the MD5 of 64 repetitions of each byte, and masks with as many
// bits as the logarithm of the chunk size.
var gears = func() (g [256]uint64) {
	for i := range g {
		sum := md5.Sum(bytes.Repeat([]byte{byte(i)}, 64))
		g[i] = binary.BigEndian.Uint64(sum[:8])
	}
	return g
}()

var masks = [26]uint64{
	5: 0x1804110, 6: 0x1803110, 7: 0x18035100, 8: 0x1800035300, 9: 0x19000353000, 10: 0x590003530000, 11: 0xd90003530000,
	12: 0xd90103530000, 13: 0xd90303530000, 14: 0xd90313530000, 15: 0xd90f03530000, 16: 0xd90303537000, 17: 0xd90703537000,
	18: 0xd90707537000, 19: 0xd91707537000, 20: 0xd91747537000, 21: 0xd91767537000, 22: 0xd93767537000, 23: 0xd93777537000,
	24: 0xd93777577000, 25: 0xdb3777577000,
}

// fastCDC returns the length of the first chunk of b like the reference implementation in Rust, without optimizations.
func fastCDC(b []byte, least, average, most int, seed uint32) int {
	if len(b) <= least {
		return len(b)
	}
	end := min(len(b), most)
	centre := min(average, end)
	n := bits.Len(uint(average)) - 1
	var hash uint64
	for i := least / 2; i < end/2; i++ {
		mask := masks[n-2]
		if i < centre/2 {
			mask = masks[n+2]
		}
		first, second := gears[b[2*i]]^uint64(seed), gears[b[2*i+1]]^uint64(seed)
		if hash = hash<<2 + first<<1; hash&(mask<<1) == 0 {
			return 2 * i
		}
		if hash += second; hash&mask == 0 {
			return 2*i + 1
		}
	}
	return end
}

func vectors(c *client) {
	checked := false
	f := repb.DigestFunction_SHA256TREE
	if slices.Contains(c.caps.GetCacheCapabilities().GetDigestFunctions(), f) {
		checked = true
		for _, line := range specification(c.TB, "sha256tree_test_vectors.txt") {
			var size int
			var hash string
			if _, err := fmt.Sscan(line, &size, &hash); err != nil {
				c.Fatalf("vector %q: %v", line, err)
			}
			b := make([]byte, size)
			for i := range b {
				b[i] = byte(i % 251)
			}
			name := fmt.Sprintf("blobs/sha256tree/%s/%d", hash, size)
			_, err := c.write(pieces(c.resource("uploads/%s/%s", uuid(), name), b, 64<<10)...)
			c.wantCode("Write of the published SHA256TREE of "+fmt.Sprint(size)+" bytes", err, codes.OK)
			c.wantBlob("after the write", c.resource("%s", name), b)
		}
	}
	params := c.caps.GetCacheCapabilities().GetFastCdc_2020Params()
	if avg := int(params.GetAvgChunkSizeBytes()); avg >= 1<<10 && avg <= 8<<20 && splitting.met(c) {
		checked = true
		b := fresh(24 << 20)
		chunks, by, err := c.chunksOf(c.put(b), repb.ChunkingFunction_FAST_CDC_2020)
		c.wantCode("chunks of 24 MiB by FAST_CDC_2020", err, codes.OK, codes.NotFound)
		if oneOf(c, "chunking_function of chunks by FAST_CDC_2020", by, repb.ChunkingFunction_FAST_CDC_2020, repb.ChunkingFunction_REP_MAX_CDC, repb.ChunkingFunction_UNKNOWN) &&
			by == repb.ChunkingFunction_FAST_CDC_2020 {
			var want, got []int64
			for off := 0; off < len(b); {
				n := fastCDC(b[off:], avg/4, avg, 4*avg, params.GetSeed())
				want, off = append(want, int64(n)), off+n
			}
			for _, d := range chunks {
				got = append(got, d.GetSizeBytes())
			}
			expect.Slices(c, got, want, "chunks of 24 MiB by FAST_CDC_2020 have sizes")
		}
	}
	if !checked || c.ours && params == nil {
		c.Skip("SHA256TREE in digest_functions, or fast_cdc_2020_params")
	}
}
