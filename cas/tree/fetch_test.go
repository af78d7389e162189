// SPDX-License-Identifier: Apache-2.0

package tree_test

import (
	"bytes"
	"context"
	"errors"
	"slices"
	"testing"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/castest"
	"github.com/cloister-build/cloister/cas/tree"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
)

// A fetcher is a local store with an upstream. It serves only fetched blobs, and records the calls of Fetch.
type fetcher struct {
	*castest.Memory
	upstream *castest.Memory
	fetched  [][]cas.Digest
	err      error
}

func (s *fetcher) Fetch(ctx context.Context, ds []cas.Digest) ([]cas.Digest, error) {
	s.fetched = append(s.fetched, ds)
	for _, d := range ds {
		b, err := cas.ReadAll(ctx, s.upstream, d, d.Size())
		if errors.Is(err, cas.ErrNotFound) {
			continue
		}
		if err := errors.Join(err, s.Put(ctx, d, bytes.NewReader(b))); err != nil {
			return nil, err
		}
	}
	return nil, s.err
}

func (s *fetcher) Missing(ctx context.Context, ds []cas.Digest) ([]cas.Digest, error) {
	return s.upstream.Missing(ctx, ds)
}

// TestFetchBatchesBlobs checks that each level of Directories takes one call, and all files another.
func TestFetchBatchesBlobs(t *testing.T) {
	upstream := castest.NewMemory()
	n := parse(t, "a/b/c/x = 1", "a/b/y = 1", "a/d/x = 2", "e/b/c/x = 1", "e/b/y = 1", "f = 3", "g = 4", "out/h = 5",
		"out/i/j = 6", "l -> f")
	root := n.put(t, upstream)
	store := &fetcher{Memory: castest.NewMemory(), upstream: upstream}
	in := must.Get(tree.Load(t.Context(), store, root))(t)
	var sizes []int
	for _, ds := range store.fetched {
		sizes = append(sizes, len(ds))
	}
	// The root; a, e and out; a/b, a/d and out/i; a/b/c. No file yet.
	if want := []int{1, 3, 3, 1}; !slices.Equal(sizes, want) || store.Len() != 8 {
		t.Errorf("Load fetched batches of %v and has %d blobs, want %v and 8", sizes, store.Len(), want)
	}
	store.fetched = nil
	stage(t, store, in, "", "out/x")
	expect.That(t, len(store.fetched) == 1 && len(store.fetched[0]) == 6,
		"Stage fetched %v, want 6 files in one call", store.fetched)
}

func TestFetchErrorsAreReturned(t *testing.T) {
	upstream := castest.NewMemory()
	root := parse(t, "a/b = 1").put(t, upstream)
	store := &fetcher{Memory: castest.NewMemory(), upstream: upstream, err: cas.ErrUnavailable}
	_, err := tree.Load(t.Context(), store, root)
	wantError(t, err, cas.ErrUnavailable, "")
	store.err = nil
	in := must.Get(tree.Load(t.Context(), store, root))(t)
	store.err = cas.ErrUnavailable
	l := plan(t, in, "", nil, nil)
	_, err = l.Stage(t.Context(), store, newRoot(t))
	wantError(t, err, cas.ErrUnavailable, "")
}

func TestOversizedDirectoryIsNotFetched(t *testing.T) {
	upstream := castest.NewMemory()
	huge := must.Get(cas.NewDigest(cas.SHA256, cas.SHA256.Sum(nil).Hash(), cas.MaxMessage+1))(t)
	root := putProto(t, upstream, parent("d", huge))
	store := &fetcher{Memory: castest.NewMemory(), upstream: upstream}
	_, err := tree.Load(t.Context(), store, root)
	wantError(t, err, cas.ErrInvalid, huge.String())
	expect.Equal(t, len(store.fetched), 1, "fetched %v", store.fetched)
}
