// SPDX-License-Identifier: Apache-2.0

package reapi_test

import (
	"bytes"
	"compress/flate"
	"fmt"
	"io"
	"slices"
	"strings"
	"sync"

	"github.com/andybalholm/brotli"
	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/klauspost/compress/zstd"
	bspb "google.golang.org/genproto/googleapis/bytestream"
	"google.golang.org/grpc/codes"
)

// maxDecompressed is the largest blob that a check decompresses.
const maxDecompressed = 64 << 20

// zstdOf returns b as one frame.
func zstdOf(b []byte) []byte {
	e, err := zstd.NewWriter(nil, zstd.WithEncoderConcurrency(1), zstd.WithLowerEncoderMem(true))
	if err != nil {
		panic(err) // an invalid option
	}
	defer e.Close()
	// The empty blob must be a frame, too.
	return e.EncodeAll(b, nil)
}

// decompress returns the decompressed b, or an error if b is not exactly one blob.
func decompress(compressor repb.Compressor_Value, b []byte) ([]byte, error) {
	switch compressor {
	case repb.Compressor_IDENTITY:
		return b, nil
	case repb.Compressor_ZSTD:
		d, err := zstd.NewReader(nil, zstd.WithDecoderConcurrency(1), zstd.WithDecoderMaxMemory(maxDecompressed))
		if err != nil {
			return nil, err
		}
		defer d.Close()
		return d.DecodeAll(b, nil)
	case repb.Compressor_DEFLATE:
		if len(b) == 0 {
			return nil, nil
		}
		return io.ReadAll(io.LimitReader(flate.NewReader(bytes.NewReader(b)), maxDecompressed))
	case repb.Compressor_BROTLI:
		if len(b) == 0 {
			return nil, nil
		}
		return io.ReadAll(io.LimitReader(brotli.NewReader(bytes.NewReader(b)), maxDecompressed))
	}
	return nil, fmt.Errorf("unknown compressor %v", compressor)
}

// bombs has 100 MiB of zeros for each compressor. Compressing takes seconds, so it is done once, when a check needs it.
var bombs = map[repb.Compressor_Value]func() []byte{}

func init() {
	for _, v := range []repb.Compressor_Value{repb.Compressor_ZSTD, repb.Compressor_DEFLATE, repb.Compressor_BROTLI} {
		bombs[v] = sync.OnceValue(func() []byte { return compress(v, make([]byte, 100<<20)) })
	}
}

// compress returns the compressed b.
func compress(compressor repb.Compressor_Value, b []byte) []byte {
	switch compressor {
	case repb.Compressor_ZSTD:
		return zstdOf(b)
	case repb.Compressor_DEFLATE:
		var out bytes.Buffer
		w, err := flate.NewWriter(&out, flate.DefaultCompression)
		if err != nil {
			panic(err)
		}
		w.Write(b) // cannot fail
		w.Close()
		return out.Bytes()
	case repb.Compressor_BROTLI:
		var out bytes.Buffer
		w := brotli.NewWriterLevel(&out, 3)
		w.Write(b)
		w.Close()
		return out.Bytes()
	}
	return b
}

// known reports whether this program has a compressor.
func known(v repb.Compressor_Value) bool {
	return v == repb.Compressor_ZSTD || v == repb.Compressor_DEFLATE || v == repb.Compressor_BROTLI
}

// compressors returns the compressors of the server for streams that this program has, too.
func (c *client) compressors() []repb.Compressor_Value {
	return slices.DeleteFunc(slices.Clone(c.caps.GetCacheCapabilities().GetSupportedCompressors()), func(v repb.Compressor_Value) bool {
		return !known(v)
	})
}

// compressedUpload returns the name of a new compressed upload, compressedName that of a compressed download.
func (c *client) compressedUpload(v repb.Compressor_Value, d *repb.Digest) string {
	return c.resource("uploads/%s/compressed-blobs/%s/%s/%d", uuid(), strings.ToLower(v.String()), d.GetHash(), d.GetSizeBytes())
}

func (c *client) compressedName(v repb.Compressor_Value, d *repb.Digest) string {
	return c.resource("compressed-blobs/%s/%s/%d", strings.ToLower(v.String()), d.GetHash(), d.GetSizeBytes())
}

func (c *client) zstdUpload(d *repb.Digest) string {
	return c.compressedUpload(repb.Compressor_ZSTD, d)
}

// compressible returns size random bytes with an x in every second place.
func compressible(size int) []byte {
	b := fresh(size)
	for i := 1; i < size; i += 2 {
		b[i] = 'x'
	}
	return b
}

// listedCompressors checks rule 11: exactly the listed compressors work.
func listedCompressors(c *client) {
	cache := c.caps.GetCacheCapabilities()
	streams, batches := cache.GetSupportedCompressors(), cache.GetSupportedBatchUpdateCompressors()
	all := []repb.Compressor_Value{repb.Compressor_ZSTD, repb.Compressor_BROTLI, repb.Compressor_DEFLATE}
	if c.ours && (!slices.Equal(streams, all) || !slices.Equal(batches, all)) {
		c.Errorf("supported_compressors %v and supported_batch_update_compressors %v: want %v in both", streams, batches, all)
	}
	for _, v := range append(all, repb.Compressor_IDENTITY) {
		b := compressible(10_000)
		d := cas.SHA256.Sum(b).Proto()
		if v == repb.Compressor_IDENTITY {
			c.put(b)
		} else if listed := slices.Contains(streams, v); !listed {
			_, err := c.write(pieces(c.compressedUpload(v, d), compress(v, b), 4096)...)
			c.wantCode(fmt.Sprintf("Write of %v, which is not listed", v), err, codes.InvalidArgument, codes.Unimplemented)
			_, _, err = c.read(c.compressedName(v, c.put(fresh(10))), 0, 0)
			c.wantCode(fmt.Sprintf("Read of %v, which is not listed", v), err, codes.InvalidArgument, codes.Unimplemented)
		} else {
			_, err := c.write(pieces(c.compressedUpload(v, d), compress(v, b), 4096)...)
			c.wantCode(fmt.Sprintf("Write of %v, which is listed", v), err, codes.OK)
			c.wantBlob(fmt.Sprintf("after a Write of %v", v), c.readName(d), b)
		}
		b = compressible(10_000)
		errs, err := c.update(&repb.BatchUpdateBlobsRequest_Request{Digest: cas.SHA256.Sum(b).Proto(), Data: compress(v, b), Compressor: v})
		if listed := slices.Contains(batches, v) || v == repb.Compressor_IDENTITY; !listed {
			c.wantCode(fmt.Sprintf("BatchUpdateBlobs of %v, which is not listed", v), first(errs, err), codes.InvalidArgument)
		} else {
			c.wantCode(fmt.Sprintf("BatchUpdateBlobs of %v, which is listed", v), first(errs, err), codes.OK)
		}
	}
	_, err := c.write(&bspb.WriteRequest{ResourceName: c.compressedUpload(repb.Compressor_IDENTITY, absentDigest(10)), Data: fresh(10), FinishWrite: true})
	c.wantCode("Write to compressed-blobs/identity, which is no compressor", err, codes.InvalidArgument, codes.Unimplemented)
}
