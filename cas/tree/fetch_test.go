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
)

// A distant store keeps what was not fetched out of reach, and counts the calls.
type distant struct {
	*castest.Memory
	far     *castest.Memory
	fetched [][]cas.Digest
	err     error
}

func (s *distant) Fetch(ctx context.Context, ds []cas.Digest) ([]cas.Digest, error) {
	s.fetched = append(s.fetched, ds)
	for _, d := range ds {
		b, err := cas.ReadAll(ctx, s.far, d, d.Size())
		if errors.Is(err, cas.ErrNotFound) {
			continue
		}
		if err := errors.Join(err, s.Put(ctx, d, bytes.NewReader(b))); err != nil {
			return nil, err
		}
	}
	return nil, s.err
}

func (s *distant) Missing(ctx context.Context, ds []cas.Digest) ([]cas.Digest, error) {
	return s.far.Missing(ctx, ds)
}

// TestFarTreeIsReadInFewCalls: one for each level of Directories and one for all files, each blob once.
func TestFarTreeIsReadInFewCalls(t *testing.T) {
	far := castest.NewMemory()
	n := parse(t, "a/b/c/x = 1", "a/b/y = 1", "a/d/x = 2", "e/b/c/x = 1", "e/b/y = 1", "f = 3", "g = 4", "out/h = 5", "out/i/j = 6", "l -> f")
	root := n.put(t, far)
	store := &distant{Memory: castest.NewMemory(), far: far}
	in, err := tree.Load(t.Context(), store, root)
	must(t, err)
	var sizes []int
	for _, ds := range store.fetched {
		sizes = append(sizes, len(ds))
	}
	// The root; a, e and out; a/b, a/d and out/i; a/b/c. No file is read yet.
	if want := []int{1, 3, 3, 1}; !slices.Equal(sizes, want) || store.Len() != 8 {
		t.Errorf("Load fetched %v and has %d, want %v", sizes, store.Len(), want)
	}
	store.fetched = nil
	stage(t, store, in, "", "out/x")
	if len(store.fetched) != 1 || len(store.fetched[0]) != 6 {
		t.Errorf("Stage fetched %v, want 6 files in one call", store.fetched)
	}
}

// TestFarAway: what Fetch fails of is told, and nothing is laid out.
func TestFarAway(t *testing.T) {
	far := castest.NewMemory()
	root := parse(t, "a/b = 1").put(t, far)
	store := &distant{Memory: castest.NewMemory(), far: far, err: cas.ErrUnavailable}
	_, err := tree.Load(t.Context(), store, root)
	wantError(t, err, cas.ErrUnavailable, "")
	store.err = nil
	in, err := tree.Load(t.Context(), store, root)
	must(t, err)
	store.err = cas.ErrUnavailable
	l, err := in.Plan("", nil, nil)
	must(t, err)
	_, err = l.Stage(t.Context(), store, newRoot(t))
	wantError(t, err, cas.ErrUnavailable, "")
}

// TestHugeDirectoryIsNotFetched: what is refused by its size need not come near.
func TestHugeDirectoryIsNotFetched(t *testing.T) {
	far := castest.NewMemory()
	huge, err := cas.NewDigest(cas.SHA256, cas.SHA256.Sum(nil).Hash(), cas.MaxMessage+1)
	must(t, err)
	root := putProto(t, far, parent("d", huge))
	store := &distant{Memory: castest.NewMemory(), far: far}
	_, err = tree.Load(t.Context(), store, root)
	wantError(t, err, cas.ErrInvalid, huge.String())
	if len(store.fetched) != 1 {
		t.Errorf("fetched %v, want the root alone", store.fetched)
	}
}
