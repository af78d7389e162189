// SPDX-License-Identifier: Apache-2.0

package blobs

import (
	"context"
	"errors"
	"io"
	"os"
	"path/filepath"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/tree"
)

// Download writes a blob to path, by a rename.
func Download(ctx context.Context, from cas.Store, d cas.Digest, path string) error {
	r, err := from.Open(ctx, d, 0)
	if err != nil {
		return err
	}
	defer r.Close()
	file, err := os.CreateTemp(filepath.Dir(path), "."+filepath.Base(path)+"-*")
	if err != nil {
		return err
	}
	defer os.Remove(file.Name())
	_, err = io.Copy(file, r)
	if err == nil {
		err = file.Chmod(0o644)
	}
	if err = errors.Join(err, file.Close()); err != nil {
		return err
	}
	return os.Rename(file.Name(), path)
}

// DownloadDirectory writes what is in a directory below path. Message says that d names a Tree.
func DownloadDirectory(ctx context.Context, from cas.Store, d cas.Digest, message bool, path string) error {
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
	return tree.Extract(ctx, from, d.Function(), &repb.ActionResult{OutputDirectories: []*repb.OutputDirectory{o}}, dir)
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
