// SPDX-License-Identifier: Apache-2.0

package casserver

import (
	"context"
	"math"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/bazelbuild/remote-apis/build/bazel/semver"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/compress"
	"google.golang.org/protobuf/proto"
)

// capabilities is the Capabilities service.
type capabilities struct {
	repb.UnimplementedCapabilitiesServer
	Config
}

// GetCapabilities says what is served, for every instance the same but for the digest functions and for whether blobs are
// split and spliced, and what of it the caller may use. Version 2.0 is the lowest, since Bazel up to 6 speaks
// nothing else. SplitBlob and SpliceBlob, which end with 2.12, are served for those who speak no more than that.
func (s *capabilities) GetCapabilities(ctx context.Context, req *repb.GetCapabilitiesRequest) (*repb.ServerCapabilities, error) {
	in, err := s.Instances(req.InstanceName)
	if err != nil {
		return nil, cas.Status(err)
	}
	execute, update := true, true
	if s.Rights != nil {
		execute, update = s.Rights(ctx, req.InstanceName)
	}
	var functions []repb.DigestFunction_Value
	for _, f := range in.Serves() {
		functions = append(functions, f.Proto())
	}
	// Bazel refuses a priority outside the range, and any priority where there is no range.
	priorities := &repb.PriorityCapabilities{Priorities: []*repb.PriorityCapabilities_PriorityRange{
		{MinPriority: math.MinInt32, MaxPriority: math.MaxInt32},
	}}
	c := &repb.ServerCapabilities{
		DeprecatedApiVersion: &semver.SemVer{Major: 2, Minor: 0},
		LowApiVersion:        &semver.SemVer{Major: 2, Minor: 0},
		HighApiVersion:       &semver.SemVer{Major: 2, Minor: 13},
		CacheCapabilities: &repb.CacheCapabilities{
			DigestFunctions:               functions,
			ActionCacheUpdateCapabilities: &repb.ActionCacheUpdateCapabilities{UpdateEnabled: update && !s.ReadOnlyActions},
			CachePriorityCapabilities:     priorities,
			MaxBatchTotalSizeBytes:        s.MaxBatchBytes,
			SymlinkAbsolutePathStrategy:   repb.SymlinkAbsolutePathStrategy_ALLOWED,
			SupportedCompressors:          compress.Compressors(),

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
