// SPDX-License-Identifier: Apache-2.0

package overlay

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
)

// Open implements cas.Store. It copies an absent blob to the local store first. If that is full, it reads from the
// upstream.
func (s *store) Open(ctx context.Context, d cas.Digest, off int64) (io.ReadCloser, error) {
	if err := cas.CheckDigests(d); err != nil {
		return nil, err
	}
	s.o.used()
	return s.open(ctx, d, off)
}

// open is Open without a use of the overlay.
func (s *store) open(ctx context.Context, d cas.Digest, off int64) (io.ReadCloser, error) {
	r, err := s.local.Store.Open(ctx, d, off)
	if !absentOrCorrupt(err) {
		s.o.uses.add(blob, s.name, d)
		return r, err
	}
	err = s.fetchOne(ctx, d)
	if errors.Is(err, cas.ErrFull) {
		r, err := s.openUpstream(ctx, d, off)
		if err != nil {
			return nil, err
		}
		return r, nil
	}
	if err != nil {
		return nil, err
	}
	return s.local.Store.Open(ctx, d, off)
}

// ReadLocal returns the contents of those blobs of ds that the local store has, and nil for the others and for those
// above limit bytes. It uses each blob once, and takes no lock per blob.
func (s *store) ReadLocal(ctx context.Context, ds []cas.Digest, limit int64) [][]byte {
	s.o.used()
	contents := make([][]byte, len(ds))
	read := make([]cas.Digest, 0, len(ds))
	for i, d := range ds {
		if b, err := cas.ReadAll(ctx, s.local.Store, d, limit); err == nil {
			contents[i], read = b, append(read, d)
		}
	}
	s.o.uses.add(blob, s.name, read...)
	return contents
}

// absentOrCorrupt reports whether err means that a store has no usable copy of a blob or result.
func absentOrCorrupt(err error) bool {
	return errors.Is(err, cas.ErrNotFound) || errors.Is(err, cas.ErrCorrupt)
}

// Missing implements cas.Store. A blob in the upstream counts as present: a read copies it. An unsent blob does not.
//
// If the upstream is unreachable or denies a renewal, it is unknown which absent blobs it has. If Missing omitted them,
// a client could depend on blobs that nobody has. With WriteBack, Missing returns them, which costs only an upload.
// With WriteThrough, each upload would fail, so Missing fails and the client gets the reason.
func (s *store) Missing(ctx context.Context, ds []cas.Digest) ([]cas.Digest, error) {
	s.o.used()
	absent, err := s.local.Store.Missing(ctx, ds)
	if err != nil {
		return nil, err
	}
	missing := s.suspect(ds, absent)
	s.addUses(ds, absent, missing)
	if absent = without(absent, missing); len(absent) > 0 {
		found, err := s.queryMissing(ctx, absent)
		if s.unanswered(err) {
			found = absent
		} else if err != nil {
			return nil, err
		}
		s.o.unsent.lost(&s.o.recent, s.name, found...)
		maps.Copy(missing, setOf(found))
	}
	return selected(ds, missing), nil
}

// MissingForPut implements cas.PutChecker.
func (s *store) MissingForPut(ctx context.Context, ds []cas.Digest) ([]cas.Digest, error) {
	s.o.used()
	absent, err := s.local.Store.Missing(ctx, ds)
	if err != nil {
		return nil, err
	}
	missing := s.suspect(ds, nil)
	s.addUses(ds, absent, missing)
	if len(missing) == 0 {
		return absent, nil
	}
	maps.Copy(missing, setOf(absent))
	return selected(ds, missing), nil
}

// addUses records that the blobs ds were used, except those in absent and missing.
func (s *store) addUses(ds, absent []cas.Digest, missing map[cas.Digest]bool) {
	switch {
	case len(absent)+len(missing) == 0:
		s.o.uses.add(blob, s.name, ds...)
		return
	case len(absent) == len(ds): // it has no duplicates
		return
	}
	not := setOf(absent)
	maps.Copy(not, missing)
	s.o.uses.add(blob, s.name, without(ds, not)...)
}

// Lookup implements cas.ActionCache. It records a result of the upstream locally. If the upstream fails, a result that
// is not local is a miss.
func (s *store) Lookup(ctx context.Context, action cas.Digest) (*repb.ActionResult, error) {
	s.o.used()
	r, err := s.local.Actions.Lookup(ctx, action)
	if !absentOrCorrupt(err) {
		s.o.uses.add(result, s.name, action)
		return r, err
	}
	r, err = query(ctx, s.o, 1, func(ctx context.Context) (*repb.ActionResult, error) {
		return s.upstream.Actions.Lookup(ctx, action)
	})
	switch {
	case ctx.Err() != nil:
		return nil, ctx.Err()
	case errors.Is(err, cas.ErrNotFound):
		return nil, err
	case err != nil:
		s.o.count(func(st *Stats) { st.Unanswered++ })
		s.o.warn("cannot look up results in the upstream", "err", err)
		return nil, fmt.Errorf("result of action %s: %w locally; the upstream failed: %v", action, cas.ErrNotFound, err)
	}
	if err := s.local.Actions.Record(ctx, action, r); err != nil {
		// The next lookup asks the upstream again.
		s.o.config.Log.Warn("cannot record a result locally", "action", action.String(), "err", err)
	}
	return r, nil
}

// Fetch implements cas.Fetcher. A full local store is no error, because Open then reads from the upstream. Nor is a
// damaged blob, which Open reports.
func (s *store) Fetch(ctx context.Context, ds []cas.Digest) ([]cas.Digest, error) {
	s.o.used()
	absent, err := s.local.Store.Missing(ctx, ds)
	if err != nil {
		return nil, err
	}
	s.addUses(ds, absent, nil)
	// If another call's flight fails, Open fetches its blobs.
	upstreamLacks := map[cas.Digest]bool{}
	err, _ = s.fetch(ctx, absent, upstreamLacks)
	if errors.Is(err, cas.ErrFull) || absentOrCorrupt(err) {
		err = nil
	}
	if err = cmp.Or(ctx.Err(), err); err != nil {
		return nil, err
	}
	return slices.DeleteFunc(absent, func(d cas.Digest) bool { return !upstreamLacks[d] }), nil
}
