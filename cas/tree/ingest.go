// SPDX-License-Identifier: Apache-2.0

package tree

import (
	"context"
	"errors"
	"fmt"
	"os"

	"github.com/cloister-build/cloister/cas"
)

// errNoDirectory is the error of a call without a directory.
var errNoDirectory = errors.New("tree: the directory is nil")

// Ingest stores the directory dir as an input root and returns its digest. It keeps symlinks unchanged, even if they
// dangle. A special file, a name that is not UTF-8 or more than 1,000,000 entries are cas.ErrInvalid. Nobody may change
// dir meanwhile.
func Ingest(ctx context.Context, store cas.Store, f cas.Function, dir *os.Root) (cas.Digest, error) {
	switch {
	case store == nil:
		return cas.Digest{}, errNoStore
	case dir == nil:
		return cas.Digest{}, errNoDirectory
	case f == 0:
		return cas.Digest{}, fmt.Errorf("%w: no digest function", cas.ErrInvalid)
	}
	s := &scanner{root: dir, limit: noLimit}
	dirs, err := s.scan(ctx, ".", &directory{})
	if err != nil {
		return cas.Digest{}, err
	}
	b := cas.NewBatch(store)
	if err := s.put(ctx, b, f); err != nil {
		return cas.Digest{}, err
	}
	blobs, err := encodeAll(f, dirs)
	if err != nil {
		return cas.Digest{}, err
	}
	if err := s.putDirectories(ctx, b, blobs); err != nil {
		return cas.Digest{}, err
	}
	return dirs[0].digest, b.Flush(ctx)
}
