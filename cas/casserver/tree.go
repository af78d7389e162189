// SPDX-License-Identifier: Apache-2.0

package casserver

import (
	"context"
	"errors"
	"fmt"
	"slices"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/casstatus"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
)

// maxTrees limits concurrent walks of trees, and maxCallerTrees those of one caller; the others wait. They are not
// refused, because some clients do not repeat a refused GetTree.
const (
	maxTrees       = 256
	maxCallerTrees = 32
)

// Limits of one tree walk.
const (
	// treeBatch is the number of Directories fetched at once.
	treeBatch = 1000
	// maxTree limits the distinct Directories of a tree, each of which takes about 150 bytes.
	maxTree = 1_000_000
	// maxDirectory limits the size of a Directory in bytes. It leaves room for the page token in a message.
	maxDirectory = maxMessage - 1024
)

// GetTree sends the Directories below a root in breadth-first order, each once, without absent ones. A page token is
// the digest of the first Directory of its page. The walk order is deterministic, so a repeated walk resumes there and
// never finds a token of another tree.
func (s *storage) GetTree(req *repb.GetTreeRequest, stream grpc.ServerStreamingServer[repb.GetTreeResponse]) error {
	in, err := s.Instances(req.InstanceName)
	if err != nil {
		return casstatus.Error(err)
	}
	root, err := digest(in, req.DigestFunction, req.RootDigest)
	if err != nil {
		return casstatus.Error(err)
	}
	if req.PageSize < 0 {
		return status.Errorf(codes.InvalidArgument, "page_size %d is negative", req.PageSize)
	}
	release, err := s.trees.acquire(stream.Context())
	if err != nil {
		return casstatus.Error(err)
	}
	return s.uploads.watch(stream, s.StreamIdle, func(w *watched) error {
		defer release()
		to := &grpc.GenericServerStream[repb.GetTreeRequest, repb.GetTreeResponse]{ServerStream: w}
		return s.sendTree(in, root, req, to)
	})
}

// sendTree sends the Directories that a checked request selects.
func (s *storage) sendTree(
	in *cas.Instance, root cas.Digest, req *repb.GetTreeRequest, stream grpc.ServerStreamingServer[repb.GetTreeResponse],
) error {
	p := pager{stream: stream, limit: int(req.PageSize), page: &repb.GetTreeResponse{}}
	skipping := req.PageToken != ""
	err := s.walk(stream.Context(), in, root, func(d cas.Digest, dir *repb.Directory) error {
		if skipping && d.String() != req.PageToken {
			return nil
		}
		skipping = false
		if dir == nil {
			return nil
		}
		return p.add(d, dir)
	})
	switch {
	case err != nil:
		return casstatus.Error(err)
	case skipping:
		return status.Errorf(codes.InvalidArgument, "page_token %+.80q does not belong to tree %s", req.PageToken, root)
	}
	return stream.Send(p.page)
}

// walk calls f with root and each Directory below it in breadth-first order, with nil for absent ones.
func (s *storage) walk(
	ctx context.Context, in *cas.Instance, root cas.Digest, f func(cas.Digest, *repb.Directory) error,
) error {
	todo, seen := []cas.Digest{root}, map[cas.Digest]bool{root: true}
	fetched := 0 // prefix of todo that has been fetched
	for len(todo) > 0 {
		if fetched == 0 {
			fetched = min(len(todo), treeBatch)
			if err := fetchDirectories(ctx, in.Store, todo[:fetched]); err != nil {
				return err
			}
		}
		d := todo[0]
		todo, fetched = todo[1:], fetched-1
		dir := &repb.Directory{}
		if err := cas.ReadProto(ctx, in.Store, d, dir); errors.Is(err, cas.ErrNotFound) && d != root {
			dir = nil
		} else if err != nil {
			return s.explain("tree: read directory", d, err)
		}
		for _, sub := range dir.GetDirectories() {
			sd, err := cas.FromProto(d.Function(), sub.Digest)
			if err != nil {
				return s.explain("tree: directory", d, err)
			}
			if seen[sd] {
				continue
			}
			if len(seen) == maxTree {
				return fmt.Errorf("%w: tree %s has more than %d directories", cas.ErrInvalid, root, maxTree)
			}
			seen[sd] = true
			todo = append(todo, sd)
		}
		if err := f(d, dir); err != nil {
			return err
		}
	}
	return nil
}

// fetchDirectories prefetches Directories if the store supports it, except those too large to read.
func fetchDirectories(ctx context.Context, s cas.Store, ds []cas.Digest) error {
	if _, ok := cas.As[cas.Fetcher](s); !ok {
		return nil
	}
	small := slices.DeleteFunc(slices.Clone(ds), func(d cas.Digest) bool { return d.Size() > cas.MaxMessage })
	return cas.Fetch(ctx, s, small)
}

// A pager groups Directories into pages.
type pager struct {
	stream grpc.ServerStreamingServer[repb.GetTreeResponse]
	limit  int // Directories per page; 0 means no limit
	page   *repb.GetTreeResponse
	bytes  int // size of page
}

// add adds dir, the Directory with digest d, after sending the page if it is full.
func (p *pager) add(d cas.Digest, dir *repb.Directory) error {
	size := proto.Size(dir) + 8 // including framing
	if size > maxDirectory {
		return status.Errorf(codes.ResourceExhausted, "Directory %s has %d bytes, limit %d; read it as a blob",
			d, size, maxDirectory)
	}
	full := p.bytes+size > maxReply || p.limit > 0 && len(p.page.Directories) >= p.limit
	if full && len(p.page.Directories) > 0 {
		p.page.NextPageToken = d.String()
		if err := p.stream.Send(p.page); err != nil {
			return err
		}
		p.page, p.bytes = &repb.GetTreeResponse{}, 0
	}
	p.page.Directories = append(p.page.Directories, dir)
	p.bytes += size
	return nil
}
