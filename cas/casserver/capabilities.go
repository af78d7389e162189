// SPDX-License-Identifier: Apache-2.0

package casserver

import (
	"context"
	"math"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/bazelbuild/remote-apis/build/bazel/semver"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/casstatus"
	"github.com/cloister-build/cloister/cas/internal/compress"
	"google.golang.org/protobuf/proto"
)

// capabilities is the Capabilities service.
type capabilities struct {
	repb.UnimplementedCapabilitiesServer
	Config
}

// GetCapabilities reports what an instance supports and what the caller may use. Instances differ only in their digest
// functions and in chunking. The lowest version is 2.0 because Bazel up to 6 requires it. SplitBlob and SpliceBlob,
// which 2.13 replaces, are served for clients of 2.12.
func (s *capabilities) GetCapabilities(
	ctx context.Context, req *repb.GetCapabilitiesRequest,
) (*repb.ServerCapabilities, error) {
	in, err := s.Instances(req.InstanceName)
	if err != nil {
		return nil, casstatus.Error(err)
	}
	execute, update := true, true
	if s.Rights != nil {
		execute, update = s.Rights(ctx, req.InstanceName)
	}
	var functions []repb.DigestFunction_Value
	for _, f := range in.Serves() {
		functions = append(functions, f.Proto())
	}
	// Bazel rejects priorities outside the range, and all priorities if no range is given.
	priorities := &repb.PriorityCapabilities{Priorities: []*repb.PriorityCapabilities_PriorityRange{
		{MinPriority: math.MinInt32, MaxPriority: math.MaxInt32},
	}}
	c := &repb.ServerCapabilities{
		DeprecatedApiVersion: &semver.SemVer{Major: 2, Minor: 0},
		LowApiVersion:        &semver.SemVer{Major: 2, Minor: 0},
		HighApiVersion:       &semver.SemVer{Major: 2, Minor: 13},
		CacheCapabilities: &repb.CacheCapabilities{
			DigestFunctions:                 functions,
			ActionCacheUpdateCapabilities:   &repb.ActionCacheUpdateCapabilities{UpdateEnabled: update},
			CachePriorityCapabilities:       priorities,
			MaxBatchTotalSizeBytes:          maxBatch,
			SymlinkAbsolutePathStrategy:     repb.SymlinkAbsolutePathStrategy_ALLOWED,
			SupportedCompressors:            compress.Compressors(),
			SupportedBatchUpdateCompressors: compress.Compressors(),
		},
	}
	if _, ok := cas.As[cas.Splicer](in.Store); ok {
		setChunking(c.CacheCapabilities)
	}
	if s.MaxBlobBytes < math.MaxInt64 {
		c.CacheCapabilities.MaxCasBlobSizeBytes = s.MaxBlobBytes
	}
	if s.Execution != nil {
		x := proto.CloneOf(s.Execution)
		x.ExecEnabled = x.ExecEnabled && execute
		x.DigestFunction, x.DigestFunctions = functions[0], functions
		if x.ExecutionPriorityCapabilities == nil {
			x.ExecutionPriorityCapabilities = priorities
		}
		c.ExecutionCapabilities = x
	}
	return c, nil
}
