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

// Open implements cas.Store. What is not near is brought there first, whole; where near has no room it is read
// far.
func (s *store) Open(ctx context.Context, d cas.Digest, off int64) (io.ReadCloser, error) {
	r, err := s.near.Store.Open(ctx, d, off)
	if !lacks(err) {
		return r, err
	}
	if err := s.bring(ctx, d); errors.Is(err, cas.ErrFull) {
		return s.far.Store.Open(ctx, d, off)
	} else if err != nil {
		return nil, err
	}
	return s.near.Store.Open(ctx, d, off)
}

// lacks reports whether a store that failed with err has nothing of use.
func lacks(err error) bool { return errors.Is(err, cas.ErrNotFound) || errors.Is(err, cas.ErrCorrupt) }

// Missing implements cas.Store. A blob that is far counts as present: it comes near when it is read.
//
// When far cannot be reached, it is not known of what is not near. To call it present would let a client build
// on blobs that nobody has. To call it missing costs an upload of what may be there, and under Back that upload
// succeeds: so it is missing. Under Through the upload would only fail, later and for each blob again: so the
// question fails, and the client knows why.
func (s *store) Missing(ctx context.Context, ds []cas.Digest) ([]cas.Digest, error) {
	absent, err := s.near.Store.Missing(ctx, ds)
	if err != nil {
		return nil, err
	}
	again, ask := s.doubted(ds, absent)
	var missing []cas.Digest
	if len(ask) > 0 {
		missing, err = s.far.Store.Missing(ctx, ask)
	}
	if errors.Is(err, cas.ErrUnavailable) && s.o.config.Policy == Back {
		s.o.count(func(st *Stats) { st.Unasked++ })
		return absent, nil
	}
	if err != nil || len(again) == 0 {
		return missing, err
	}
	for _, d := range missing {
		again[d] = true
	}
	return slices.DeleteFunc(slices.Clone(ds), func(d cas.Digest) bool {
		listed := again[d]
		delete(again, d) // each once
		return !listed
	}), nil
}

// Lookup implements cas.ActionCache. A result that only far has is recorded near. Whatever keeps far from
// answering, what is not near is a miss.
func (s *store) Lookup(ctx context.Context, action cas.Digest) (*repb.ActionResult, error) {
	r, err := s.near.Actions.Lookup(ctx, action)
	if !lacks(err) {
		return r, err
	}
	r, err = s.far.Actions.Lookup(ctx, action)
	switch {
	case ctx.Err() != nil:
		return nil, ctx.Err()
	case errors.Is(err, cas.ErrNotFound):
		return nil, err
	case err != nil:
		s.o.count(func(st *Stats) { st.Unasked++ })
		s.o.warn("results are not looked up far", "error", err)
		return nil, fmt.Errorf("result of action %s: %w near, and far does not say: %v", action, cas.ErrNotFound, err)
	}
	if err := s.near.Actions.Record(ctx, action, r); err != nil {
		// It is found far again next time.
		s.o.config.Log.Warn("result is not kept near", "action", action.String(), "error", err)
	}
	return r, nil
}

// Fetch implements cas.Fetcher. That near has no room is no error either: Open reads what is far. Nor is damage, of
// which Open says where it is.
func (s *store) Fetch(ctx context.Context, ds []cas.Digest) error {
	absent, err := s.near.Store.Missing(ctx, ds)
	if err != nil {
		return err
	}
	own, others := s.join(absent)
	err = s.wait(ctx, own)
	for _, f := range others {
		// If a flight fails that others began, what is still absent is only dearer to open.
		s.wait(ctx, f)
	}
	if errors.Is(err, cas.ErrFull) || lacks(err) {
		err = nil
	}
	return cmp.Or(ctx.Err(), err)
}

// bring brings one blob near. A blob that is absent far is cas.ErrNotFound.
func (s *store) bring(ctx context.Context, d cas.Digest) error {
	f, others := s.join([]cas.Digest{d})
	if f == nil {
		f = others[0]
	}
	return s.wait(ctx, f)
}

// A key names a blob of an instance.
type key struct {
	instance string
	digest   cas.Digest
}

// maxOrphans is how many flights go on though nobody waits for them any more: a client that gives up on a large
// blob comes again, and must not find it as far away as before.
const maxOrphans = 16

// A flight brings blobs near, for all who ask for one of them while it does. If none is left, it goes on as an
// orphan, or, where there are too many of these, ends early.
type flight struct {
	blobs  []cas.Digest
	ctx    context.Context
	cancel context.CancelFunc
	done   chan struct{} // closed when err is set
	err    error

	// Guarded by Overlay.mu.
	askers       int
	orphan, over bool
}

// join begins a flight for those of ds that are in none, and returns it with the others. The caller waits for
// each of them. Who asks for one blob alone does not join a flight of many: he would wait for all of them, and
// fail with any.
func (s *store) join(ds []cas.Digest) (own *flight, others []*flight) {
	s.o.mu.Lock()
	defer s.o.mu.Unlock()
	var blobs []cas.Digest
	joined := map[*flight]bool{}
	for _, d := range ds {
		f := s.o.flights[key{s.name, d}]
		if f == nil || len(ds) == 1 && len(f.blobs) > 1 {
			blobs = append(blobs, d)
		} else if !joined[f] {
			joined[f] = true
			f.askers++
			s.o.adopt(f)
			others = append(others, f)
		}
	}
	if len(blobs) == 0 {
		return nil, others
	}
	own = &flight{blobs: blobs, done: make(chan struct{}), askers: 1}
	if s.o.closed {
		own.err, own.over = errClosed, true
		close(own.done)
		return own, others
	}
	own.ctx, own.cancel = context.WithCancel(s.o.ctx)
	for _, d := range blobs {
		s.o.flights[key{s.name, d}] = own
	}
	s.o.work.Go(func() {
		own.err = s.fly(own)
		s.o.mu.Lock()
		s.land(own)
		s.o.adopt(own)
		own.over = true
		s.o.mu.Unlock()
		own.cancel()
		close(own.done)
	})
	return own, others
}

// adopt makes f no orphan. The caller holds o.mu.
func (o *Overlay) adopt(f *flight) {
	if f.orphan {
		f.orphan = false
		o.orphans--
	}
}

// land lets nobody join f any more. The caller holds s.o.mu.
func (s *store) land(f *flight) {
	for _, d := range f.blobs {
		if k := (key{s.name, d}); s.o.flights[k] == f {
			delete(s.o.flights, k)
		}
	}
}

// wait waits for f, which may be nil, and returns how it ended.
func (s *store) wait(ctx context.Context, f *flight) error {
	if f == nil {
		return nil
	}
	defer func() {
		s.o.mu.Lock()
		defer s.o.mu.Unlock()
		if f.askers--; f.askers > 0 || f.over {
			return
		}
		if s.o.orphans < maxOrphans {
			f.orphan = true
			s.o.orphans++
			return
		}
		s.land(f)
		f.cancel()
	}()
	select {
	case <-f.done:
		return f.err
	case <-ctx.Done():
		return ctx.Err()
	}
}

// fly brings the blobs of f near. One that is absent far is cas.ErrNotFound if it is alone, and else no error.
func (s *store) fly(f *flight) error {
	err := s.carry(f)
	if s.o.ctx.Err() != nil {
		return errClosed
	}
	return err
}

func (s *store) carry(f *flight) error {
	copier, ok := s.far.Store.(Copier)
	if ok && len(f.blobs) > 1 {
		absent, err := copier.Fetch(f.ctx, s.near.Store, f.blobs)
		if err == nil {
			s.o.count(func(st *Stats) { st.Fetched += int64(len(f.blobs) - len(absent)) })
			for _, d := range f.blobs {
				var err error
				if len(absent) > 0 && d == absent[0] { // they are in order
					err, absent = cas.ErrNotFound, absent[1:]
				}
				s.brought(d, err)
			}
		}
		return err
	}
	for _, d := range f.blobs {
		if err := s.copy(f.ctx, d); err != nil && (len(f.blobs) == 1 || !errors.Is(err, cas.ErrNotFound)) {
			return err
		}
	}
	return nil
}

// copy copies one blob from far to near, which compares it with its digest.
func (s *store) copy(ctx context.Context, d cas.Digest) (err error) {
	defer func() { s.brought(d, err) }()
	r, err := s.far.Store.Open(ctx, d, 0)
	if err != nil {
		return err
	}
	defer r.Close()
	if err := s.near.Store.Put(ctx, d, r); err != nil {
		return fmt.Errorf("bring blob %s near: %w", d, err)
	}
	s.o.count(func(st *Stats) { st.Fetched++ })
	return nil
}
