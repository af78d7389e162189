// SPDX-License-Identifier: Apache-2.0

package localworker

import (
	"context"
	"fmt"
	"log/slog"
	"math"
	"slices"
	"strings"
	"sync"
	"testing"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/casserver"
	"github.com/cloister-build/cloister/cas/castest"
	"github.com/cloister-build/cloister/cas/disk"
	"github.com/cloister-build/cloister/cmd/cloister/internal/client"
	"github.com/cloister-build/cloister/cmd/cloister/internal/confinement"
	"github.com/cloister-build/cloister/cmd/internal/flags"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/grpctest"
	"github.com/cloister-build/cloister/tests/must"
	bspb "google.golang.org/genproto/googleapis/bytestream"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"
)

// A boaster is a server that claims to have every blob, and remembers which ones it was asked to send.
type boaster struct {
	address string
	store   cas.Store

	mu   sync.Mutex
	sent []string // as hash/size or as the name of a resource
}

func boast(t *testing.T) *boaster {
	t.Helper()
	instances := castest.Instances()
	b := &boaster{store: must.Get(instances(""))(t).Store}
	options := append(casserver.ServerOptions(slog.New(slog.DiscardHandler)),
		grpc.ChainUnaryInterceptor(func(ctx context.Context, req any, _ *grpc.UnaryServerInfo, next grpc.UnaryHandler) (any, error) {
			switch m := req.(type) {
			case *repb.FindMissingBlobsRequest:
				return &repb.FindMissingBlobsResponse{}, nil
			case *repb.BatchReadBlobsRequest:
				for _, d := range m.Digests {
					b.remember(fmt.Sprintf("%s/%d", d.Hash, d.SizeBytes))
				}
			}
			return next(ctx, req)
		}),
		grpc.ChainStreamInterceptor(func(srv any, stream grpc.ServerStream, _ *grpc.StreamServerInfo, next grpc.StreamHandler) error {
			return next(srv, &overheard{stream, b})
		}))
	g := grpc.NewServer(options...)
	casserver.Register(g, casserver.Config{Instances: instances})
	b.address = "grpc://" + grpctest.Listen(t, g)
	return b
}

func (b *boaster) remember(what string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.sent = append(b.sent, what)
}

// asked reports whether the server was asked to send the blob.
func (b *boaster) asked(d *repb.Digest) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return slices.ContainsFunc(b.sent, func(s string) bool { return strings.HasSuffix(s, fmt.Sprintf("%s/%d", d.Hash, d.SizeBytes)) })
}

// overheard is a stream whose requests are remembered.
type overheard struct {
	grpc.ServerStream
	b *boaster
}

func (o *overheard) RecvMsg(m any) error {
	err := o.ServerStream.RecvMsg(m)
	if r, ok := m.(*bspb.ReadRequest); ok && err == nil {
		o.b.remember(r.ResourceName)
	}
	return err
}

// put stores a message.
func (b *boaster) put(t *testing.T, m proto.Message) *repb.Digest {
	t.Helper()
	return must.Get(cas.PutProto(t.Context(), b.store, cas.SHA256, m))(t).Proto()
}

// stated returns the digest of a missing blob with a claimed size.
func stated(n int, size int64) *repb.Digest {
	return &repb.Digest{Hash: fmt.Sprintf("%064x", n), SizeBytes: size}
}

// TestHostileTreesAreNotFetched: large claimed sizes are rejected before the blobs are requested.
func TestHostileTreesAreNotFetched(t *testing.T) {
	b := boast(t)
	huge := stated(1, cas.MaxMessage+1)
	command, empty := b.put(t, &repb.Command{Arguments: []string{"true"}}), b.put(t, &repb.Directory{})
	action := func(root *repb.Digest) *repb.Digest {
		return b.put(t, &repb.Action{CommandDigest: command, InputRootDigest: root})
	}
	// files is a Directory of files of these sizes.
	files := func(sizes ...int64) *repb.Digest {
		var dir repb.Directory
		for i, size := range sizes {
			dir.Files = append(dir.Files, &repb.FileNode{Name: fmt.Sprint(i), Digest: stated(2+i, size)})
		}
		return b.put(t, &dir)
	}
	// many is a root with n directories of 170,000 nodes that differ.
	many := func(n int, add func(dir *repb.Directory, node int)) *repb.Digest {
		var root repb.Directory
		for i := range n {
			var dir repb.Directory
			for j := range 170_000 {
				add(&dir, 1_000_000+i*170_000+j)
			}
			root.Directories = append(root.Directories, &repb.DirectoryNode{Name: fmt.Sprint(i), Digest: b.put(t, &dir)})
		}
		return b.put(t, &root)
	}
	const most = 100 << 20
	for _, c := range []struct {
		name   string
		action *repb.Digest
		never  *repb.Digest // must not be requested
		want   []string
	}{
		{"an Action", huge, huge, []string{"Action", "16777217 bytes", "at most 16777216"}},
		{"a Command", b.put(t, &repb.Action{CommandDigest: huge, InputRootDigest: empty}), huge, []string{"Command", "16777217 bytes"}},
		{"an input root", action(huge), huge, []string{"Directory", "16777217 bytes"}},
		{"a Directory", action(b.put(t, &repb.Directory{Directories: []*repb.DirectoryNode{{Name: "a", Digest: huge}}})), huge, []string{"Directory", "16777217 bytes"}},
		{"a file", action(files(most + 1)), stated(2, most+1), []string{"104857600 bytes) are permitted"}},
		{"files together", action(files(most/2, most/2)), stated(2, most/2), []string{"(104869888 bytes) or more, and 100.0 MiB (104857600 bytes) are permitted"}},
		{"files beyond all numbers", action(files(math.MaxInt64, math.MaxInt64, 1)), stated(2, math.MaxInt64), []string{"(9223372036854775807 bytes) or more"}},
		{"directories together", action(b.put(t, &repb.Directory{Directories: []*repb.DirectoryNode{
			{Name: "a", Digest: stated(2, 15<<20)},
			{Name: "b", Digest: stated(3, 15<<20)},
			{Name: "c", Digest: stated(4, 15<<20)},
			{Name: "d", Digest: stated(5, 15<<20)},
			{Name: "e", Digest: stated(6, 15<<20)},
			{Name: "f", Digest: stated(7, 15<<20)},
			{Name: "g", Digest: stated(8, 15<<20)},
		}})), stated(2, 15<<20), []string{"104857600 bytes) are permitted"}},
		{"many directories", action(many(2, func(dir *repb.Directory, node int) {
			dir.Directories = append(dir.Directories, &repb.DirectoryNode{Digest: stated(node, 100)})
		})), stated(1_000_000, 100), []string{"340003 directories", "at most 200000"}},
		{"many files", action(many(6, func(dir *repb.Directory, node int) {
			dir.Files = append(dir.Files, &repb.FileNode{Digest: stated(node, 1)})
		})), stated(1_000_000, 1), []string{"1020000 distinct files", "and 1000000 are permitted"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			to := must.Get(disk.Open(disk.Config{Dir: t.TempDir(), MaxBytes: math.MaxInt64}))(t)
			defer to.Close()
			digest := must.Get(cas.FromProto(cas.SHA256, c.action))(t)
			_, err := fetch(t.Context(), to, most, &client.Server{Address: b.address}, digest)
			for _, want := range c.want {
				expect.Message(t, err, want)
			}
			expect.That(t, !b.asked(c.never), "blob %v was asked for", c.never)
		})
	}
}

// TestFetchAcceptsTheLimit: inputs that exactly fit are fetched.
func TestFetchAcceptsTheLimit(t *testing.T) {
	b := boast(t)
	blob, large := castest.Blob(1, 100_000)
	must.Succeed(t, b.store.Put(t.Context(), large, strings.NewReader(string(blob))))
	root := b.put(t, &repb.Directory{Files: []*repb.FileNode{{Name: "a", Digest: large.Proto()}, {Name: "b", Digest: large.Proto()}}})
	action, err := cas.FromProto(cas.SHA256, b.put(t, &repb.Action{CommandDigest: b.put(t, &repb.Command{Arguments: []string{"true"}}), InputRootDigest: root}))
	must.Succeed(t, err)
	const needed = 3*4096 + 25*4096 // three messages and one file
	for _, most := range []int64{needed, needed - 1} {
		to := must.Get(disk.Open(disk.Config{Dir: t.TempDir(), MaxBytes: math.MaxInt64}))(t)
		defer to.Close()
		if _, err := fetch(t.Context(), to, most, &client.Server{Address: b.address}, action); (err == nil) != (most == needed) {
			t.Errorf("%d bytes: %v", most, err)
		}
	}
}

// TestFetchTakesAFifthOfTheDisk, whatever size a server claims for the inputs.
func TestFetchTakesAFifthOfTheDisk(t *testing.T) {
	size := must.Get(flags.DiskBytes(t.TempDir()))(t)
	t.Setenv("TMPDIR", t.TempDir())
	b := boast(t)
	root := b.put(t, &repb.Directory{Files: []*repb.FileNode{{Name: "a", Digest: stated(1, math.MaxInt64)}}})
	action, err := cas.FromProto(cas.SHA256, b.put(t, &repb.Action{CommandDigest: b.put(t, &repb.Command{Arguments: []string{"true"}}), InputRootDigest: root}))
	must.Succeed(t, err)
	w := must.Get(Open(&confinement.Flags{Tier: "full"}))(t)
	defer w.Close()
	_, err = w.Fetch(t.Context(), &client.Server{Address: b.address}, action)
	if want := fmt.Sprintf("(%d bytes) are permitted: a fifth of the disk", size/5); err == nil || !strings.Contains(err.Error(), want) {
		t.Errorf("got %v, want %q", err, want)
	}
}
