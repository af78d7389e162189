// SPDX-License-Identifier: Apache-2.0

package casserver

import (
	"context"
	"errors"
	"fmt"
	"slices"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
)

// Of one walk of a tree.
const (
	// treeBatch is how many Directories come near at once.
	treeBatch = 1000
	// maxTree is how many Directories that differ are sent, each of which costs some 150 bytes here.
	maxTree = 1_000_000
	// maxDirectory is the size of the largest that is sent, in bytes: what clients take in one message is 4 MiB, and there
	// is a token in it, too.
	maxDirectory = 4<<20 - 1024
)

// GetTree sends the Directories below a root, each once, parents before what only they hold, and
// leaves out those that are absent. A page token is the digest of the Directory that its page begins
// with: the walk, which is the same each time, resumes there, and never gets there with a token of
// another tree.
func (s *storage) GetTree(req *repb.GetTreeRequest, stream grpc.ServerStreamingServer[repb.GetTreeResponse]) error {
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
	p := pager{stream: stream, most: int(req.PageSize), page: &repb.GetTreeResponse{}}
	skipping := req.PageToken != ""
	err = walk(stream.Context(), in, root, func(d cas.Digest, dir *repb.Directory) error {
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
		return cas.Status(err)
	case skipping:
		return status.Errorf(codes.InvalidArgument, "page_token %+.80q is of no page of the tree %s", req.PageToken, root)
	}
	return stream.Send(p.page)
}

// walk calls f with root and each Directory below, a level after the other: with nil for one that is absent.
func walk(ctx context.Context, in *cas.Instance, root cas.Digest, f func(cas.Digest, *repb.Directory) error) error {
	todo, seen := []cas.Digest{root}, map[cas.Digest]bool{root: true}
	near := 0 // how many of todo
	for len(todo) > 0 {
		if near == 0 {
			near = min(len(todo), treeBatch)
			if err := fetch(ctx, in.Store, todo[:near]); err != nil {
				return err
			}
		}
		d := todo[0]
		todo, near = todo[1:], near-1
		dir := &repb.Directory{}
		if err := cas.ReadProto(ctx, in.Store, d, dir); errors.Is(err, cas.ErrNotFound) && d != root {
			dir = nil
		} else if err != nil {
			return explain("tree: read directory", d, err)
		}
		for _, sub := range dir.GetDirectories() {
			sd, err := cas.FromProto(d.Function(), sub.Digest)
			if err != nil {
				return explain("tree: directory", d, err)
			}
			if seen[sd] {
				continue
			}
			if len(seen) == maxTree {
				return fmt.Errorf("%w: the tree %s has more than %d directories", cas.ErrInvalid, root, maxTree)
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

// fetch brings Directories near, where the store is far. One too large to be read is not worth it.
func fetch(ctx context.Context, s cas.Store, ds []cas.Digest) error {
	if _, ok := cas.As[cas.Fetcher](s); !ok {
		return nil
	}
	small := slices.DeleteFunc(slices.Clone(ds), func(d cas.Digest) bool { return d.Size() > cas.MaxMessage })
	return cas.Fetch(ctx, s, small)
}

// A pager sends Directories in pages.
type pager struct {
	stream grpc.ServerStreamingServer[repb.GetTreeResponse]
	most   int // of a page; 0 is any number
	page   *repb.GetTreeResponse
	bytes  int // of page
}

// add adds dir, which d names, and sends the page before it if that is full.
func (p *pager) add(d cas.Digest, dir *repb.Directory) error {
	size := proto.Size(dir) + 8 // with its framing
	if size > maxDirectory {
		return status.Errorf(codes.ResourceExhausted, "Directory %s has %d bytes, and a message of GetTree has at most %d: read it as a blob",
			d, size, maxDirectory)
	}
	full := p.bytes+size > maxReply || p.most > 0 && len(p.page.Directories) >= p.most
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
