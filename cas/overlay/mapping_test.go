// SPDX-License-Identifier: Apache-2.0

package overlay_test

import (
	"bytes"
	"errors"
	"path/filepath"
	"slices"
	"testing"
	"testing/synctest"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/castest"
	"github.com/cloister-build/cloister/cas/overlay"
)

// newMapping returns an overlay over two stores in memory, of which the far one keeps no chunks.
func newMapping(t *testing.T, policy overlay.Policy) (p *pair, m cas.Splicer) {
	t.Helper()
	p = &pair{near: castest.NewMemory(), far: castest.NewMemory(), journal: filepath.Join(t.TempDir(), "journal")}
	p.faulty = castest.NewFaulty(p.far, p.far)
	p.Overlay = open(t, overlay.Config{Local: one(p.near, p.near), Upstream: one(p.faulty, p.faulty), Policy: policy, Journal: p.journal})
	in, err := p.Instance("")
	if err != nil {
		t.Fatal(err)
	}
	p.store, p.actions = in.Store, in.Actions
	m, ok := p.store.(cas.Splicer)
	if !ok {
		t.Fatal("over a store that keeps chunks it is no cas.Splicer")
	}
	return p, m
}

func wantWhole(t *testing.T, s cas.Store, d cas.Digest, b []byte) {
	t.Helper()
	if got, err := cas.ReadAll(t.Context(), s, d, d.Size()); err != nil || !bytes.Equal(got, b) {
		t.Errorf("got %d bytes, %v", len(got), err)
	}
}

// A blob is near as its chunks, and far as a whole: also if its chunks were far alone.
func TestMappedBlobIsWholeFar(t *testing.T) {
	for name, policy := range policies {
		for _, chunksFar := range []bool{false, true} {
			t.Run(name, func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					p, m := newMapping(t, policy)
					at := p.store
					if chunksFar {
						at = p.far
					}
					b, d, of := castest.PutChunks(t, at, 1, 100_000, 2_000_000)
					if err := m.Splice(t.Context(), d, of); err != nil {
						t.Fatal(err)
					}
					if policy == overlay.WriteBack {
						p.drain(t)
					}
					wantWhole(t, p.near, d, b)
					wantWhole(t, p.far, d, b)
					wantWhole(t, p.store, d, b)
					if got := p.near.Digests(); slices.Contains(got, d) || len(got) != 2 {
						t.Errorf("near has %v", got)
					}
					if !slices.Contains(p.far.Digests(), d) {
						t.Error("far has not the whole")
					}
					if got, err := m.Split(t.Context(), d); err != nil || !slices.Equal(got.Chunks, of.Chunks) {
						t.Errorf("Mapping: %v, %v", got, err)
					}
				})
			})
		}
	}
}

// When near has lost a chunk, the blob is read from far, whole.
func TestMappedBlobWithoutAChunkIsFar(t *testing.T) {
	p, m := newMapping(t, overlay.WriteThrough)
	b, d, of := castest.PutChunks(t, p.store, 1, 100_000, 2_000_000)
	if err := m.Splice(t.Context(), d, of); err != nil {
		t.Fatal(err)
	}
	p.near.Delete(of.Chunks[1])
	if has(t, p.near, d) || !has(t, p.store, d) {
		t.Error("it is near, or nowhere")
	}
	wantWhole(t, p.store, d, b)
	if !slices.Contains(p.near.Digests(), d) {
		t.Error("it has not come near")
	}
}

// A chunk that is nowhere is named; a far store that cannot be reached is told under Through, and waited for under Back.
func TestMapFails(t *testing.T) {
	for name, policy := range policies {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				p, m := newMapping(t, policy)
				b, d, of := castest.PutChunks(t, p.store, 1, 1000, 2000)
				_, nowhere := castest.Blob(9, 2000)
				err := m.Splice(t.Context(), d, cas.ChunkList{Chunks: []cas.Digest{of.Chunks[0], nowhere}})
				if !errors.Is(err, cas.ErrNotFound) || has(t, p.near, d) {
					t.Errorf("got %v, want ErrNotFound", err)
				}
				p.faulty.Fail(cas.ErrUnavailable, castest.Put, castest.PutAll, castest.Missing)
				err = m.Splice(t.Context(), d, of)
				if policy == overlay.WriteThrough && !errors.Is(err, cas.ErrUnavailable) || policy == overlay.WriteBack && err != nil {
					t.Errorf("got %v", err)
				}
				p.faulty.Heal()
				if policy == overlay.WriteBack {
					p.drain(t)
				} else if err := m.Splice(t.Context(), d, of); err != nil {
					t.Error(err)
				}
				wantWhole(t, p.far, d, b)
			})
		})
	}
}

// Over a store that keeps no chunks it is no cas.Splicer.
func TestMapperIsThatOfNear(t *testing.T) {
	if _, ok := newPair(t, overlay.WriteThrough).store.(cas.Splicer); ok {
		t.Error("it is one")
	}
}
