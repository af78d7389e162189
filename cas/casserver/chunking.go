// SPDX-License-Identifier: Apache-2.0

package casserver

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/casstatus"
	"github.com/cloister-build/cloister/cas/internal/chunk"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
)

// The supported chunking functions, with the parameters that the API recommends (rule 14).
var (
	fastCDC   = chunk.FastCDC{Average: 512 << 10}
	repMaxCDC = chunk.RepMaxCDC{Min: 256 << 10, Horizon: 8 * 256 << 10}
)

// chunking returns the chunking function v, or FastCDC if v is not supported.
func chunking(v repb.ChunkingFunction_Value) (repb.ChunkingFunction_Value, chunk.Params) {
	if v == repb.ChunkingFunction_REP_MAX_CDC {
		return v, repMaxCDC
	}
	return repb.ChunkingFunction_FAST_CDC_2020, fastCDC
}

// setChunking advertises chunking in c.
func setChunking(c *repb.CacheCapabilities) {
	c.SplitBlobSupport, c.SpliceBlobSupport = true, true
	c.FastCdc_2020Params = &repb.FastCdc2020Params{AvgChunkSizeBytes: uint64(fastCDC.Average), Seed: fastCDC.Seed}
	c.RepMaxCdcParams = &repb.RepMaxCdcParams{
		MinChunkSizeBytes: uint64(repMaxCDC.Min), HorizonSizeBytes: uint64(repMaxCDC.Horizon),
	}
}

// maxChunkings limits the blobs that are split or verified concurrently, and maxCallerChunkings those of one caller, so
// that a second caller finds some free; the others wait. Each takes 5 MiB of lookahead and a processor.
const (
	maxChunkings       = 16
	maxCallerChunkings = maxChunkings - maxChunkings/4
)

// A chunkedBlob is a blob in a store that can keep blobs as chunks.
type chunkedBlob struct {
	*storage
	store   cas.Store
	splicer cas.Splicer
	digest  cas.Digest
}

// chunkedBlob returns the blob p of an instance.
func (s *storage) chunkedBlob(instance string, f repb.DigestFunction_Value, p *repb.Digest) (*chunkedBlob, error) {
	in, err := s.Instances(instance)
	if err != nil {
		return nil, err
	}
	splicer, ok := cas.As[cas.Splicer](in.Store)
	if !ok {
		return nil, status.Errorf(codes.Unimplemented,
			"the store of instance %+.80q does not support chunks; see split_blob_support and splice_blob_support",
			instance)
	}
	d, err := digest(in, f, p)
	if err != nil {
		return nil, fmt.Errorf("blob_digest: %w", err)
	}
	return &chunkedBlob{s, in.Store, splicer, d}, nil
}

// present reports whether the blob is present, and marks it as used.
func (c *chunkedBlob) present(ctx context.Context) (bool, error) {
	missing, err := c.store.Missing(ctx, []cas.Digest{c.digest})
	return len(missing) == 0, err
}

// SplitBlob is the version 2.12 form of GetChunkMapping.
func (s *storage) SplitBlob(ctx context.Context, req *repb.SplitBlobRequest) (*repb.SplitBlobResponse, error) {
	c, err := s.chunkedBlob(req.InstanceName, req.DigestFunction, req.BlobDigest)
	if err != nil {
		return nil, casstatus.Error(err)
	}
	m, err := c.split(ctx, req.ChunkingFunction)
	if err != nil {
		return nil, casstatus.Error(err)
	}
	resp := &repb.SplitBlobResponse{ChunkingFunction: m.Function, ChunkDigests: protos(m.Chunks)}
	if n := proto.Size(resp); n > maxMessage {
		return nil, status.Errorf(codes.ResourceExhausted,
			"reply with the %d chunks of blob %s has %d bytes, limit %d; use GetChunkMapping",
			len(m.Chunks), c.digest, n, maxMessage)
	}
	return resp, nil
}

// GetChunkMapping returns the chunks of a blob, and splits it first if necessary. The blob and its chunks are then in
// the store and marked as used. A blob no larger than the largest chunk of the requested function is its only chunk
// (rule 58).
func (s *storage) GetChunkMapping(
	req *repb.GetChunkMappingRequest, stream repb.ContentAddressableStorage_GetChunkMappingServer,
) error {
	c, err := s.chunkedBlob(req.InstanceName, req.DigestFunction, req.BlobDigest)
	if err != nil {
		return casstatus.Error(err)
	}
	m, err := c.split(stream.Context(), req.ChunkingFunction)
	if err != nil {
		return casstatus.Error(err)
	}
	return s.uploads.watch(stream, s.StreamIdle, func(w *watched) error { return sendChunks(m, w) })
}

// sendChunks sends the messages of GetChunkMapping.
func sendChunks(m cas.ChunkList, stream grpc.ServerStream) error {
	resp := &repb.GetChunkMappingResponse{ChunkingFunction: m.Function}
	for size, first := 0, true; first || len(m.Chunks) > 0; first = false {
		n := 0
		for ; n < len(m.Chunks) && size < maxReply; n++ {
			size += len(m.Chunks[n].Hash()) + 20 // the hash, at most ten bytes of size, and framing
		}
		resp.ChunkDigests, m.Chunks = protos(m.Chunks[:n]), m.Chunks[n:]
		if err := stream.SendMsg(resp); err != nil {
			return err
		}
		resp, size = &repb.GetChunkMappingResponse{}, 0
	}
	return nil
}

// split returns the chunks of the blob: those recorded, whatever function made them, or new ones if a chunk is missing.
func (c *chunkedBlob) split(ctx context.Context, v repb.ChunkingFunction_Value) (cas.ChunkList, error) {
	m := cas.ChunkList{}
	var p chunk.Params
	m.Function, p = chunking(v)
	if c.digest.IsEmpty() {
		return m, nil
	}
	single := c.digest.Size() <= int64(p.Max())
	if !single {
		recorded, err := c.splicer.Split(ctx, c.digest)
		if err != nil && !errors.Is(err, cas.ErrNotFound) {
			return m, c.explain("split", c.digest, err)
		}
		if err == nil {
			missing, err := c.store.Missing(ctx, append(recorded.Chunks, c.digest))
			if err != nil || len(missing) == 0 {
				return recorded, err
			}
		}
	}
	if present, err := c.present(ctx); err != nil {
		return m, err
	} else if !present {
		return m, c.explain("split", c.digest, cas.ErrNotFound)
	}
	if single {
		m.Chunks = []cas.Digest{c.digest}
		return m, nil
	}
	var err error
	if m.Chunks, err = c.storeChunks(ctx, p); err == nil {
		err = c.splicer.Splice(ctx, c.digest, m)
	}
	return m, c.explain("split", c.digest, err)
}

// storeChunks splits the blob and stores its chunks.
func (c *chunkedBlob) storeChunks(ctx context.Context, p chunk.Params) (chunks []cas.Digest, err error) {
	release, err := c.chunkings.acquire(ctx)
	if err != nil {
		return nil, err
	}
	defer release()
	blob, err := c.store.Open(ctx, c.digest, 0)
	if err != nil {
		return nil, err
	}
	defer blob.Close()
	r, err := chunk.NewReader(blob, p)
	if err != nil {
		return nil, err
	}
	for {
		b, err := r.Next()
		if err == io.EOF {
			return chunks, nil
		} else if err != nil {
			return nil, err
		}
		d := c.digest.Function().Sum(b)
		if err := c.store.Put(ctx, d, bytes.NewReader(b)); err != nil {
			return nil, err
		}
		chunks = append(chunks, d)
	}
}
