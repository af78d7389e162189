// SPDX-License-Identifier: Apache-2.0

package reapi_test

import (
	"bytes"
	"io"
	"strings"
	"sync"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	bspb "google.golang.org/genproto/googleapis/bytestream"
	spb "google.golang.org/genproto/googleapis/rpc/status"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
)

// requests returns a fault.request that changes messages of type M.
func requests[M proto.Message](change func(M)) func(proto.Message) {
	return func(m proto.Message) {
		if m, ok := m.(M); ok {
			change(m)
		}
	}
}

// replies returns a fault.reply that changes messages of type M, also those of failed calls.
func replies[M proto.Message](change func(M)) func(req, m proto.Message, err error) error {
	return func(_, m proto.Message, err error) error {
		if m, ok := m.(M); ok {
			change(m)
		}
		return err
	}
}

// cacheReplies returns a fault.reply that changes the cache capabilities.
func cacheReplies(change func(*repb.CacheCapabilities)) func(req, m proto.Message, err error) error {
	return replies(func(r *repb.ServerCapabilities) {
		if r.CacheCapabilities != nil {
			change(r.CacheCapabilities)
		}
	})
}

// batchReplies returns a fault.reply that changes the statuses of batches.
func batchReplies(change func(*spb.Status) error) func(req, m proto.Message, err error) error {
	return func(_, m proto.Message, err error) error {
		var all []*spb.Status
		switch m := m.(type) {
		case *repb.BatchUpdateBlobsResponse:
			for _, r := range m.Responses {
				all = append(all, r.Status)
			}
		case *repb.BatchReadBlobsResponse:
			for _, r := range m.Responses {
				all = append(all, r.Status)
			}
		}
		for _, s := range all {
			if s != nil {
				if changed := change(s); changed != nil {
					return changed
				}
			}
		}
		return err
	}
}

// errorReplies returns a fault.reply that replaces the code of failed calls whose response is one of these types.
func errorReplies(from, to codes.Code, types ...proto.Message) func(req, m proto.Message, err error) error {
	return func(_, m proto.Message, err error) error {
		for _, t := range types {
			if status.Code(err) == from && t.ProtoReflect().Descriptor() == m.ProtoReflect().Descriptor() {
				return status.Error(to, status.Convert(err).Message())
			}
		}
		return err
	}
}

// clearField returns a fault.request that clears a field wherever it exists.
func clearField(name string) func(proto.Message) {
	return func(m proto.Message) {
		for i := range m.ProtoReflect().Descriptor().Fields().Len() {
			if f := m.ProtoReflect().Descriptor().Fields().Get(i); string(f.Name()) == name {
				m.ProtoReflect().Clear(f)
			}
		}
	}
}

// uncheckedCache is the fault.reply of a server that serves recorded results without any check.
func uncheckedCache() func(req, m proto.Message, err error) error {
	var results sync.Map // by the hash of the action
	return func(req, m proto.Message, err error) error {
		r, ok := m.(*repb.ActionResult)
		if !ok || err == nil && req == nil {
			return err
		}
		switch req := req.(type) {
		case *repb.UpdateActionResultRequest:
			results.Store(req.ActionDigest.GetHash(), req.ActionResult)
			return nil
		case *repb.GetActionResultRequest:
			if known, ok := results.Load(req.ActionDigest.GetHash()); ok {
				proto.Reset(r)
				proto.Merge(r, known.(*repb.ActionResult))
				return nil
			}
		}
		return err
	}
}

// unlimitedBatches accepts batches that are too large.
func unlimitedBatches(req, m proto.Message, err error) error {
	if r, ok := m.(*repb.BatchUpdateBlobsResponse); ok && status.Code(err) == codes.InvalidArgument {
		for _, q := range req.(*repb.BatchUpdateBlobsRequest).Requests {
			r.Responses = append(r.Responses, &repb.BatchUpdateBlobsResponse_Response{Digest: q.Digest})
		}
		return nil
	}
	return err
}

// emptyBlobMissing reports empty blobs as missing.
func emptyBlobMissing(req, m proto.Message, err error) error {
	if r, ok := m.(*repb.FindMissingBlobsResponse); ok && err == nil {
		for _, d := range req.(*repb.FindMissingBlobsRequest).BlobDigests {
			if d.GetSizeBytes() == 0 {
				r.MissingBlobDigests = append(r.MissingBlobDigests, d)
			}
		}
	}
	return err
}

// packBatchReads compresses the replies of BatchReadBlobs and labels them with c.
func packBatchReads(c repb.Compressor_Value) func(req, m proto.Message, err error) error {
	return replies(func(m *repb.BatchReadBlobsResponse) {
		for _, r := range m.Responses {
			r.Data, r.Compressor = zstdOf(r.Data), c
		}
	})
}

// chunkless advertises chunking without implementing it.
func chunkless(_, m proto.Message, err error) error {
	switch m := m.(type) {
	case *repb.ServerCapabilities:
		m.CacheCapabilities.SplitBlobSupport, m.CacheCapabilities.SpliceBlobSupport = true, true
	case *repb.GetChunkMappingResponse, *repb.SplitBlobResponse, *repb.SpliceBlobResponse, *repb.RegisterChunkMappingResponse:
		return status.Error(codes.Unimplemented, "no")
	}
	return err
}

func dropLast[T any](s []T) []T { return s[:max(len(s)-1, 0)] }

// faults returns possible faults of servers.
func faults() []fault {
	return []fault{
		{
			name: "committed_size is too small by one", rules: []int{9, 36, 40, 43},
			reply: replies(func(r *bspb.WriteResponse) { r.CommittedSize-- }),
		},
		{name: "missing outputs are not noticed", rules: []int{62, 67}, reply: uncheckedCache()},
		{
			name: "every blob is reported present", rules: []int{17, 22, 23, 26, 39, 42},
			reply: replies(func(r *repb.FindMissingBlobsResponse) { r.MissingBlobDigests = nil }),
		},
		{name: "one missing blob is not reported", rules: []int{23}, reply: replies(func(r *repb.FindMissingBlobsResponse) {
			if len(r.MissingBlobDigests) > 1 {
				r.MissingBlobDigests = r.MissingBlobDigests[1:]
			}
		})},
		{name: "the empty blob is reported missing", rules: []int{18}, reply: emptyBlobMissing},
		{name: "a mismatch in a batch is INTERNAL", rules: []int{16, 17, 25, 26}, reply: batchReplies(func(s *spb.Status) error {
			if codes.Code(s.Code) == codes.InvalidArgument {
				s.Code = int32(codes.Internal)
			}
			return nil
		})},
		{name: "every blob of a batch succeeds", rules: []int{25, 26, 29, 31}, reply: batchReplies(func(s *spb.Status) error {
			s.Code = 0
			return nil
		})},
		{name: "one bad digest fails the batch", rules: []int{25, 31}, reply: batchReplies(status.ErrorProto)},
		{name: "a batch is never too large", rules: []int{8, 27}, reply: unlimitedBatches},
		{name: "compressed replies are labelled IDENTITY", rules: []int{33}, reply: packBatchReads(repb.Compressor_IDENTITY)},
		{name: "compressed replies are sent to every client", rules: []int{33}, reply: packBatchReads(repb.Compressor_ZSTD)},
		{
			name: "a Read loses the last byte of each message", rules: []int{36, 43, 48, 49, 50, 51, 52},
			reply: replies(func(r *bspb.ReadResponse) { r.Data = dropLast(r.Data) }),
		},
		{
			name: "read_limit is ignored", rules: []int{49, 51},
			request: requests(func(r *bspb.ReadRequest) { r.ReadLimit = min(r.ReadLimit, 0) }),
		},
		{
			name: "read_offset is ignored", rules: []int{48, 49, 51},
			request: requests(func(r *bspb.ReadRequest) { r.ReadOffset = 0 }),
		},
		{name: "an absent blob reads as an empty one", rules: []int{17, 20, 22, 48}, reply: func(_, m proto.Message, err error) error {
			if _, ok := m.(*bspb.ReadResponse); ok && status.Code(err) == codes.NotFound {
				return io.EOF
			}
			return err
		}},
		{name: "compressed names read uncompressed", rules: []int{50, 51}, request: requests(func(r *bspb.ReadRequest) {
			r.ResourceName = strings.Replace(r.ResourceName, "compressed-blobs/zstd/", "blobs/", 1)
		})},
		{name: "trailing data after a frame is ignored", rules: []int{45}, request: requests(func(r *bspb.WriteRequest) {
			if r.FinishWrite {
				r.Data = bytes.TrimSuffix(r.Data, []byte("garbage"))
			}
		})},
		{name: "an unknown compressor is zstd", rules: []int{45}, request: requests(func(r *bspb.WriteRequest) {
			r.ResourceName = strings.Replace(r.ResourceName, "compressed-blobs/lzma/", "compressed-blobs/zstd/", 1)
		})},
		{name: "offsets of compressed writes are ignored", rules: []int{44}, request: requests(func(r *bspb.WriteRequest) {
			if strings.Contains(r.ResourceName, "/compressed-blobs/") && r.WriteOffset == 300_000 {
				r.WriteOffset = 200_000
			}
		})},
		{name: "compressed batches are stored compressed", rules: []int{29}, request: requests(func(r *repb.BatchUpdateBlobsRequest) {
			for _, r := range r.Requests {
				r.Compressor = repb.Compressor_IDENTITY
			}
		})},
		{name: "QueryWriteStatus is not implemented", rules: []int{46}, reply: func(_, m proto.Message, err error) error {
			if _, ok := m.(*bspb.QueryWriteStatusResponse); ok {
				return status.Error(codes.Unimplemented, "no")
			}
			return err
		}},
		{name: "a resource name that changes within a stream is ignored", rules: []int{37}, request: requests(func(r *bspb.WriteRequest) {
			if r.WriteOffset > 0 {
				r.ResourceName = ""
			}
		})},
		{name: "finish_write is not required", rules: []int{39}, request: requests(func(r *bspb.WriteRequest) {
			if r.WriteOffset+int64(len(r.Data)) == 100_000 {
				r.FinishWrite = true
			}
		})},
		{name: "negative offsets are accepted", rules: []int{38, 48}, request: func(m proto.Message) {
			switch m := m.(type) {
			case *bspb.WriteRequest:
				m.WriteOffset = max(m.WriteOffset, 0)
			case *bspb.ReadRequest:
				m.ReadOffset = max(m.ReadOffset, 0)
			}
		}},
		{name: "the header with the resource name is ignored", rules: []int{54}, dropHeaders: true},
		{name: "upper case hashes are accepted", rules: []int{16}, request: requests(func(r *repb.FindMissingBlobsRequest) {
			for _, d := range r.BlobDigests {
				d.Hash = strings.ToLower(d.Hash)
			}
		})},
		{name: "instance_name is ignored", rules: []int{15, 21, 22, 69}, request: clearField("instance_name")},
		{name: "digest_function is ignored", rules: []int{3, 19, 20}, request: clearField("digest_function")},
		{name: "page_size is ignored", rules: []int{34}, request: requests(func(r *repb.GetTreeRequest) { r.PageSize = 0 })},
		{name: "page_token is ignored", rules: []int{34}, request: requests(func(r *repb.GetTreeRequest) { r.PageToken = "" })},
		{
			name: "a tree lacks its last Directory", rules: []int{34, 35},
			reply: replies(func(r *repb.GetTreeResponse) { r.Directories = dropLast(r.Directories) }),
		},
		{name: "inlined contents have no digest", rules: []int{64}, reply: replies(func(r *repb.ActionResult) {
			if len(r.StdoutRaw) > 0 {
				r.StdoutDigest = nil
			}
		})},
		{name: "failures are recorded as successes", rules: []int{68}, request: requests(func(r *repb.UpdateActionResultRequest) {
			if r.ActionResult != nil {
				r.ActionResult.ExitCode = 0
			}
		})},
		{name: "updates are rejected although advertised", rules: []int{6, 7, 65}, reply: func(_, m proto.Message, err error) error {
			if _, ok := m.(*repb.ActionResult); ok {
				return status.Error(codes.PermissionDenied, "no")
			}
			return err
		}},
		{name: "paths of results are not checked", rules: []int{66}, reply: func(req, m proto.Message, err error) error {
			if r, ok := req.(*repb.UpdateActionResultRequest); ok && len(r.GetActionResult().GetOutputFiles()) > 0 {
				return nil
			}
			return err
		}},
		{
			name: "the lowest version is 2.3", rules: []int{2},
			reply: replies(func(r *repb.ServerCapabilities) { r.GetLowApiVersion().Minor = 3 }),
		},
		{
			name: "cache_capabilities are missing", rules: []int{1, 3},
			reply: replies(func(r *repb.ServerCapabilities) { r.CacheCapabilities = nil }),
		},
		{name: "only SHA256 is listed", rules: []int{3}, reply: cacheReplies(func(c *repb.CacheCapabilities) {
			c.DigestFunctions = []repb.DigestFunction_Value{repb.DigestFunction_SHA256}
		})},
		{
			name: "update_enabled is false", rules: []int{6, 65},
			reply: cacheReplies(func(c *repb.CacheCapabilities) { c.ActionCacheUpdateCapabilities = nil }),
		},
		{
			name: "priorities are missing", rules: []int{7},
			reply: cacheReplies(func(c *repb.CacheCapabilities) { c.CachePriorityCapabilities = nil }),
		},
		{
			name: "the advertised batch limit is 100 bytes too large", rules: []int{8},
			reply: cacheReplies(func(c *repb.CacheCapabilities) { c.MaxBatchTotalSizeBytes += 100 }),
		},
		{name: "the advertised blob limit is a byte too small", rules: []int{10}, reply: cacheReplies(func(c *repb.CacheCapabilities) {
			c.MaxCasBlobSizeBytes = max(c.MaxCasBlobSizeBytes-1, 1)
		})},
		{name: "brotli and compressed batches are not advertised", rules: []int{11}, reply: cacheReplies(func(c *repb.CacheCapabilities) {
			c.SupportedCompressors = []repb.Compressor_Value{repb.Compressor_DEFLATE, repb.Compressor_ZSTD}
			c.SupportedBatchUpdateCompressors = nil
		})},
		{name: "the absolute symlink strategy is UNKNOWN", rules: []int{12}, reply: cacheReplies(func(c *repb.CacheCapabilities) {
			c.SymlinkAbsolutePathStrategy = repb.SymlinkAbsolutePathStrategy_UNKNOWN
		})},
		{name: "chunking is advertised but not implemented", rules: []int{13}, reply: chunkless},
		{name: "the last chunk is not reported", rules: []int{57, 58, 61}, reply: func(_, m proto.Message, err error) error {
			switch m := m.(type) {
			case *repb.GetChunkMappingResponse:
				m.ChunkDigests = dropLast(m.ChunkDigests)
			case *repb.SplitBlobResponse:
				m.ChunkDigests = dropLast(m.ChunkDigests)
			}
			return err
		}},
		{name: "the chunking function is not reported", rules: []int{58}, reply: replies(func(r *repb.GetChunkMappingResponse) {
			r.ChunkingFunction = repb.ChunkingFunction_UNKNOWN
		})},
		{name: "every chunk mapping is accepted", rules: []int{59, 60}, reply: errorReplies(codes.InvalidArgument, codes.OK,
			&repb.RegisterChunkMappingResponse{}, &repb.SpliceBlobResponse{})},
		{name: "absent chunks are INVALID_ARGUMENT", rules: []int{13, 60}, reply: errorReplies(codes.NotFound, codes.InvalidArgument,
			&repb.RegisterChunkMappingResponse{}, &repb.SpliceBlobResponse{})},
		{name: "chunks have 100 bytes", rules: []int{14}, reply: cacheReplies(func(c *repb.CacheCapabilities) {
			c.FastCdc_2020Params = &repb.FastCdc2020Params{AvgChunkSizeBytes: 100}
		})},
	}
}
