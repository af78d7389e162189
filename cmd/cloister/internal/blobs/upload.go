// SPDX-License-Identifier: Apache-2.0

package blobs

import (
	"context"
	"errors"
	"io"
	"os"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/tree"
)

// Upload stores the file or directory at path, or stdin for "-".
func Upload(ctx context.Context, to cas.Store, f cas.Function, path string, stdin io.Reader) (cas.Digest, error) {
	if path == "-" {
		return uploadStream(ctx, to, f, stdin)
	}
	switch fi, err := os.Stat(path); { // opening a pipe would wait for its writer
	case err != nil:
		return cas.Digest{}, err
	case fi.IsDir():
		dir, err := os.OpenRoot(path)
		if err != nil {
			return cas.Digest{}, err
		}
		defer dir.Close()
		return tree.Ingest(ctx, to, f, dir)
	case !fi.Mode().IsRegular():
		return cas.Digest{}, errors.New("neither a file nor a directory; pipe it into cloister cas put -")
	}
	file, err := os.Open(path)
	if err != nil {
		return cas.Digest{}, err
	}
	defer file.Close()
	return uploadFile(ctx, to, f, file)
}

// uploadFile stores a file, unless the store has it.
func uploadFile(ctx context.Context, to cas.Store, f cas.Function, file *os.File) (cas.Digest, error) {
	d, err := f.SumSeeker(file)
	if err != nil {
		return d, err
	}
	missing, err := to.Missing(ctx, []cas.Digest{d})
	if err != nil || len(missing) == 0 {
		return d, err
	}
	return d, to.Put(ctx, d, file)
}

// uploadStream stores a stream by way of a file, because a blob's digest precedes its bytes.
func uploadStream(ctx context.Context, to cas.Store, f cas.Function, r io.Reader) (cas.Digest, error) {
	file, err := os.CreateTemp("", "cloister-put-*")
	if err != nil {
		return cas.Digest{}, err
	}
	defer os.Remove(file.Name())
	defer file.Close()
	if _, err := io.Copy(file, r); err != nil {
		return cas.Digest{}, err
	}
	return uploadFile(ctx, to, f, file)
}
