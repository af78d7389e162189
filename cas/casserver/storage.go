// SPDX-License-Identifier: Apache-2.0

package casserver

import (
	"context"
	"errors"
	"slices"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/compress"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
)

// storage is the ContentAddressableStorage service.
type storage struct {
	repb.UnimplementedContentAddressableStorageServer
	Config
	cuts    chan struct{} // see maxCuts
	uploads *uploads      // which hold room
}

// FindMissingBlobs returns the digests that are absent, each once, and marks the others as used.
func (s *storage) FindMissingBlobs(ctx context.Context, req *repb.FindMissingBlobsRequest) (*repb.FindMissingBlobsResponse, error) {
	in, err := s.Instances(req.InstanceName)
	if err != nil {
		return nil, cas.Status(err)
	}
	ds := make([]cas.Digest, len(req.BlobDigests))
	for i, p := range req.BlobDigests {
		if ds[i], err = digest(in, req.DigestFunction, p); err != nil {
			return nil, cas.Status(err)
		}
	}
	missing, err := in.Store.Missing(ctx, ds)
	if err != nil {
		return nil, cas.Status(err)
	}
	resp := &repb.FindMissingBlobsResponse{MissingBlobDigests: make([]*repb.Digest, len(missing))}
	protos := make([]repb.Digest, len(missing)) // one allocation for all of them
	for i, d := range missing {
		p := &protos[i]
		p.Hash, p.SizeBytes = d.Hash(), d.Size()
		resp.MissingBlobDigests[i] = p
	}
	return resp, nil
}

// BatchUpdateBlobs stores blobs and says for each of them how that went. Only a batch that is too
// large fails as a whole.
func (s *storage) BatchUpdateBlobs(ctx context.Context, req *repb.BatchUpdateBlobsRequest) (*repb.BatchUpdateBlobsResponse, error) {
	in, err := s.Instances(req.InstanceName)
	if err != nil {
		return nil, cas.Status(err)
	}
	rest := s.MaxBatchBytes
	for _, r := range req.Requests {
		n := int64(len(r.Data))
		if r.Compressor != repb.Compressor_IDENTITY {
			n = max(n, r.Digest.GetSizeBytes()) // what it takes once it is decompressed
		}
		if rest -= n; rest < 0 {
			return nil, status.Errorf(codes.InvalidArgument,
				"batch is above the %d bytes of max_batch_total_size_bytes, uncompressed; send smaller batches or use ByteStream.Write",
				s.MaxBatchBytes)
		}
	}
	var reply int
	for _, r := range req.Requests {
		reply += entrySize(r.Digest)
	}
	if reply > maxMessage {
		return nil, tooMany(len(req.Requests))
	}
	resp := &repb.BatchUpdateBlobsResponse{Responses: make([]*repb.BatchUpdateBlobsResponse_Response, len(req.Requests))}
	var blobs []cas.Blob
	var answers []*repb.BatchUpdateBlobsResponse_Response // to blobs
	for i, r := range req.Requests {
		b, err := s.offered(in, req.DigestFunction, r)
		resp.Responses[i] = &repb.BatchUpdateBlobsResponse_Response{Digest: r.Digest, Status: status.Convert(err).Proto()}
		if err == nil {
			blobs = append(blobs, b)
			answers = append(answers, resp.Responses[i])
		}
	}
	for i, err := range cas.PutAll(ctx, in.Store, blobs) {
		if errors.Is(err, cas.ErrFull) {
			s.uploads.dropWaiting() // room for the next try
		}
		if err != nil {
			answers[i].Status = status.Convert(cas.Status(explain("upload", blobs[i].Digest, err))).Proto()
		}
	}
	return resp, nil
}

// offered returns a blob of a batch, uncompressed, or as a status why it cannot be stored. Whether the data is what the
// digest names is for the store to see.
func (s *storage) offered(in *cas.Instance, f repb.DigestFunction_Value, r *repb.BatchUpdateBlobsRequest_Request) (cas.Blob, error) {
	d, err := digest(in, f, r.Digest)
	if err == nil {
		err = s.checkSize(d)
	}
	if err != nil {
		return cas.Blob{}, cas.Status(err)
	}
	b := cas.Blob{Digest: d, Data: r.Data}
	switch {
	case r.Compressor == repb.Compressor_IDENTITY:
	case !compress.Served(r.Compressor):
		return cas.Blob{}, status.Errorf(codes.InvalidArgument, "upload %s: compressor %v is not served; send the blob uncompressed, or by one of %s",
			d, r.Compressor, compress.Names())
	default:
		b.Data, err = compress.Decode(r.Compressor, r.Data, d.Size())
	}
	return b, cas.Status(explain("upload", d, err))
}

// BatchReadBlobs returns blobs, compressed if the client takes that and it saves something, and says for each of
// them how that went. Only a batch with too much data, uncompressed, fails as a whole.
func (s *storage) BatchReadBlobs(ctx context.Context, req *repb.BatchReadBlobsRequest) (*repb.BatchReadBlobsResponse, error) {
	in, err := s.Instances(req.InstanceName)
	if err != nil {
		return nil, cas.Status(err)
	}
	rest := s.MaxBatchBytes
	for _, p := range req.Digests {
		// A negative size is that blob's fault, and no room for others.
		if rest -= max(p.SizeBytes, 0); rest < 0 {
			return nil, status.Errorf(codes.InvalidArgument,
				"batch is above the %d bytes of max_batch_total_size_bytes; ask for fewer blobs or use ByteStream.Read",
				s.MaxBatchBytes)
		}
	}
	// What stands beside the data is not counted in the limit, yet must fit into the reply.
	room := maxMessage
	for _, p := range req.Digests {
		room -= entrySize(p)
	}
	if room < 0 {
		return nil, tooMany(len(req.Digests))
	}
	var ds []cas.Digest
	for _, p := range req.Digests {
		if d, err := digest(in, req.DigestFunction, p); err == nil {
			ds = append(ds, d)
		}
	}
	by := repb.Compressor_IDENTITY
	for _, c := range compress.Compressors() {
		if slices.Contains(req.AcceptableCompressors, c) {
			by = c
			break
		}
	}
	nowhere := map[cas.Digest]bool{}
	if far, ok := cas.As[cas.Fetcher](in.Store); ok && len(ds) > 0 {
		// If what is far cannot be fetched, each blob says so itself below: some may be near.
		absent, _ := far.Fetch(ctx, ds)
		for _, d := range absent {
			nowhere[d] = true
		}
	}
	resp := &repb.BatchReadBlobsResponse{Responses: make([]*repb.BatchReadBlobsResponse_Response, len(req.Digests))}
	for i, p := range req.Digests {
		b, err := readBlob(ctx, in, req.DigestFunction, p, nowhere)
		r := &repb.BatchReadBlobsResponse_Response{Digest: p, Data: b, Status: status.Convert(err).Proto()}
		if by != repb.Compressor_IDENTITY {
			if packed := compress.Encode(by, b); packed != nil {
				r.Data, r.Compressor = packed, by
			}
		}
		more := max(proto.Size(r)-entrySize(p), 0)
		if more > room {
			r.Data, r.Compressor, more = nil, repb.Compressor_IDENTITY, 0
			r.Status = status.New(codes.ResourceExhausted, "reply is full; ask again").Proto()
		}
		room -= more
		resp.Responses[i] = r
	}
	return resp, nil
}

// entrySize is the room, in bytes, that is reserved in a reply for the blob p without its data: its
// digest, a status of few words and their framing.
func entrySize(p *repb.Digest) int { return proto.Size(p) + 64 }

func tooMany(digests int) error {
	return status.Errorf(codes.InvalidArgument, "batch has %d digests, too many for one reply; send smaller batches", digests)
}

// readBlob returns one blob of a batch, of which those that are nowhere are known; its error is a status.
func readBlob(ctx context.Context, in *cas.Instance, f repb.DigestFunction_Value, p *repb.Digest, nowhere map[cas.Digest]bool) ([]byte, error) {
	d, err := digest(in, f, p)
	if err != nil {
		return nil, cas.Status(err)
	}
	if nowhere[d] {
		return nil, cas.Status(explain("read", d, cas.ErrNotFound))
	}
	b, err := cas.ReadAll(ctx, in.Store, d, maxBatch)
	if err != nil {
		return nil, cas.Status(explain("read", d, err))
	}
	return b, nil
}
