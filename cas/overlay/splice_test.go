// SPDX-License-Identifier: Apache-2.0

package overlay_test

import (
	"errors"
	"path/filepath"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/castest"
	"github.com/cloister-build/cloister/cas/castest/faulty"
	"github.com/cloister-build/cloister/cas/overlay"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
)

// newSplicer returns an overlay whose upstream has no chunk lists.
func newSplicer(t *testing.T, policy overlay.Policy) (p *pair, m cas.Splicer) {
	t.Helper()
	p = &pair{local: castest.NewMemory(), upstream: castest.NewMemory(), journal: filepath.Join(t.TempDir(), "journal")}
	p.faultyUpstream = faulty.New(p.upstream, p.upstream)
	return p, p.openSplicer(t, policy, p.faultyUpstream)
}

// openSplicer replaces the overlay of p by one with this upstream.
func (p *pair) openSplicer(t *testing.T, policy overlay.Policy, upstream cas.Store) cas.Splicer {
	t.Helper()
	p.Overlay = open(t, overlay.Config{
		Local: one(p.local, p.local), Upstream: one(upstream, p.faultyUpstream), Policy: policy, Journal: p.journal,
	})
	in := instance(t, p.Overlay)
	p.store, p.actions = in.Store, in.Actions
	m, ok := cas.As[cas.Splicer](p.store)
	must.Be(t, ok, "the overlay is not a cas.Splicer")
	return m
}

func wantWhole(t *testing.T, s cas.Store, d cas.Digest, b []byte) {
	t.Helper()
	expect.Equal(t, string(must.Get(cas.ReadAll(t.Context(), s, d, d.Size()))(t)), string(b))
}

// The local store has the chunks and the upstream the whole blob, wherever the chunks were.
func TestSplicedBlobIsWholeUpstream(t *testing.T) {
	for name, policy := range policies {
		for _, chunksUpstream := range []bool{false, true} {
			t.Run(name, func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					p, m := newSplicer(t, policy)
					at := p.store
					if chunksUpstream {
						at = p.upstream
					}
					b, d, of := castest.PutChunks(t, at, 1, 100_000, 2_000_000)
					must.Succeed(t, m.Splice(t.Context(), d, of))
					if policy == overlay.WriteBack {
						p.drain(t)
					}
					wantWhole(t, p.local, d, b)
					wantWhole(t, p.upstream, d, b)
					wantWhole(t, p.store, d, b)
					if got := p.local.Digests(); slices.Contains(got, d) || len(got) != 2 {
						t.Errorf("local store has %v, want the two chunks", got)
					}
					expect.That(t, slices.Contains(p.upstream.Digests(), d), "the upstream lacks the whole blob")
					expect.Slices(t, must.Get(m.Split(t.Context(), d))(t).Chunks, of.Chunks, "Split")
				})
			})
		}
	}
}

// If the local store has lost a chunk, the whole blob is fetched.
func TestSplicedBlobWithLostChunkIsFetched(t *testing.T) {
	p, m := newSplicer(t, overlay.WriteThrough)
	b, d, of := castest.PutChunks(t, p.store, 1, 100_000, 2_000_000)
	must.Succeed(t, m.Splice(t.Context(), d, of))
	p.local.Delete(of.Chunks[1])
	expect.That(t, !has(t, p.local, d) && has(t, p.store, d), "want the blob only in the upstream")
	wantWhole(t, p.store, d, b)
	expect.That(t, slices.Contains(p.local.Digests(), d), "the blob was not fetched")
}

// An absent chunk is an error. So is an unavailable upstream, except with WriteBack.
func TestSpliceFails(t *testing.T) {
	for name, policy := range policies {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				p, m := newSplicer(t, policy)
				b, d, of := castest.PutChunks(t, p.store, 1, 1000, 2000)
				_, nowhere := castest.Blob(9, 2000)
				err := m.Splice(t.Context(), d, cas.ChunkList{Chunks: []cas.Digest{of.Chunks[0], nowhere}})
				expect.That(t, errors.Is(err, cas.ErrNotFound) && !has(t, p.local, d), "got %v, want ErrNotFound", err)
				p.faultyUpstream.Fail(cas.ErrUnavailable, faulty.Put, faulty.PutAll, faulty.Missing)
				err = m.Splice(t.Context(), d, of)
				if policy == overlay.WriteThrough && !errors.Is(err, cas.ErrUnavailable) ||
					policy == overlay.WriteBack && err != nil {
					t.Errorf("got %v", err)
				}
				p.faultyUpstream.Heal()
				if policy == overlay.WriteBack {
					p.drain(t)
				} else if err := m.Splice(t.Context(), d, of); err != nil {
					t.Error(err)
				}
				wantWhole(t, p.upstream, d, b)
			})
		})
	}
}

// TestSpliceDoesNotWaitForFrozenUpstream checks that, with WriteBack, absent chunks are absent if the upstream does not
// answer in time.
func TestSpliceDoesNotWaitForFrozenUpstream(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p, m := newSplicer(t, overlay.WriteBack)
		_, d, of := castest.PutChunks(t, p.upstream, 1, 1000, 2000)
		gate := p.faultyUpstream.Hold(faulty.Missing)
		for _, most := range []time.Duration{3 * time.Second, 0} {
			start := time.Now()
			expect.Error(t, m.Splice(t.Context(), d, of), cas.ErrNotFound)
			expect.That(t, time.Since(start) <= most, "it took %v, want at most %v", time.Since(start), most)
		}
		expect.Equal(t, p.Stats().Unanswered, 2, "unanswered")
		castest.PutChunks(t, p.store, 1, 1000, 2000) // what clients do then
		must.Succeed(t, m.Splice(t.Context(), d, of))
		gate.Open()
	})
}

func TestSplicerRequiresLocalSplicer(t *testing.T) {
	if _, ok := cas.As[cas.Splicer](newPair(t, overlay.WriteThrough).store); ok {
		t.Error("got a cas.Splicer over a local store without one")
	}
}
