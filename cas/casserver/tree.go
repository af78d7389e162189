// SPDX-License-Identifier: Apache-2.0

package casserver

import (
	"errors"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
)

// GetTree sends the Directories below a root, each once, parents before what only they hold, and
// leaves out those that are absent. A page token is the digest of the Directory that its page begins
// with: the walk, which is the same each time, resumes there, and never gets there with a token of
// another tree.
func (s *storage) GetTree(req *repb.GetTreeRequest, stream grpc.ServerStreamingServer[repb.GetTreeResponse]) error {
	ctx := stream.Context()
	in, err := s.Instances(req.InstanceName)
	if err != nil {
		return cas.Status(err)
	}
	root, err := digest(in, req.DigestFunction, req.RootDigest)
	if err != nil {
		return cas.Status(err)
	}
	if req.PageSize < 0 {
		return status.Errorf(codes.InvalidArgument, "page_size is %d, below 0", req.PageSize)
	}
	page, pageBytes, skipping := &repb.GetTreeResponse{}, 0, req.PageToken != ""
	walk, seen := []cas.Digest{root}, map[cas.Digest]bool{root: true}
	for len(walk) > 0 {
		d := walk[0]
		walk = walk[1:]
		if skipping && d.String() == req.PageToken {
			skipping = false
		}
		dir := &repb.Directory{}
		if err := cas.ReadProto(ctx, in.Store, d, dir); errors.Is(err, cas.ErrNotFound) && d != root {
			continue
		} else if err != nil {
			return cas.Status(explain("tree: read directory", d, err))
		}
		for _, sub := range dir.Directories {
			sd, err := cas.FromProto(d.Function(), sub.Digest)
			if err != nil {
				return cas.Status(explain("tree: directory", d, err))
			}
			if !seen[sd] {
				seen[sd] = true
				walk = append(walk, sd)
			}
		}
		if skipping {
			continue
		}
		size := proto.Size(dir) + 8 // with its framing
		full := pageBytes+size > maxReply || req.PageSize > 0 && len(page.Directories) >= int(req.PageSize)
		if full && len(page.Directories) > 0 {
			page.NextPageToken = d.String()
			if err := stream.Send(page); err != nil {
				return err
			}
			page, pageBytes = &repb.GetTreeResponse{}, 0
		}
		page.Directories = append(page.Directories, dir)
		pageBytes += size
	}
	if skipping {
		return status.Errorf(codes.InvalidArgument, "page_token %+.80q is of no page of the tree %s", req.PageToken, root)
	}
	return stream.Send(page)
}
