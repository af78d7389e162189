// SPDX-License-Identifier: Apache-2.0

package blobs

import (
	"context"
	"errors"
	"io"
	"os"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/tree"
	"github.com/cloister-build/cloister/cmd/cloister/internal/terminal"
)

// Upload stores the file or directory at path, or stdin for "-". It shows the progress of a file on line, which may be
// nil.
func Upload(ctx context.Context, to cas.Store, f cas.Function, path string, stdin io.Reader, line *terminal.Progress) (cas.Digest, error) {
	if path == "-" {
		return uploadStream(ctx, to, f, stdin, line)
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
	return uploadFile(ctx, to, f, file, line)
}

// uploadFile stores a file, unless the store has it.
func uploadFile(ctx context.Context, to cas.Store, f cas.Function, file *os.File, line *terminal.Progress) (cas.Digest, error) {
	d, err := f.SumSeeker(file)
	if err != nil {
		return d, err
	}
	missing, err := to.Missing(ctx, []cas.Digest{d})
	if err != nil || len(missing) == 0 {
		return d, err
	}
	defer line.Clear()
	return d, to.Put(ctx, d, line.Track(file, d.Size()))
}

// uploadStream stores a stream by way of a file, because a blob's digest precedes its bytes.
func uploadStream(ctx context.Context, to cas.Store, f cas.Function, r io.Reader, line *terminal.Progress) (cas.Digest, error) {
	file, err := os.CreateTemp("", "cloister-put-*")
	if err != nil {
		return cas.Digest{}, err
	}
	defer os.Remove(file.Name())
	defer file.Close()
	if _, err := io.Copy(file, r); err != nil {
		return cas.Digest{}, err
	}
	return uploadFile(ctx, to, f, file, line)
}
