// SPDX-License-Identifier: Apache-2.0

package overlay

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"slices"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
)

// Open implements cas.Store. It copies an absent blob to the local store first. If that is full, it reads from the
// upstream.
func (s *store) Open(ctx context.Context, d cas.Digest, off int64) (io.ReadCloser, error) {
	r, err := s.local.Store.Open(ctx, d, off)
	if !absentOrCorrupt(err) {
		return r, err
	}
	if err := s.fetchOne(ctx, d); errors.Is(err, cas.ErrFull) {
		return s.upstream.Store.Open(ctx, d, off)
	} else if err != nil {
		return nil, err
	}
	return s.local.Store.Open(ctx, d, off)
}

// absentOrCorrupt reports whether err means that a store has no usable copy of a blob or result.
func absentOrCorrupt(err error) bool {
	return errors.Is(err, cas.ErrNotFound) || errors.Is(err, cas.ErrCorrupt)
}

// Missing implements cas.Store. A blob in the upstream counts as present: a read copies it.
//
// If the upstream is unreachable, the presence of absent blobs is unknown. Reporting them as present would let a client
// build on blobs that nobody has. Reporting them as missing costs an upload, which succeeds with WriteBack, so Missing
// does that. With WriteThrough each upload would fail, so Missing fails and the client gets the reason.
func (s *store) Missing(ctx context.Context, ds []cas.Digest) ([]cas.Digest, error) {
	absent, err := s.local.Store.Missing(ctx, ds)
	if err != nil {
		return nil, err
	}
	suspect, query := s.classify(ds, absent)
	var missing []cas.Digest
	if len(query) > 0 {
		missing, err = s.upstream.Store.Missing(ctx, query)
	}
	if errors.Is(err, cas.ErrUnavailable) && s.o.config.Policy == WriteBack {
		s.o.count(func(st *Stats) { st.Unanswered++ })
		return absent, nil
	}
	if err != nil || len(suspect) == 0 {
		return missing, err
	}
	for _, d := range missing {
		suspect[d] = true
	}
	return slices.DeleteFunc(slices.Clone(ds), func(d cas.Digest) bool {
		listed := suspect[d]
		delete(suspect, d) // list it once
		return !listed
	}), nil
}

// Lookup implements cas.ActionCache. It records a result of the upstream locally. If the upstream fails, a result that
// is not local is a miss.
func (s *store) Lookup(ctx context.Context, action cas.Digest) (*repb.ActionResult, error) {
	r, err := s.local.Actions.Lookup(ctx, action)
	if !absentOrCorrupt(err) {
		return r, err
	}
	r, err = s.upstream.Actions.Lookup(ctx, action)
	switch {
	case ctx.Err() != nil:
		return nil, ctx.Err()
	case errors.Is(err, cas.ErrNotFound):
		return nil, err
	case err != nil:
		s.o.count(func(st *Stats) { st.Unanswered++ })
		s.o.warn("cannot look up results in the upstream", "error", err)
		return nil, fmt.Errorf("result of action %s: %w locally; the upstream failed: %v", action, cas.ErrNotFound, err)
	}
	if err := s.local.Actions.Record(ctx, action, r); err != nil {
		// The next lookup asks the upstream again.
		s.o.config.Log.Warn("cannot record a result locally", "action", action.String(), "error", err)
	}
	return r, nil
}

// Fetch implements cas.Fetcher. A full local store is no error, since Open reads from the upstream. Neither is damage,
// which Open reports.
func (s *store) Fetch(ctx context.Context, ds []cas.Digest) ([]cas.Digest, error) {
	absent, err := s.local.Store.Missing(ctx, ds)
	if err != nil {
		return nil, err
	}
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
