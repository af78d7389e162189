// SPDX-License-Identifier: Apache-2.0

package overlay

import (
	"cmp"
	"context"

	"github.com/cloister-build/cloister/cas"
)

// capabilities are the decorators of a store, and its instance. They are allocated together, since each call of a
// client makes a store.
type capabilities struct {
	filer    filer
	locator  locator
	splicer  splicer
	instance cas.Instance
}

// withCapabilities returns an instance of s with the optional capabilities of the local store.
func (s *store) withCapabilities() *cas.Instance {
	var all cas.Store = s
	c := &capabilities{}
	if local, ok := cas.As[cas.Filer](s.local.Store); ok {
		c.filer = filer{decorator{s, all}, local}
		all = &c.filer
	}
	if local, ok := cas.As[cas.Locator](s.local.Store); ok {
		c.locator = locator{decorator{s, all}, local}
		all = &c.locator
	}
	if local, ok := cas.As[cas.Splicer](s.local.Store); ok {
		c.splicer = splicer{decorator{s, all}, local}
		all = &c.splicer
	}
	c.instance = cas.Instance{Name: s.name, Store: all, Actions: s, Functions: s.upstream.Functions}
	return &c.instance
}

// A decorator adds one capability to a store; inner may have others.
type decorator struct {
	*store
	inner cas.Store
}

// Unwrap implements cas.Unwrapper.
func (d decorator) Unwrap() cas.Store { return d.inner }

// A filer is a store with a local cas.Filer.
type filer struct {
	decorator
	localFiler cas.Filer
}

// File implements cas.Filer.
func (s *filer) File(ctx context.Context, d cas.Digest, executable bool) (string, func(), error) {
	path, release, err := s.localFiler.File(ctx, d, executable)
	if !absentOrCorrupt(err) {
		s.o.uses.add(blob, s.name, d)
		return path, release, err
	}
	if err := s.fetchOne(ctx, d); err != nil {
		return "", nil, err
	}
	return s.localFiler.File(ctx, d, executable)
}

// A locator is a store with a local cas.Locator.
type locator struct {
	decorator
	localLocator cas.Locator
}

// Locate implements cas.Locator. It fetches absent blobs first, and fails with cas.ErrFull if the local store has no
// room for them.
func (s *locator) Locate(ctx context.Context, ds []cas.Digest) (cas.Location, error) {
	l, err := s.localLocator.Locate(ctx, ds)
	if err != nil {
		return nil, err
	}
	absent := absentOf(l, ds)
	s.addUses(ds, absent, nil)
	if len(absent) == 0 {
		return l, nil
	}
	l.Release()
	own, others := s.fetch(ctx, absent, map[cas.Digest]bool{})
	if err = cmp.Or(ctx.Err(), own, others); absentOrCorrupt(err) {
		// One damaged blob has ended a flight of many.
		if absent, err = s.local.Store.Missing(ctx, absent); err == nil {
			err = s.fetchEach(ctx, absent)
		}
	}
	if err != nil {
		return nil, err
	}
	return s.localLocator.Locate(ctx, ds)
}

// fetchEach fetches the blobs ds, and skips absent and damaged ones.
func (s *store) fetchEach(ctx context.Context, ds []cas.Digest) error {
	for _, d := range ds {
		if err := s.fetchOne(ctx, d); err != nil && !absentOrCorrupt(err) {
			return err
		}
	}
	return nil
}

// absentOf returns the blobs of ds that l reports as absent, without duplicates.
func absentOf(l cas.Location, ds []cas.Digest) (absent []cas.Digest) {
	seen := map[cas.Digest]bool{}
	for i, e := range l.Extents() {
		if e.File == cas.Absent && !seen[ds[i]] {
			seen[ds[i]] = true
			absent = append(absent, ds[i])
		}
	}
	return absent
}

// A splicer is a store with a local cas.Splicer. The upstream need not support chunk lists: it gets the chunks and the
// whole blob, so that its other users find the whole.
type splicer struct {
	decorator
	localSplicer cas.Splicer
}

// Splice implements cas.Splicer: the local store keeps the chunk list, and the upstream gets the whole blob, unless it
// has that already. It fetches absent chunks, with WriteBack only if the upstream answers in time: otherwise they are
// absent, and clients put them. With WriteThrough, the upstream is first.
func (s *splicer) Splice(ctx context.Context, d cas.Digest, of cas.ChunkList) error {
	if err := cmp.Or(s.checkFunction(d), of.Check(d)); err != nil {
		return err
	}
	if err := s.fetchChunks(ctx, of.Chunks); err != nil {
		return err
	}
	if s.o.config.Policy == WriteThrough && !d.IsEmpty() {
		if err := s.spliceUpstream(ctx, d, of); err != nil {
			return err
		}
	}
	if err := s.localSplicer.Splice(ctx, d, of); err != nil || d.IsEmpty() || s.o.config.Policy == WriteThrough {
		return err
	}
	return s.sendLater(d)
}

// fetchChunks copies chunks to the local store. An absent one is no error.
func (s *splicer) fetchChunks(ctx context.Context, chunks []cas.Digest) error {
	absent, err := s.local.Store.Missing(ctx, chunks)
	if err != nil || len(absent) == 0 {
		return err
	}
	wanted := absent
	if s.o.config.Policy == WriteBack {
		var nowhere []cas.Digest
		nowhere, err = s.queryMissing(ctx, absent)
		wanted = without(absent, setOf(nowhere))
	}
	if err == nil {
		own, others := s.fetch(ctx, wanted, map[cas.Digest]bool{})
		err = cmp.Or(ctx.Err(), own, others)
	}
	if s.unanswered(err) || absentOrCorrupt(err) {
		return nil
	}
	return err
}

// spliceUpstream puts the chunks of d, which are local, into the upstream as a whole, unless it has d.
func (s *splicer) spliceUpstream(ctx context.Context, d cas.Digest, of cas.ChunkList) error {
	missing, err := s.upstream.Store.Missing(ctx, []cas.Digest{d})
	if err != nil {
		return err
	}
	if len(missing) > 0 || len(s.suspect([]cas.Digest{d}, []cas.Digest{d})) > 0 {
		r := cas.Join(ctx, s.local.Store.Open, of.Chunks, 0)
		defer r.Close()
		if err := s.upstream.Store.Put(ctx, d, cas.Verify(d, r)); err != nil {
			return err
		}
	}
	s.recordSent(d)
	return nil
}

// Split implements cas.Splicer, for the local store.
func (s *splicer) Split(ctx context.Context, d cas.Digest) (cas.ChunkList, error) {
	return s.localSplicer.Split(ctx, d)
}
