// SPDX-License-Identifier: Apache-2.0

package reapi_test

import (
	"bytes"
	"compress/flate"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/andybalholm/brotli"
	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/klauspost/compress/zstd"
	bspb "google.golang.org/genproto/googleapis/bytestream"
	"google.golang.org/grpc/codes"
)

// most is the largest blob that a check decompresses.
const most = 64 << 20

// zstdOf returns b as one frame.
func zstdOf(b []byte) []byte {
	e, err := zstd.NewWriter(nil, zstd.WithEncoderConcurrency(1), zstd.WithLowerEncoderMem(true))
	if err != nil {
		panic(err) // only an option can be wrong
	}
	defer e.Close()
	// An empty blob is a frame, too: without one there are no bytes to say that it is compressed.
	return e.EncodeAll(b, nil)
}

// unzip returns what the bytes b of a compressor hold; an error if they are not exactly that.
func unzip(compressor repb.Compressor_Value, b []byte) ([]byte, error) {
	switch compressor {
	case repb.Compressor_IDENTITY:
		return b, nil
	case repb.Compressor_ZSTD:
		d, err := zstd.NewReader(nil, zstd.WithDecoderConcurrency(1), zstd.WithDecoderMaxMemory(most))
		if err != nil {
			return nil, err
		}
		defer d.Close()
		return d.DecodeAll(b, nil)
	case repb.Compressor_DEFLATE:
		if len(b) == 0 {
			return nil, nil
		}
		return io.ReadAll(io.LimitReader(flate.NewReader(bytes.NewReader(b)), most))
	case repb.Compressor_BROTLI:
		if len(b) == 0 {
			return nil, nil
		}
		return io.ReadAll(io.LimitReader(brotli.NewReader(bytes.NewReader(b)), most))
	}
	return nil, fmt.Errorf("this program has no compressor %v", compressor)
}

// zip returns b compressed.
func zip(compressor repb.Compressor_Value, b []byte) []byte {
	switch compressor {
	case repb.Compressor_ZSTD:
		return zstdOf(b)
	case repb.Compressor_DEFLATE:
		var out bytes.Buffer
		w, err := flate.NewWriter(&out, flate.DefaultCompression)
		if err != nil {
			panic(err)
		}
		w.Write(b) // to memory
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

// known says that this program has a compressor.
func known(v repb.Compressor_Value) bool {
	return v == repb.Compressor_ZSTD || v == repb.Compressor_DEFLATE || v == repb.Compressor_BROTLI
}

// zipped lists the compressors that the server has for streams and this program has, too.
func (c *client) zipped() []repb.Compressor_Value {
	return slices.DeleteFunc(slices.Clone(c.caps.GetCacheCapabilities().GetSupportedCompressors()), func(v repb.Compressor_Value) bool {
		return !known(v)
	})
}

// zipName is the name of a new compressed upload of a blob, zipRead what it is read by.
func (c *client) zipName(v repb.Compressor_Value, d *repb.Digest) string {
	return c.resource("uploads/%s/compressed-blobs/%s/%s/%d", uuid(), strings.ToLower(v.String()), d.GetHash(), d.GetSizeBytes())
}

func (c *client) zipRead(v repb.Compressor_Value, d *repb.Digest) string {
	return c.resource("compressed-blobs/%s/%s/%d", strings.ToLower(v.String()), d.GetHash(), d.GetSizeBytes())
}

func (c *client) zstdName(d *repb.Digest) string { return c.zipName(repb.Compressor_ZSTD, d) }

// squeezable returns size bytes that no server has seen before, of which every second is no news.
func squeezable(size int) []byte {
	b := novel(size)
	for i := 1; i < size; i += 2 {
		b[i] = 'x'
	}
	return b
}

// listedCompressors is rule 11: what is listed works, and nothing else.
func listedCompressors(c *client) {
	cache := c.caps.GetCacheCapabilities()
	streams, batches := cache.GetSupportedCompressors(), cache.GetSupportedBatchUpdateCompressors()
	if c.ours && (!slices.Contains(streams, repb.Compressor_ZSTD) || !slices.Contains(batches, repb.Compressor_ZSTD)) {
		c.Errorf("supported_compressors %v and supported_batch_update_compressors %v: want ZSTD in both", streams, batches)
	}
	for _, v := range []repb.Compressor_Value{repb.Compressor_IDENTITY, repb.Compressor_ZSTD, repb.Compressor_DEFLATE, repb.Compressor_BROTLI} {
		b := squeezable(10_000)
		d := cas.SHA256.Sum(b).Proto()
		if v == repb.Compressor_IDENTITY {
			c.put(b)
		} else if listed := slices.Contains(streams, v); !listed {
			_, err := c.write(pieces(c.zipName(v, d), zip(v, b), 4096)...)
			c.wantCode(fmt.Sprintf("Write of %v, which is not listed", v), err, codes.InvalidArgument, codes.Unimplemented)
			_, _, err = c.read(c.zipRead(v, c.put(novel(10))), 0, 0)
			c.wantCode(fmt.Sprintf("Read of %v, which is not listed", v), err, codes.InvalidArgument, codes.Unimplemented)
		} else {
			_, err := c.write(pieces(c.zipName(v, d), zip(v, b), 4096)...)
			c.wantCode(fmt.Sprintf("Write of %v, which is listed", v), err, codes.OK)
			c.wantBlob(fmt.Sprintf("after a Write of %v", v), c.readName(d), b)
		}
		b = squeezable(10_000)
		errs, err := c.update(&repb.BatchUpdateBlobsRequest_Request{Digest: cas.SHA256.Sum(b).Proto(), Data: zip(v, b), Compressor: v})
		if listed := slices.Contains(batches, v) || v == repb.Compressor_IDENTITY; !listed {
			c.wantCode(fmt.Sprintf("BatchUpdateBlobs of %v, which is not listed", v), first(errs, err), codes.InvalidArgument)
		} else {
			c.wantCode(fmt.Sprintf("BatchUpdateBlobs of %v, which is listed", v), first(errs, err), codes.OK)
		}
	}
	_, err := c.write(&bspb.WriteRequest{ResourceName: c.zipName(repb.Compressor_IDENTITY, unseen(10)), Data: novel(10), FinishWrite: true})
	c.wantCode("Write to compressed-blobs/identity, which is no compressor", err, codes.InvalidArgument, codes.Unimplemented)
}
