// SPDX-License-Identifier: Apache-2.0

package blobs

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"sync/atomic"
	"testing"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/casserver"
	"github.com/cloister-build/cloister/cas/castest"
	"github.com/cloister-build/cloister/cas/remote"
	"github.com/cloister-build/cloister/cas/tree"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/grpctest"
	"github.com/cloister-build/cloister/tests/must"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
)

// TestDownloadTakesFewCalls: a directory with many small files takes fewer calls than files, and arrives unchanged; an
// absent file is still reported.
func TestDownloadTakesFewCalls(t *testing.T) {
	const files = 300
	instances := castest.Instances()
	in := must.Get(instances(""))(t)
	put := func(b []byte) cas.Digest {
		return must.Get(cas.PutBytes(t.Context(), in.Store, cas.SHA256, b))(t)
	}
	root := &repb.Directory{Files: []*repb.FileNode{{Name: "large", Digest: put(make([]byte, 3<<20)).Proto()}}}
	for i := range files {
		d := put(fmt.Appendf(nil, "file %d", i/2)) // each twice
		root.Files = append(root.Files, &repb.FileNode{Name: fmt.Sprintf("small%03d", i), Digest: d.Proto()})
	}
	absent := &repb.Directory{Files: slices.Concat(root.Files, []*repb.FileNode{{Name: "z", Digest: cas.SHA256.Sum([]byte("absent")).Proto()}})}
	var calls atomic.Int64
	at := grpctest.Serve(t, func(s *grpc.Server) {
		t.Cleanup(must.Get(casserver.Register(s, casserver.Config{Instances: instances}))(t))
	}, grpc.ChainUnaryInterceptor(func(ctx context.Context, req any, _ *grpc.UnaryServerInfo, next grpc.UnaryHandler) (any, error) {
		calls.Add(1)
		return next(ctx, req)
	}), grpc.ChainStreamInterceptor(func(srv any, s grpc.ServerStream, _ *grpc.StreamServerInfo, next grpc.StreamHandler) error {
		calls.Add(1)
		return next(srv, s)
	}))
	client := must.Get(remote.New("grpc://"+at, grpc.WithTransportCredentials(insecure.NewCredentials())))(t)
	defer client.Close()
	store := must.Get(client.Store(""))(t)
	digest := must.Get(cas.PutProto(t.Context(), in.Store, cas.SHA256, root))(t)
	dir := t.TempDir()
	must.Succeed(t, DownloadDirectory(t.Context(), store, digest, false, dir))
	for i := range files {
		got, err := os.ReadFile(filepath.Join(dir, fmt.Sprintf("small%03d", i)))
		if want := fmt.Sprintf("file %d", i/2); err != nil || string(got) != want {
			t.Errorf("file %d: got %q, %v, want %q", i, got, err, want)
		}
	}
	expect.Equal(t, must.Get(os.Stat(filepath.Join(dir, "large")))(t).Size(), 3<<20, "large")
	if n := calls.Load(); n > 20 {
		t.Errorf("got %d calls for %d files, want at most 20", n, files)
	}
	digest = must.Get(cas.PutProto(t.Context(), in.Store, cas.SHA256, absent))(t)
	err := DownloadDirectory(t.Context(), store, digest, false, t.TempDir())
	if missing, ok := errors.AsType[*tree.MissingError](err); !ok || len(missing.Blobs) != 1 {
		t.Errorf("an absent file: got %v, want a MissingError", err)
	}
}
