// SPDX-License-Identifier: Apache-2.0

package tree

import (
	"context"
	"os"

	"github.com/cloister-build/cloister/cas"
)

// Ingest stores the directory dir as an input root and returns its digest. It keeps symlinks unchanged, even if they
// dangle. A special file, a name that is not UTF-8 or more than 1,000,000 entries are cas.ErrInvalid. Nobody may change
// dir meanwhile.
func Ingest(ctx context.Context, store cas.Store, f cas.Function, dir *os.Root) (cas.Digest, error) {
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
