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

// entries returns the statuses of a batch, to be changed.
func entries(m proto.Message) (all []*spb.Status) {
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
	return all
}

// cache changes what is told of the cache.
func cache(change func(*repb.CacheCapabilities)) func(req, m proto.Message, err error) error {
	return func(_, m proto.Message, err error) error {
		if caps, ok := m.(*repb.ServerCapabilities); ok && err == nil {
			change(caps.CacheCapabilities)
		}
		return err
	}
}

// remembers is of a server whose results are never checked: what was sent is recorded, and served for ever.
func remembers() func(req, m proto.Message, err error) error {
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

// faults returns servers as there might be.
func faults() []fault {
	return []fault{
		{name: "committed_size is one too small", rules: []int{9, 36, 40, 43}, reply: func(_, m proto.Message, err error) error {
			if r, ok := m.(*bspb.WriteResponse); ok {
				r.CommittedSize--
			}
			return err
		}},
		{name: "nobody looks whether outputs are there", rules: []int{62, 67}, reply: remembers()},
		{name: "every blob is called present", rules: []int{17, 22, 23, 26, 39, 42}, reply: func(_, m proto.Message, err error) error {
			if r, ok := m.(*repb.FindMissingBlobsResponse); ok {
				r.MissingBlobDigests = nil
			}
			return err
		}},
		{name: "one of the missing blobs is not told", rules: []int{23}, reply: func(_, m proto.Message, err error) error {
			if r, ok := m.(*repb.FindMissingBlobsResponse); ok && len(r.MissingBlobDigests) > 1 {
				r.MissingBlobDigests = r.MissingBlobDigests[1:]
			}
			return err
		}},
		{name: "the empty blob is called missing", rules: []int{18}, reply: func(req, m proto.Message, err error) error {
			if r, ok := m.(*repb.FindMissingBlobsResponse); ok && err == nil {
				for _, d := range req.(*repb.FindMissingBlobsRequest).BlobDigests {
					if d.GetSizeBytes() == 0 {
						r.MissingBlobDigests = append(r.MissingBlobDigests, d)
					}
				}
			}
			return err
		}},
		{name: "other bytes are INTERNAL in a batch", rules: []int{16, 17, 25, 26}, reply: func(_, m proto.Message, err error) error {
			for _, s := range entries(m) {
				if codes.Code(s.GetCode()) == codes.InvalidArgument {
					s.Code = int32(codes.Internal)
				}
			}
			return err
		}},
		{name: "a batch is well whatever is in it", rules: []int{25, 26, 29, 31}, reply: func(_, m proto.Message, err error) error {
			for _, s := range entries(m) {
				if s != nil {
					s.Code = 0
				}
			}
			return err
		}},
		{name: "one bad digest fails the batch", rules: []int{25, 31}, reply: func(_, m proto.Message, err error) error {
			for _, s := range entries(m) {
				if s.GetCode() != 0 {
					return status.ErrorProto(s)
				}
			}
			return err
		}},
		{name: "a batch is never too large", rules: []int{8, 27}, reply: func(req, m proto.Message, err error) error {
			if r, ok := m.(*repb.BatchUpdateBlobsResponse); ok && status.Code(err) == codes.InvalidArgument {
				for _, q := range req.(*repb.BatchUpdateBlobsRequest).Requests {
					r.Responses = append(r.Responses, &repb.BatchUpdateBlobsResponse_Response{Digest: q.Digest})
				}
				return nil
			}
			return err
		}},
		{name: "compressed replies are not marked as such", rules: []int{33}, reply: func(_, m proto.Message, err error) error {
			if r, ok := m.(*repb.BatchReadBlobsResponse); ok && err == nil {
				for _, r := range r.Responses {
					r.Data, r.Compressor = zstdOf(r.Data), repb.Compressor_IDENTITY
				}
			}
			return err
		}},
		{name: "compressed replies are sent to everybody", rules: []int{33}, reply: func(_, m proto.Message, err error) error {
			if r, ok := m.(*repb.BatchReadBlobsResponse); ok && err == nil {
				for _, r := range r.Responses {
					r.Data, r.Compressor = zstdOf(r.Data), repb.Compressor_ZSTD
				}
			}
			return err
		}},
		{name: "a Read loses the last byte of each piece", rules: []int{36, 43, 48, 49, 50, 51, 52}, reply: func(_, m proto.Message, err error) error {
			if r, ok := m.(*bspb.ReadResponse); ok && len(r.Data) > 0 {
				r.Data = r.Data[:len(r.Data)-1]
			}
			return err
		}},
		{name: "read_limit is ignored", rules: []int{49, 51}, request: func(m proto.Message) {
			if r, ok := m.(*bspb.ReadRequest); ok && r.ReadLimit > 0 {
				r.ReadLimit = 0
			}
		}},
		{name: "read_offset is ignored", rules: []int{48, 49, 51}, request: func(m proto.Message) {
			if r, ok := m.(*bspb.ReadRequest); ok {
				r.ReadOffset = 0
			}
		}},
		{name: "an absent blob reads as an empty one", rules: []int{17, 20, 22, 48}, reply: func(_, m proto.Message, err error) error {
			if _, ok := m.(*bspb.ReadResponse); ok && status.Code(err) == codes.NotFound {
				return io.EOF
			}
			return err
		}},
		{name: "compressed names read uncompressed", rules: []int{50, 51}, request: func(m proto.Message) {
			if r, ok := m.(*bspb.ReadRequest); ok {
				r.ResourceName = strings.Replace(r.ResourceName, "compressed-blobs/zstd/", "blobs/", 1)
			}
		}},
		{name: "what is behind a frame is ignored", rules: []int{45}, request: func(m proto.Message) {
			if r, ok := m.(*bspb.WriteRequest); ok && r.FinishWrite {
				r.Data = bytes.TrimSuffix(r.Data, []byte("garbage"))
			}
		}},
		{name: "a compressor that is none is zstd", rules: []int{45}, request: func(m proto.Message) {
			if r, ok := m.(*bspb.WriteRequest); ok {
				r.ResourceName = strings.Replace(r.ResourceName, "compressed-blobs/lzma/", "compressed-blobs/zstd/", 1)
			}
		}},
		{name: "offsets of compressed writes are ignored", rules: []int{44}, request: func(m proto.Message) {
			if r, ok := m.(*bspb.WriteRequest); ok && strings.Contains(r.ResourceName, "/compressed-blobs/") && r.WriteOffset == 300_000 {
				r.WriteOffset = 200_000
			}
		}},
		{name: "compressed batches are stored as they are", rules: []int{29}, request: func(m proto.Message) {
			if r, ok := m.(*repb.BatchUpdateBlobsRequest); ok {
				for _, r := range r.Requests {
					r.Compressor = repb.Compressor_IDENTITY
				}
			}
		}},
		{name: "QueryWriteStatus is not implemented", rules: []int{46}, reply: func(_, m proto.Message, err error) error {
			if _, ok := m.(*bspb.QueryWriteStatusResponse); ok {
				return status.Error(codes.Unimplemented, "no")
			}
			return err
		}},
		{name: "a name that changes within a stream is ignored", rules: []int{37}, request: func(m proto.Message) {
			if r, ok := m.(*bspb.WriteRequest); ok && r.WriteOffset > 0 {
				r.ResourceName = ""
			}
		}},
		{name: "finish_write goes without saying", rules: []int{39}, request: func(m proto.Message) {
			if r, ok := m.(*bspb.WriteRequest); ok && r.WriteOffset+int64(len(r.Data)) == 100_000 {
				r.FinishWrite = true
			}
		}},
		{name: "negative offsets are those before the end", rules: []int{38, 48}, request: func(m proto.Message) {
			switch m := m.(type) {
			case *bspb.WriteRequest:
				m.WriteOffset = max(m.WriteOffset, 0)
			case *bspb.ReadRequest:
				m.ReadOffset = max(m.ReadOffset, 0)
			}
		}},
		{name: "the header with the resource name is ignored", rules: []int{54}, deaf: true},
		{name: "hashes in upper case are as good", rules: []int{16}, request: func(m proto.Message) {
			if r, ok := m.(*repb.FindMissingBlobsRequest); ok {
				for _, d := range r.BlobDigests {
					d.Hash = strings.ToLower(d.Hash)
				}
			}
		}},
		{name: "instance names are ignored", rules: []int{15, 21, 22, 69}, request: func(m proto.Message) {
			if f := m.ProtoReflect().Descriptor().Fields().ByName("instance_name"); f != nil {
				m.ProtoReflect().Clear(f)
			}
		}},
		{name: "digest_function is ignored", rules: []int{3, 19, 20}, request: func(m proto.Message) {
			if f := m.ProtoReflect().Descriptor().Fields().ByName("digest_function"); f != nil {
				m.ProtoReflect().Clear(f)
			}
		}},
		{name: "page_size is ignored", rules: []int{34}, request: func(m proto.Message) {
			if r, ok := m.(*repb.GetTreeRequest); ok {
				r.PageSize = 0
			}
		}},
		{name: "page_token is ignored", rules: []int{34}, request: func(m proto.Message) {
			if r, ok := m.(*repb.GetTreeRequest); ok {
				r.PageToken = ""
			}
		}},
		{name: "a tree lacks its last Directory", rules: []int{34, 35}, reply: func(_, m proto.Message, err error) error {
			if r, ok := m.(*repb.GetTreeResponse); ok && len(r.Directories) > 0 {
				r.Directories = r.Directories[:len(r.Directories)-1]
			}
			return err
		}},
		{name: "digests go where contents are inlined", rules: []int{64}, reply: func(_, m proto.Message, err error) error {
			if r, ok := m.(*repb.ActionResult); ok && len(r.StdoutRaw) > 0 {
				r.StdoutDigest = nil
			}
			return err
		}},
		{name: "failures are recorded as successes", rules: []int{68}, request: func(m proto.Message) {
			if r, ok := m.(*repb.UpdateActionResultRequest); ok && r.ActionResult != nil {
				r.ActionResult.ExitCode = 0
			}
		}},
		{name: "updates are refused, and nobody says so", rules: []int{6, 7, 65}, reply: func(_, m proto.Message, err error) error {
			if _, ok := m.(*repb.ActionResult); ok {
				return status.Error(codes.PermissionDenied, "no")
			}
			return err
		}},
		{name: "paths of results lead where they will", rules: []int{66}, reply: func(req, m proto.Message, err error) error {
			if r, ok := req.(*repb.UpdateActionResultRequest); ok && len(r.GetActionResult().GetOutputFiles()) > 0 {
				return nil
			}
			return err
		}},
		{name: "the lowest version is 2.3", rules: []int{2}, reply: func(_, m proto.Message, err error) error {
			if r, ok := m.(*repb.ServerCapabilities); ok {
				r.LowApiVersion.Minor = 3
			}
			return err
		}},
		{name: "there are no capabilities of the cache", rules: []int{1, 3}, reply: func(_, m proto.Message, err error) error {
			if r, ok := m.(*repb.ServerCapabilities); ok {
				r.CacheCapabilities = nil
			}
			return err
		}},
		{name: "only SHA256 is listed", rules: []int{3}, reply: cache(func(c *repb.CacheCapabilities) {
			c.DigestFunctions = []repb.DigestFunction_Value{repb.DigestFunction_SHA256}
		})},
		{name: "update_enabled is false", rules: []int{6, 65}, reply: cache(func(c *repb.CacheCapabilities) {
			c.ActionCacheUpdateCapabilities = nil
		})},
		{name: "there are no priorities", rules: []int{7}, reply: cache(func(c *repb.CacheCapabilities) { c.CachePriorityCapabilities = nil })},
		{name: "the limit of a batch is said to be 100 bytes more", rules: []int{8}, reply: cache(func(c *repb.CacheCapabilities) { c.MaxBatchTotalSizeBytes += 100 })},
		{name: "the limit of a blob is said to be a byte less", rules: []int{10}, reply: cache(func(c *repb.CacheCapabilities) {
			c.MaxCasBlobSizeBytes = max(c.MaxCasBlobSizeBytes-1, 1)
		})},
		{name: "brotli is said not to be there, and all else", rules: []int{11}, reply: cache(func(c *repb.CacheCapabilities) {
			c.SupportedCompressors = []repb.Compressor_Value{repb.Compressor_DEFLATE, repb.Compressor_ZSTD}
			c.SupportedBatchUpdateCompressors = nil
		})},
		{name: "nobody knows of absolute symlinks", rules: []int{12}, reply: cache(func(c *repb.CacheCapabilities) {
			c.SymlinkAbsolutePathStrategy = repb.SymlinkAbsolutePathStrategy_UNKNOWN
		})},
		{name: "splitting is promised and not implemented", rules: []int{13}, reply: func(_, m proto.Message, err error) error {
			switch m := m.(type) {
			case *repb.ServerCapabilities:
				m.CacheCapabilities.SplitBlobSupport, m.CacheCapabilities.SpliceBlobSupport = true, true
			case *repb.GetChunkMappingResponse, *repb.SplitBlobResponse, *repb.SpliceBlobResponse, *repb.RegisterChunkMappingResponse:
				return status.Error(codes.Unimplemented, "no")
			}
			return err
		}},
		{name: "the last chunk is not told", rules: []int{57, 58, 61}, reply: func(_, m proto.Message, err error) error {
			switch m := m.(type) {
			case *repb.GetChunkMappingResponse:
				m.ChunkDigests = m.ChunkDigests[:max(len(m.ChunkDigests)-1, 0)]
			case *repb.SplitBlobResponse:
				m.ChunkDigests = m.ChunkDigests[:max(len(m.ChunkDigests)-1, 0)]
			}
			return err
		}},
		{name: "nobody says how a blob is cut", rules: []int{58}, reply: func(_, m proto.Message, err error) error {
			if r, ok := m.(*repb.GetChunkMappingResponse); ok {
				r.ChunkingFunction = repb.ChunkingFunction_UNKNOWN
			}
			return err
		}},
		{name: "any mapping will do", rules: []int{59, 60}, reply: func(_, m proto.Message, err error) error {
			switch m.(type) {
			case *repb.RegisterChunkMappingResponse, *repb.SpliceBlobResponse:
				if status.Code(err) == codes.InvalidArgument {
					return nil
				}
			}
			return err
		}},
		{name: "absent chunks are a mistake of the client", rules: []int{13, 60}, reply: func(_, m proto.Message, err error) error {
			switch m.(type) {
			case *repb.RegisterChunkMappingResponse, *repb.SpliceBlobResponse:
				if status.Code(err) == codes.NotFound {
					return status.Error(codes.InvalidArgument, status.Convert(err).Message())
				}
			}
			return err
		}},
		{name: "chunks have 100 bytes", rules: []int{14}, reply: cache(func(c *repb.CacheCapabilities) {
			c.FastCdc_2020Params = &repb.FastCdc2020Params{AvgChunkSizeBytes: 100}
		})},
	}
}
