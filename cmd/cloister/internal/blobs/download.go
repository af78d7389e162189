// SPDX-License-Identifier: Apache-2.0

package blobs

import (
	"context"
	"errors"
	"io"
	"os"
	"sync/atomic"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/durable"
	"github.com/cloister-build/cloister/cas/memory"
	"github.com/cloister-build/cloister/cas/remote"
	"github.com/cloister-build/cloister/cas/tree"
)

// Download writes a blob to path, atomically.
func Download(ctx context.Context, from cas.Store, d cas.Digest, path string) error {
	r, err := from.Open(ctx, d, 0)
	if err != nil {
		return err
	}
	defer r.Close()
	return durable.WriteFunc(path, 0o644, func(file *os.File) error {
		_, err := io.Copy(file, r)
		return err
	})
}

// A batched store reads small blobs with few calls: those of the last Fetch are in memory.
type batched struct {
	*remote.Store
	fetched atomic.Pointer[memory.Store]
}

// Fetch implements cas.Fetcher.
func (b *batched) Fetch(ctx context.Context, ds []cas.Digest) ([]cas.Digest, error) {
	to := memory.New(0)
	absent, err := b.Store.Fetch(ctx, to, ds)
	b.fetched.Store(to)
	return absent, err
}

// Open implements cas.Store.
func (b *batched) Open(ctx context.Context, d cas.Digest, off int64) (io.ReadCloser, error) {
	if m := b.fetched.Load(); m != nil {
		if r, err := m.Open(ctx, d, off); !errors.Is(err, cas.ErrNotFound) {
			return r, err
		}
	}
	return b.Store.Open(ctx, d, off)
}

// DownloadDirectory writes the contents of a directory below path. If message is set, d names a Tree.
func DownloadDirectory(ctx context.Context, from *remote.Store, d cas.Digest, message bool, path string) error {
	if err := os.MkdirAll(path, 0o755); err != nil {
		return err
	}
	dir, err := os.OpenRoot(path)
	if err != nil {
		return err
	}
	defer dir.Close()
	o := &repb.OutputDirectory{RootDirectoryDigest: d.Proto()}
	if message {
		o = &repb.OutputDirectory{TreeDigest: d.Proto()}
	}
	return tree.Extract(ctx, &batched{Store: from}, d.Function(), &repb.ActionResult{OutputDirectories: []*repb.OutputDirectory{o}}, dir)
}

// Verify reads a blob to its end.
func Verify(ctx context.Context, from cas.Store, d cas.Digest) error {
	r, err := from.Open(ctx, d, 0)
	if err != nil {
		return err
	}
	_, err = io.Copy(io.Discard, r)
	return errors.Join(err, r.Close())
}
