// SPDX-License-Identifier: Apache-2.0

package casserver

import (
	"context"
	"fmt"
	"io"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/casstatus"
	"github.com/cloister-build/cloister/cas/internal/chunk"
	"google.golang.org/grpc"
)

// minAverage is the average chunk size in bytes from which a blob is kept as chunks; below, it is stored whole. The
// chunk list is read for each existence check, and a list that repeats tiny chunks could be larger than the blob.
const minAverage = chunk.MinAverage

// SpliceBlob is the version 2.12 form of RegisterChunkMapping.
func (s *storage) SpliceBlob(ctx context.Context, req *repb.SpliceBlobRequest) (*repb.SpliceBlobResponse, error) {
	p, err := s.splice(req.InstanceName, req.DigestFunction, req.BlobDigest)
	if err != nil {
		return nil, casstatus.Error(err)
	}
	present, err := p.present(ctx)
	if err == nil && !present {
		if err = p.add(req.ChunkDigests); err == nil {
			err = p.commit(ctx, req.ChunkingFunction)
		}
	}
	if err != nil {
		return nil, casstatus.Error(err)
	}
	return &repb.SpliceBlobResponse{BlobDigest: p.digest.Proto()}, nil
}

// RegisterChunkMapping stores a blob as chunks that the client has uploaded, after verifying their concatenation
// against the digest of the blob. A blob that is present remains unchanged. The chunking function stated by the client
// is recorded only if it is supported and the chunks fit it: a wrong one only costs deduplication.
func (s *storage) RegisterChunkMapping(stream repb.ContentAddressableStorage_RegisterChunkMappingServer) error {
	first, err := stream.Recv()
	if err == io.EOF {
		return casstatus.Error(fmt.Errorf("%w stream: it has no message and hence no blob_digest", cas.ErrInvalid))
	} else if err != nil {
		return err
	}
	return s.uploads.watch(stream, s.StreamIdle, func(w *watched) error {
		return s.register(first, &grpc.GenericServerStream[
			repb.RegisterChunkMappingRequest, repb.RegisterChunkMappingResponse]{ServerStream: w})
	})
}

// register is RegisterChunkMapping after the first message.
func (s *storage) register(
	first *repb.RegisterChunkMappingRequest, stream repb.ContentAddressableStorage_RegisterChunkMappingServer,
) error {
	ctx := stream.Context()
	p, err := s.splice(first.InstanceName, first.DigestFunction, first.BlobDigest)
	if err != nil {
		return casstatus.Error(err)
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
		return casstatus.Error(err)
	}
	return stream.SendAndClose(&repb.RegisterChunkMappingResponse{BlobDigest: p.digest.Proto()})
}

// A splice collects the chunks of a blob.
type splice struct {
	*chunkedBlob
	chunks   []cas.Digest // without empty ones
	received int          // number of chunks, including empty ones
	size     int64        // of chunks, in bytes
}

// splice returns a splice of the blob d.
func (s *storage) splice(instance string, f repb.DigestFunction_Value, d *repb.Digest) (*splice, error) {
	c, err := s.chunkedBlob(instance, f, d)
	if err == nil {
		err = s.checkSize(c.digest)
	}
	return &splice{chunkedBlob: c}, err
}

// add adds the next chunks. It fails as soon as they exceed the blob.
func (p *splice) add(chunks []*repb.Digest) error {
	for _, c := range chunks {
		d, err := cas.FromProto(p.digest.Function(), c)
		if err != nil {
			return fmt.Errorf("chunk_digests[%d] of blob %s: %w", p.received, p.digest, err)
		}
		if p.received++; p.received > cas.MaxChunks {
			return fmt.Errorf("%w splice: blob %s has more than %d chunks; use larger ones",
				cas.ErrInvalid, p.digest, cas.MaxChunks)
		}
		if d.Size() > p.digest.Size()-p.size {
			return fmt.Errorf("%w splice: the first %d chunks of blob %s are larger than the blob",
				cas.ErrInvalid, p.received, p.digest)
		}
		if !d.IsEmpty() {
			p.chunks = append(p.chunks, d)
			p.size += d.Size()
		}
	}
	return nil
}

// commit stores the blob if the chunks match it.
func (p *splice) commit(ctx context.Context, v repb.ChunkingFunction_Value) error {
	if p.size != p.digest.Size() {
		return fmt.Errorf("%w splice: the chunks of blob %s have %d of its %d bytes",
			cas.ErrInvalid, p.digest, p.size, p.digest.Size())
	}
	missing, err := p.store.Missing(ctx, p.chunks)
	if err != nil {
		return err
	}
	if len(missing) > 0 {
		return p.explain(fmt.Sprintf("splice blob %s: chunk", p.digest), missing[0], cas.ErrNotFound)
	}
	joined := cas.Join(ctx, p.store.Open, p.chunks, 0)
	defer joined.Close()
	supported, params := chunking(v)
	if p.digest.Size() <= int64(params.Max()) || p.digest.Size() < minAverage*int64(len(p.chunks)) {
		err = p.store.Put(ctx, p.digest, joined)
	} else {
		if v != supported {
			params = nil
		}
		err = p.storeMapping(ctx, joined, v, params)
	}
	return p.explain("splice", p.digest, err)
}

// storeMapping records the chunks if r, which reads them, matches the blob. It records v as their function if they were
// cut with params; nil params mean that v is not supported.
func (p *splice) storeMapping(
	ctx context.Context, r io.Reader, v repb.ChunkingFunction_Value, params chunk.Params,
) error {
	release, err := p.chunkings.acquire(ctx)
	if err != nil {
		return err
	}
	defer release()
	h := p.digest.Function().New(p.digest.Size())
	r = io.TeeReader(r, h)
	m := cas.ChunkList{Function: repb.ChunkingFunction_UNKNOWN, Chunks: p.chunks}
	if params != nil {
		if ok, err := cutAs(r, m.Chunks, params); err != nil {
			return err
		} else if ok {
			m.Function = v
		}
	}
	if _, err := io.Copy(io.Discard, r); err != nil {
		return err
	}
	if got := p.digest.Function().Digest(h, p.size); got != p.digest {
		return cas.Mismatch(p.digest, got)
	}
	return p.splicer.Splice(ctx, p.digest, m)
}

// cutAs reports whether p cuts r into chunks of these sizes. It reads r only as far as necessary.
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
