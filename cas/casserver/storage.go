// SPDX-License-Identifier: Apache-2.0

package casserver

import (
	"context"
	"errors"
	"slices"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/casstatus"
	"github.com/cloister-build/cloister/cas/internal/compress"
	"github.com/cloister-build/cloister/cas/quota"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
)

// storage is the ContentAddressableStorage service.
type storage struct {
	repb.UnimplementedContentAddressableStorageServer
	Config
	uploads   *uploads
	memory    *memoryPool
	chunkings *limiter
	trees     *limiter
}

// FindMissingBlobs returns the absent digests, each once, and marks the others as used.
func (s *storage) FindMissingBlobs(
	ctx context.Context, req *repb.FindMissingBlobsRequest,
) (*repb.FindMissingBlobsResponse, error) {
	in, err := s.Instances(req.InstanceName)
	if err != nil {
		return nil, casstatus.Error(err)
	}
	ds := make([]cas.Digest, len(req.BlobDigests))
	for i, p := range req.BlobDigests {
		if ds[i], err = digest(in, req.DigestFunction, p); err != nil {
			return nil, casstatus.Error(err)
		}
	}
	missing, err := in.Store.Missing(ctx, ds)
	if err != nil {
		return nil, casstatus.Error(err)
	}
	return &repb.FindMissingBlobsResponse{MissingBlobDigests: protos(missing)}, nil
}

// protos converts digests with a single allocation for all messages.
func protos(ds []cas.Digest) []*repb.Digest {
	all, ps := make([]repb.Digest, len(ds)), make([]*repb.Digest, len(ds))
	for i, d := range ds {
		p := &all[i]
		p.Hash, p.SizeBytes = d.Hash(), d.Size()
		ps[i] = p
	}
	return ps
}

// BatchUpdateBlobs stores blobs and reports a status for each. Only a batch above the limits fails as a whole.
func (s *storage) BatchUpdateBlobs(
	ctx context.Context, req *repb.BatchUpdateBlobsRequest,
) (*repb.BatchUpdateBlobsResponse, error) {
	in, err := s.Instances(req.InstanceName)
	if err != nil {
		return nil, casstatus.Error(err)
	}
	rest := int64(maxBatch)
	for _, r := range req.Requests {
		n := int64(len(r.Data))
		if r.Compressor != repb.Compressor_IDENTITY {
			n = max(n, r.Digest.GetSizeBytes()) // the decompressed size
		}
		if rest -= n; rest < 0 {
			return nil, status.Errorf(codes.InvalidArgument,
				"batch is larger than max_batch_total_size_bytes, %d bytes, uncompressed; "+
					"send smaller batches or use ByteStream.Write", maxBatch)
		}
	}
	var reply int
	for _, r := range req.Requests {
		reply += entrySize(r.Digest)
	}
	if reply > maxMessage {
		return nil, tooMany(len(req.Requests))
	}
	responses := make([]*repb.BatchUpdateBlobsResponse_Response, len(req.Requests))
	var blobs []cas.Blob
	var pending []*repb.BatchUpdateBlobsResponse_Response // the responses for blobs
	for i, r := range req.Requests {
		b, err := s.requestBlob(ctx, in, req.DigestFunction, r)
		responses[i] = &repb.BatchUpdateBlobsResponse_Response{Digest: r.Digest, Status: status.Convert(err).Proto()}
		if err == nil {
			blobs = append(blobs, b)
			pending = append(pending, responses[i])
		}
	}
	for i, err := range s.putAll(ctx, in, req.DigestFunction, blobs) {
		if errors.Is(err, cas.ErrFull) {
			s.uploads.dropWaiting(quota.Caller(ctx)) // make room for a retry
		}
		if err != nil {
			pending[i].Status = status.Convert(casstatus.Error(s.explain("upload", blobs[i].Digest, err))).Proto()
		}
	}
	return &repb.BatchUpdateBlobsResponse{Responses: responses}, nil
}

// requestBlob returns a blob of a batch, decompressed but not yet checked against its digest. Its error is a status.
func (s *storage) requestBlob(
	ctx context.Context, in *cas.Instance, f repb.DigestFunction_Value, r *repb.BatchUpdateBlobsRequest_Request,
) (cas.Blob, error) {
	d, err := digest(in, f, r.Digest)
	if err == nil {
		err = s.checkSize(d)
	}
	if err != nil {
		return cas.Blob{}, casstatus.Error(err)
	}
	b := cas.Blob{Digest: d, Data: r.Data}
	switch {
	case r.Compressor == repb.Compressor_IDENTITY:
	case !compress.Supported(r.Compressor):
		return cas.Blob{}, status.Errorf(codes.InvalidArgument,
			"upload %s: compressor %v is not supported; send the blob uncompressed or use one of %s",
			d, r.Compressor, compress.Names())
	default:
		b.Data, err = s.decode(ctx, r.Compressor, r.Data, d.Size())
	}
	return b, casstatus.Error(s.explain("upload", d, err))
}

// BatchReadBlobs returns blobs and a status for each, compressed if the client accepts that and it saves space. Only a
// batch above the limits fails as a whole.
func (s *storage) BatchReadBlobs(
	ctx context.Context, req *repb.BatchReadBlobsRequest,
) (*repb.BatchReadBlobsResponse, error) {
	in, err := s.Instances(req.InstanceName)
	if err != nil {
		return nil, casstatus.Error(err)
	}
	rest, room := int64(maxBatch), maxMessage
	for _, p := range req.Digests {
		// A negative size is an error of its blob and must not make room for others.
		if rest -= max(p.SizeBytes, 0); rest < 0 {
			return nil, status.Errorf(codes.InvalidArgument,
				"batch is larger than max_batch_total_size_bytes, %d bytes; request fewer blobs or use ByteStream.Read",
				maxBatch)
		}
		room -= entrySize(p) // not part of that limit, but of the reply
	}
	if room < 0 {
		return nil, tooMany(len(req.Digests))
	}
	compressor := repb.Compressor_IDENTITY
	for _, c := range compress.Compressors() {
		if slices.Contains(req.AcceptableCompressors, c) {
			compressor = c
			break
		}
	}
	contents, errs := s.readBlobs(ctx, in, req)
	resp := &repb.BatchReadBlobsResponse{Responses: make([]*repb.BatchReadBlobsResponse_Response, len(req.Digests))}
	for i, p := range req.Digests {
		b, err := contents[i], errs[i]
		contents[i] = nil // b may be replaced by its compressed form
		r := &repb.BatchReadBlobsResponse_Response{Digest: p, Data: b, Status: status.Convert(err).Proto()}
		if compressor != repb.Compressor_IDENTITY {
			if small := s.encode(ctx, compressor, b); small != nil {
				r.Data, r.Compressor = small, compressor
			}
		}
		more := max(proto.Size(r)-entrySize(p), 0)
		if more > room {
			r.Data, r.Compressor, more = nil, repb.Compressor_IDENTITY, 0
			r.Status = status.New(codes.ResourceExhausted, "reply is full; request the blob again").Proto()
		}
		room -= more
		resp.Responses[i] = r
	}
	return resp, nil
}

// decode calls compress.Decode within the caller's memory limit.
func (s *storage) decode(ctx context.Context, c repb.Compressor_Value, data []byte, size int64) ([]byte, error) {
	release, err := s.memory.acquire(ctx, compress.DecodeMemory(c), nil)
	if err != nil {
		return nil, err
	}
	defer release()
	return compress.Decode(c, data, size)
}

// encode calls compress.Encode within the caller's memory limit.
func (s *storage) encode(ctx context.Context, c repb.Compressor_Value, data []byte) []byte {
	release, err := s.memory.acquire(ctx, compress.WriterMemory, nil)
	if err != nil {
		return nil // the call has ended
	}
	defer release()
	return compress.Encode(c, data)
}

// A localReader is an optional interface of a cas.Fetcher. ReadLocal returns the contents of those blobs of ds that
// need not be fetched, and nil for the others.
type localReader interface {
	ReadLocal(ctx context.Context, ds []cas.Digest, limit int64) [][]byte
}

// localReaderOf returns the localReader of a store, or nil. It looks below decorators, except those with a cas.Filer:
// they may change Open (see cas.As).
func localReaderOf(s cas.Store) localReader {
	for {
		if r, ok := s.(localReader); ok {
			return r
		}
		d, decorates := s.(cas.Unwrapper)
		if _, opens := s.(cas.Filer); opens || !decorates {
			return nil
		}
		s = d.Unwrap()
	}
}

// readBlobs returns the blobs of a batch. The errors are statuses.
func (s *storage) readBlobs(
	ctx context.Context, in *cas.Instance, req *repb.BatchReadBlobsRequest,
) (contents [][]byte, errs []error) {
	errs = make([]error, len(req.Digests))
	ds := make([]cas.Digest, len(req.Digests))
	for i, p := range req.Digests {
		ds[i], errs[i] = digest(in, req.DigestFunction, p)
	}
	if r := localReaderOf(in.Store); r != nil {
		contents = r.ReadLocal(ctx, ds, maxBatch)
	} else {
		contents = make([][]byte, len(ds))
	}
	var rest []cas.Digest
	for i, d := range ds {
		if errs[i] == nil && contents[i] == nil {
			rest = append(rest, d)
		}
	}
	absent := fetchBlobs(ctx, in.Store, rest)
	for i, d := range ds {
		switch {
		case errs[i] != nil:
			errs[i] = casstatus.Error(errs[i])
		case contents[i] != nil:
		case absent[d]:
			errs[i] = casstatus.Error(s.explain("read", d, cas.ErrNotFound))
		default:
			var err error
			contents[i], err = cas.ReadAll(ctx, in.Store, d, maxBatch)
			errs[i] = casstatus.Error(s.explain("read", d, err))
		}
	}
	return contents, errs
}

// fetchBlobs prefetches blobs if the store supports it, and returns those known to be absent. It ignores errors:
// reading each blob reports its own.
func fetchBlobs(ctx context.Context, store cas.Store, ds []cas.Digest) map[cas.Digest]bool {
	fetcher, ok := cas.As[cas.Fetcher](store)
	if !ok || len(ds) == 0 {
		return nil
	}
	missing, _ := fetcher.Fetch(ctx, ds)
	absent := make(map[cas.Digest]bool, len(missing))
	for _, d := range missing {
		absent[d] = true
	}
	return absent
}

// entrySize returns the bytes to reserve in a reply for the blob p without its data: the digest, a short status and
// framing.
func entrySize(p *repb.Digest) int { return proto.Size(p) + 64 }

func tooMany(digests int) error {
	return status.Errorf(codes.InvalidArgument,
		"batch has %d digests, too many for one reply; send smaller batches", digests)
}
