// SPDX-License-Identifier: Apache-2.0

package casserver_test

import (
	"context"
	"fmt"
	"io"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/casserver"
	"github.com/cloister-build/cloister/cas/castest"
	"github.com/cloister-build/cloister/cas/castest/faulty"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"
)

// tree returns the pages of a tree.
func (c *client) tree(ctx context.Context, req *repb.GetTreeRequest) ([]*repb.GetTreeResponse, error) {
	stream, err := c.GetTree(ctx, req)
	if err != nil {
		return nil, err
	}
	var pages []*repb.GetTreeResponse
	for {
		page, err := stream.Recv()
		if err == io.EOF {
			return pages, nil
		} else if err != nil {
			return pages, err
		}
		pages = append(pages, page)
	}
}

// directory stores a Directory with a file and subdirectories.
func (c *client) directory(t *testing.T, file string, subs ...cas.Digest) cas.Digest {
	t.Helper()
	dir := &repb.Directory{Files: []*repb.FileNode{{Name: file, Digest: sum(file).Proto()}}}
	for i, d := range subs {
		dir.Directories = append(dir.Directories, &repb.DirectoryNode{Name: fmt.Sprintf("d%06d", i), Digest: d.Proto()})
	}
	return must.Get(cas.PutProto(t.Context(), c.memory(t, ""), cas.SHA256, dir))(t)
}

// files returns the sorted names of the files in pages.
func files(pages []*repb.GetTreeResponse) []string {
	var names []string
	for _, p := range pages {
		for _, d := range p.Directories {
			names = append(names, d.Files[0].Name)
		}
	}
	slices.Sort(names)
	return names
}

func TestRule034_GetTree(t *testing.T) {
	c := serve(t, casserver.Config{})
	a, b := c.directory(t, "a"), c.directory(t, "b")
	mid := c.directory(t, "m", a, b, a)
	gone := c.directory(t, "gone", b)
	root := c.directory(t, "r", mid, gone, b)
	c.memory(t, "").Delete(gone)
	all := []string{"a", "b", "m", "r"}

	t.Run("root that is not a Directory", func(t *testing.T) {
		_, err := c.tree(t.Context(), &repb.GetTreeRequest{RootDigest: c.put(t, "\xff\xff").Proto()})
		wantCode(t, err, codes.InvalidArgument)
	})
	t.Run("pages and resumption", func(t *testing.T) {
		for size := range int32(6) {
			pages := must.Get(c.tree(t.Context(), &repb.GetTreeRequest{RootDigest: root.Proto(), PageSize: size}))(t)
			expect.Slices(t, files(pages), all, "page size %d", size)
			for i, page := range pages {
				expect.That(t, size <= 0 || len(page.Directories) <= int(size),
					"page size %d: page %d has %d Directories", size, i, len(page.Directories))
				if last := i == len(pages)-1; last != (page.NextPageToken == "") {
					t.Errorf("page size %d: page %d of %d has the next token %q", size, i, len(pages), page.NextPageToken)
				} else if last {
					continue
				}
				rest, err := c.tree(t.Context(), &repb.GetTreeRequest{
					RootDigest: root.Proto(), PageSize: size, PageToken: page.NextPageToken,
				})
				must.Succeed(t, err)
				expect.That(t, slices.EqualFunc(rest, pages[i+1:], func(a, b *repb.GetTreeResponse) bool { return proto.Equal(a, b) }),
					"page size %d: resumed after page %d, got %v, want %v", size, i, rest, pages[i+1:])
			}
		}
	})
	t.Run("resumption at a page whose first Directory was deleted", func(t *testing.T) {
		late := c.directory(t, "late")
		root := c.directory(t, "r", a, b, late, mid)
		pages, err := c.tree(t.Context(), &repb.GetTreeRequest{RootDigest: root.Proto(), PageSize: 3})
		must.Be(t, err == nil && pages[0].NextPageToken == late.String(), "got %v, %v", pages, err)
		c.memory(t, "").Delete(late)
		rest, err := c.tree(t.Context(), &repb.GetTreeRequest{RootDigest: root.Proto(), PageToken: late.String()})
		if got := files(rest); err != nil || !slices.Equal(got, []string{"m"}) {
			t.Errorf("got %v, %v", got, err)
		}
	})
	t.Run("token of another tree", func(t *testing.T) {
		for _, token := range []string{"nonsense", sum("elsewhere").String(), strings.Repeat("x", 1<<20)} {
			_, err := c.tree(t.Context(), &repb.GetTreeRequest{RootDigest: root.Proto(), PageToken: token})
			wantCode(t, err, codes.InvalidArgument, "page_token")
		}
	})
}

func TestRule035_GetTreeRejectsDirectoryAboveMessageLimit(t *testing.T) {
	c := serve(t, casserver.Config{})
	for size, want := range map[int]codes.Code{4<<20 - 4096: codes.OK, 4 << 20: codes.ResourceExhausted} {
		dir := &repb.Directory{}
		for n := 0; n < size; n = proto.Size(dir) {
			for range min(1000, (size-n)/4000+1) {
				dir.Symlinks = append(dir.Symlinks, &repb.SymlinkNode{
					Name: fmt.Sprintf("%08d", len(dir.Symlinks)), Target: strings.Repeat("x", min(4000, max(1, size-n-20))),
				})
			}
		}
		d, err := cas.PutProto(t.Context(), c.memory(t, ""), cas.SHA256, dir)
		must.Succeed(t, err)
		_, err = c.tree(t.Context(), &repb.GetTreeRequest{RootDigest: d.Proto()})
		if want == codes.OK && err != nil {
			t.Errorf("%d bytes: %v", proto.Size(dir), err)
		} else if want != codes.OK {
			wantCode(t, err, want, d.String())
		}
	}
}

// TestIdleListsEnd: calls that keep a list in memory while they wait for their client end if the client is silent.
func TestIdleListsEnd(t *testing.T) {
	ended := make(chan struct{}, 2)
	c := serveWith(t, casserver.Config{StreamIdle: 100 * time.Millisecond}, grpc.StreamInterceptor(
		func(srv any, s grpc.ServerStream, _ *grpc.StreamServerInfo, next grpc.StreamHandler) error {
			defer func() { ended <- struct{}{} }()
			return next(srv, s)
		}))
	var subs []cas.Digest
	for i := range 10_000 { // more than the buffers of a call hold
		subs = append(subs, c.directory(t, fmt.Sprint(i, strings.Repeat("x", 100))))
	}
	root := c.directory(t, "root", subs...)
	tree := must.Get(c.GetTree(t.Context(), &repb.GetTreeRequest{RootDigest: root.Proto(), PageSize: 100}))(t)
	<-ended
	var err error
	for err == nil {
		_, err = tree.Recv()
	}
	wantCode(t, err, codes.Unavailable, "silent for 100ms", "retry")
	c.await(t, casserver.Trees, 0, 0)
	register := must.Get(c.RegisterChunkMapping(t.Context()))(t)
	must.Succeed(t, register.Send(&repb.RegisterChunkMappingRequest{
		BlobDigest: sum("12345678").Proto(), ChunkDigests: []*repb.Digest{sum("1234").Proto()},
	}))
	wantCode(t, register.RecvMsg(&repb.RegisterChunkMappingResponse{}), codes.Unavailable, "silent for 100ms", "retry")
}

// TestConcurrentTreesAreLimited: calls beyond the limits wait instead of failing, and those of one caller do not delay
// other callers.
func TestConcurrentTreesAreLimited(t *testing.T) {
	m := faulty.New(castest.NewMemory(), nil)
	c := serveWith(t, casserver.Config{Instances: instances(m, nil)}, callers()...)
	root := must.Get(cas.PutProto(t.Context(), m, cas.SHA256, &repb.Directory{Symlinks: []*repb.SymlinkNode{{Name: "l", Target: "t"}}}))(t)
	gate := m.Hold(faulty.Open)
	const of, atOnce, atOnceForOne, each = 9, 256, 32, 33
	done := make(chan error, of*each)
	for caller := range of {
		for range each {
			go func() {
				_, err := c.tree(as(t.Context(), fmt.Sprint(caller)), &repb.GetTreeRequest{RootDigest: root.Proto()})
				done <- err
			}()
		}
		for range min(atOnceForOne, atOnce-m.Calls(faulty.Open)) {
			gate.Arrived()
		}
		c.await(t, casserver.Trees, caller+1, (caller+1)*each)
		expect.Equal(t, m.Calls(faulty.Open), min(atOnce, (caller+1)*atOnceForOne), "trees are read at once")
	}
	gate.Open()
	for range of * each {
		expect.Error(t, <-done, nil)
	}
	c.await(t, casserver.Trees, 0, 0)
}

// A remoteStore checks that each Directory is fetched before it is opened.
type remoteStore struct {
	cas.Store
	t       *testing.T
	mu      sync.Mutex
	fetched map[cas.Digest]bool // guarded by mu
	calls   int                 // guarded by mu
}

func (s *remoteStore) Fetch(_ context.Context, ds []cas.Digest) ([]cas.Digest, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.calls++
	for _, d := range ds {
		s.fetched[d] = true
	}
	return nil, nil
}

func (s *remoteStore) Open(ctx context.Context, d cas.Digest, off int64) (io.ReadCloser, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.fetched[d] {
		s.t.Errorf("%s opened before it was fetched", d)
	}
	return s.Store.Open(ctx, d, off)
}

func TestRule035_GetTreeFetchesManyDirectoriesAtOnce(t *testing.T) {
	memory := castest.NewMemory()
	store := &remoteStore{Store: memory, t: t, fetched: map[cas.Digest]bool{}}
	c := serve(t, casserver.Config{Instances: func(string) (*cas.Instance, error) {
		return &cas.Instance{Store: store, Actions: memory}, nil
	}})
	put := func(dir *repb.Directory) *repb.Digest {
		d := must.Get(cas.PutProto(t.Context(), memory, cas.SHA256, dir))(t)
		return d.Proto()
	}
	root := &repb.Directory{}
	for i := range 3000 {
		leaf := put(&repb.Directory{Symlinks: []*repb.SymlinkNode{{Name: "l", Target: fmt.Sprint(i)}}})
		root.Directories = append(root.Directories, &repb.DirectoryNode{Name: fmt.Sprintf("%05d", i), Digest: leaf})
	}
	pages := must.Get(c.tree(t.Context(), &repb.GetTreeRequest{RootDigest: put(root)}))(t)
	n := 0
	for _, p := range pages {
		n += len(p.Directories)
	}
	expect.That(t, n == 3001 && store.calls <= 5,
		"got %d Directories in %d calls, want 3001 in at most 5", n, store.calls)
}
