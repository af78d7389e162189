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
	"github.com/cloister-build/cloister/cas/chunk"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
)

// The chunking functions served, with the parameters that the API recommends (rule 14).
var (
	fastCDC   = chunk.FastCDC{Average: 512 << 10}
	repMaxCDC = chunk.RepMaxCDC{Min: 256 << 10, Horizon: 8 * 256 << 10}
)

// chunking returns the function that v asks for, or, where that is none that is served, FastCDC.
func chunking(v repb.ChunkingFunction_Value) (repb.ChunkingFunction_Value, chunk.Params) {
	if v == repb.ChunkingFunction_REP_MAX_CDC {
		return v, repMaxCDC
	}
	return repb.ChunkingFunction_FAST_CDC_2020, fastCDC
}

// setChunking says in c that blobs are split and spliced.
func setChunking(c *repb.CacheCapabilities) {
	c.SplitBlobSupport, c.SpliceBlobSupport = true, true
	c.FastCdc_2020Params = &repb.FastCdc2020Params{AvgChunkSizeBytes: uint64(fastCDC.Average), Seed: fastCDC.Seed}
	c.RepMaxCdcParams = &repb.RepMaxCdcParams{MinChunkSizeBytes: uint64(repMaxCDC.Min), HorizonSizeBytes: uint64(repMaxCDC.Horizon)}
}

// A chunked is a blob of an instance whose store keeps blobs as chunks.
type chunked struct {
	in     *cas.Instance
	mapper cas.Splicer
	digest cas.Digest
	turn   chan struct{} // full while maxCuts blobs are cut or compared
}

// maxCuts is how many blobs are cut, or compared with their chunks, at once; the others wait. Each takes five mebibytes
// for the look ahead, and a processor.
const maxCuts = 16

// wait waits for a turn, and returns what ends it.
func (c *chunked) wait(ctx context.Context) (end func(), err error) {
	select {
	case c.turn <- struct{}{}:
		return func() { <-c.turn }, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// chunked returns the blob that a request names.
func (s *storage) chunked(instance string, f repb.DigestFunction_Value, p *repb.Digest) (*chunked, error) {
	in, err := s.Instances(instance)
	if err != nil {
		return nil, err
	}
	mapper, ok := cas.As[cas.Splicer](in.Store)
	if !ok {
		return nil, status.Errorf(codes.Unimplemented, "the store of instance %+.80q keeps no chunks, as split_blob_support and splice_blob_support say", instance)
	}
	d, err := digest(in, f, p)
	if err != nil {
		return nil, fmt.Errorf("blob_digest: %w", err)
	}
	return &chunked{in, mapper, d, s.cuts}, nil
}

// SplitBlob is GetChunkMapping of version 2.12.
func (s *storage) SplitBlob(ctx context.Context, req *repb.SplitBlobRequest) (*repb.SplitBlobResponse, error) {
	c, err := s.chunked(req.InstanceName, req.DigestFunction, req.BlobDigest)
	if err != nil {
		return nil, cas.Status(err)
	}
	m, err := c.split(ctx, req.ChunkingFunction)
	if err != nil {
		return nil, cas.Status(err)
	}
	resp := &repb.SplitBlobResponse{ChunkingFunction: m.Function, ChunkDigests: protos(m.Chunks)}
	if n := proto.Size(resp); n > maxMessage {
		return nil, status.Errorf(codes.ResourceExhausted, "the %d chunks of blob %s are a reply of %d bytes, above the %d of a message; use GetChunkMapping",
			len(m.Chunks), c.digest, n, maxMessage)
	}
	return resp, nil
}

// GetChunkMapping returns the chunks of a blob, which is cut now if it never was. All of them are in the store and, like
// the blob, marked as used. A blob that is no larger than the largest chunk of the function asked for is its
// only chunk (rule 58).
func (s *storage) GetChunkMapping(req *repb.GetChunkMappingRequest, stream repb.ContentAddressableStorage_GetChunkMappingServer) error {
	c, err := s.chunked(req.InstanceName, req.DigestFunction, req.BlobDigest)
	if err != nil {
		return cas.Status(err)
	}
	m, err := c.split(stream.Context(), req.ChunkingFunction)
	if err != nil {
		return cas.Status(err)
	}
	resp := &repb.GetChunkMappingResponse{ChunkingFunction: m.Function}
	for size, first := 0, true; first || len(m.Chunks) > 0; first = false {
		n := 0
		for ; n < len(m.Chunks) && size < maxReply; n++ {
			// The hash, ten bytes of size at most, and their framing.
			size += len(m.Chunks[n].Hash()) + 20
		}
		resp.ChunkDigests, m.Chunks = protos(m.Chunks[:n]), m.Chunks[n:]
		if err := stream.Send(resp); err != nil {
			return err
		}
		resp, size = &repb.GetChunkMappingResponse{}, 0
	}
	return nil
}

func protos(ds []cas.Digest) []*repb.Digest {
	all, ps := make([]repb.Digest, len(ds)), make([]*repb.Digest, len(ds))
	for i, d := range ds {
		p := &all[i]
		p.Hash, p.SizeBytes = d.Hash(), d.Size()
		ps[i] = p
	}
	return ps
}

// split returns the chunks of the blob. What is kept is used, whatever cut it, unless a chunk is gone.
func (c *chunked) split(ctx context.Context, v repb.ChunkingFunction_Value) (cas.ChunkList, error) {
	m := cas.ChunkList{}
	var p chunk.Params
	m.Function, p = chunking(v)
	if c.digest.IsEmpty() {
		return m, nil
	}
	if c.digest.Size() > int64(p.Max()) {
		kept, err := c.mapper.Split(ctx, c.digest)
		if err != nil && !errors.Is(err, cas.ErrNotFound) {
			return m, explain("split", c.digest, err)
		}
		if err == nil {
			if missing, err := c.in.Store.Missing(ctx, append(kept.Chunks, c.digest)); err != nil || len(missing) == 0 {
				return kept, err
			}
		}
	}
	switch missing, err := c.in.Store.Missing(ctx, []cas.Digest{c.digest}); {
	case err != nil:
		return m, err
	case len(missing) > 0:
		return m, explain("split", c.digest, cas.ErrNotFound)
	case c.digest.Size() <= int64(p.Max()):
		m.Chunks = []cas.Digest{c.digest}
		return m, nil
	}
	if err := c.cut(ctx, &m, p); err != nil {
		return m, explain("split", c.digest, err)
	}
	return m, nil
}

// cut cuts the blob, and puts its chunks.
func (c *chunked) cut(ctx context.Context, m *cas.ChunkList, p chunk.Params) error {
	end, err := c.wait(ctx)
	if err != nil {
		return err
	}
	defer end()
	blob, err := c.in.Store.Open(ctx, c.digest, 0)
	if err != nil {
		return err
	}
	defer blob.Close()
	r, err := chunk.NewReader(blob, p)
	if err != nil {
		return err
	}
	for {
		b, err := r.Next()
		if err == io.EOF {
			return c.mapper.Splice(ctx, c.digest, *m)
		} else if err != nil {
			return err
		}
		d := c.digest.Function().Sum(b)
		if err := c.in.Store.Put(ctx, d, bytes.NewReader(b)); err != nil {
			return err
		}
		m.Chunks = append(m.Chunks, d)
	}
}

// SpliceBlob is RegisterChunkMapping of version 2.12.
func (s *storage) SpliceBlob(ctx context.Context, req *repb.SpliceBlobRequest) (*repb.SpliceBlobResponse, error) {
	p, err := s.splice(req.InstanceName, req.DigestFunction, req.BlobDigest)
	if err != nil {
		return nil, cas.Status(err)
	}
	present, err := p.present(ctx)
	if err == nil && !present {
		if err = p.add(req.ChunkDigests); err == nil {
			err = p.commit(ctx, req.ChunkingFunction)
		}
	}
	if err != nil {
		return nil, cas.Status(err)
	}
	return &repb.SpliceBlobResponse{BlobDigest: p.digest.Proto()}, nil
}

// RegisterChunkMapping stores a blob as the chunks that a client has uploaded: they are read, one after the other, and
// compared with the blob's digest, before anything is stored. A blob that is present stays as it is. What the
// client says has cut it is noted if it is so, and else, or if it is no function that is served, nothing is: where a
// client cuts otherwise, that costs it equal chunks, and no more.
func (s *storage) RegisterChunkMapping(stream repb.ContentAddressableStorage_RegisterChunkMappingServer) error {
	ctx := stream.Context()
	first, err := stream.Recv()
	if err == io.EOF {
		return cas.Status(fmt.Errorf("%w stream: it has no message, so no blob_digest", cas.ErrInvalid))
	} else if err != nil {
		return err
	}
	p, err := s.splice(first.InstanceName, first.DigestFunction, first.BlobDigest)
	if err != nil {
		return cas.Status(err)
	}
	present, err := p.present(ctx)
	for req := first; err == nil && !present; {
		if err = p.add(req.ChunkDigests); err != nil {
			break
		}
		if req, err = stream.Recv(); err == io.EOF {
			err = p.commit(ctx, first.ChunkingFunction)
			break
		} else if err != nil {
			return err
		}
	}
	if err != nil {
		return cas.Status(err)
	}
	return stream.SendAndClose(&repb.RegisterChunkMappingResponse{BlobDigest: p.digest.Proto()})
}

// A splice is a blob whose chunks are being told.
type splice struct {
	*chunked
	chunks []cas.Digest // without empty ones
	told   int          // with them
	size   int64        // of chunks, in bytes
}

// splice begins with the blob that a request names.
func (s *storage) splice(instance string, f repb.DigestFunction_Value, d *repb.Digest) (*splice, error) {
	c, err := s.chunked(instance, f, d)
	if err == nil {
		err = s.checkSize(c.digest)
	}
	return &splice{chunked: c}, err
}

// present reports whether there is nothing to do, and marks the blob as used then.
func (p *splice) present(ctx context.Context) (bool, error) {
	missing, err := p.in.Store.Missing(ctx, []cas.Digest{p.digest})
	return len(missing) == 0, err
}

// add takes the next chunks. It fails as soon as they are too many to be the blob.
func (p *splice) add(chunks []*repb.Digest) error {
	for _, c := range chunks {
		d, err := cas.FromProto(p.digest.Function(), c)
		if err != nil {
			return fmt.Errorf("chunk_digests[%d] of blob %s: %w", p.told, p.digest, err)
		}
		if p.told++; p.told > cas.MaxChunks {
			return fmt.Errorf("%w splice: blob %s has more than %d chunks; cut it into larger ones", cas.ErrInvalid, p.digest, cas.MaxChunks)
		}
		if d.Size() > p.digest.Size()-p.size {
			return fmt.Errorf("%w splice: the first %d chunks of blob %s are larger than it", cas.ErrInvalid, p.told, p.digest)
		}
		if !d.IsEmpty() {
			p.chunks = append(p.chunks, d)
			p.size += d.Size()
		}
	}
	return nil
}

// leastAverage is the size of its chunks, in bytes, from which a blob is kept as them, and below which it is stored
// whole. Their list is read whenever somebody asks whether the blob is there, and few bytes named again and again must
// not make one that is larger than the blob.
const leastAverage = chunk.MinAverage

// commit stores the blob, if it is what the chunks are.
func (p *splice) commit(ctx context.Context, v repb.ChunkingFunction_Value) error {
	if p.size != p.digest.Size() {
		return fmt.Errorf("%w splice: the chunks of blob %s have %d of its %d bytes", cas.ErrInvalid, p.digest, p.size, p.digest.Size())
	}
	missing, err := p.in.Store.Missing(ctx, p.chunks)
	if err != nil {
		return err
	}
	if len(missing) > 0 {
		return explain(fmt.Sprintf("splice blob %s: chunk", p.digest), missing[0], cas.ErrNotFound)
	}
	joined := cas.Join(ctx, p.in.Store.Open, p.chunks, 0)
	defer joined.Close()
	cutBy, params := chunking(v)
	if p.digest.Size() <= int64(params.Max()) || p.digest.Size() < leastAverage*int64(len(p.chunks)) {
		err = p.in.Store.Put(ctx, p.digest, joined)
	} else {
		err = p.store(ctx, joined, cas.ChunkList{Function: v, Chunks: p.chunks}, v == cutBy, params)
	}
	if err != nil {
		return explain("splice", p.digest, err)
	}
	return nil
}

// store has the store keep m, if r, which reads its chunks, is the blob. Stated says that m names a function that is
// served.
func (p *splice) store(ctx context.Context, r io.Reader, m cas.ChunkList, stated bool, params chunk.Params) error {
	end, err := p.wait(ctx)
	if err != nil {
		return err
	}
	defer end()
	h := p.digest.Function().New(p.digest.Size())
	r = io.TeeReader(r, h)
	if stated {
		if stated, err = cutAs(r, m.Chunks, params); err != nil {
			return err
		}
	}
	if _, err := io.Copy(io.Discard, r); err != nil {
		return err
	}
	if got := p.digest.Function().Digest(h, p.size); got != p.digest {
		return cas.Mismatch(p.digest, got)
	}
	if !stated {
		m.Function = repb.ChunkingFunction_UNKNOWN
	}
	return p.mapper.Splice(ctx, p.digest, m)
}

// cutAs reads r until it is clear whether p cuts it into chunks of these sizes.
func cutAs(r io.Reader, chunks []cas.Digest, p chunk.Params) (bool, error) {
	cuts, err := chunk.NewReader(r, p)
	if err != nil {
		return false, err
	}
	for _, c := range chunks {
		b, err := cuts.Next()
		if err != nil && err != io.EOF {
			return false, err
		}
		if int64(len(b)) != c.Size() {
			return false, nil
		}
	}
	return true, nil
}
