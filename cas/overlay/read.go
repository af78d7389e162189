// SPDX-License-Identifier: Apache-2.0

package overlay

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"sync"

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
	if errors.Is(err, cas.ErrUnavailable) && s.o.config.Policy == WriteBack {
		s.o.count(func(st *Stats) { st.Unanswered++ })
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
		s.o.count(func(st *Stats) { st.Unanswered++ })
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
func (s *store) Fetch(ctx context.Context, ds []cas.Digest) ([]cas.Digest, error) {
	absent, err := s.near.Store.Missing(ctx, ds)
	if err != nil {
		return nil, err
	}
	// If a flight fails that others began, what is still absent is only dearer to open.
	nowhere := map[cas.Digest]bool{}
	err, _ = s.fetch(ctx, absent, nowhere)
	if errors.Is(err, cas.ErrFull) || lacks(err) {
		err = nil
	}
	if err = cmp.Or(ctx.Err(), err); err != nil {
		return nil, err
	}
	return slices.DeleteFunc(absent, func(d cas.Digest) bool { return !nowhere[d] }), nil
}

// fetch brings blobs near, and returns how its own flights ended, and the first of those that failed of others that it
// joined. That a blob is absent far is no failure: it is added to nowhere.
func (s *store) fetch(ctx context.Context, ds []cas.Digest, nowhere map[cas.Digest]bool) (own, others error) {
	own, others = s.fly(ctx, ds, nowhere)
	if own != nil || others == nil || ctx.Err() != nil {
		return own, others
	}
	// What ended a flight of others need not be the fault of any blob that is wanted here.
	rest, err := s.near.Store.Missing(ctx, ds)
	if err != nil {
		return err, nil
	}
	return s.fly(ctx, rest, nowhere)
}

// fly is fetch without a second try.
func (s *store) fly(ctx context.Context, ds []cas.Digest, nowhere map[cas.Digest]bool) (own, others error) {
	began, joined := s.join(ds)
	for _, f := range began {
		err := s.wait(ctx, f)
		own = worse(own, err)
		if err != nil && !errors.Is(err, cas.ErrNotFound) {
			continue
		}
		// What a flight of others did not find may have been put there since it looked.
		for _, d := range f.absent {
			nowhere[d] = true
		}
	}
	for _, f := range joined {
		others = worse(others, s.wait(ctx, f))
	}
	return own, others
}

// worse returns the error that says more: that a blob is absent is none, and that one is damaged says nothing of others.
func worse(a, b error) error {
	if errors.Is(b, cas.ErrNotFound) || a != nil && (b == nil || !lacks(a)) {
		return a
	}
	return b
}

// bring brings one blob near. A blob that is absent far is cas.ErrNotFound.
func (s *store) bring(ctx context.Context, d cas.Digest) error {
	began, joined := s.join([]cas.Digest{d})
	return s.wait(ctx, append(began, joined...)[0])
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
	hurry  func()        // has it wait for its turn no more
	done   chan struct{} // closed when err is set
	err    error
	absent []cas.Digest // with err, of blobs: those that far does not have, if that is known

	// Guarded by Overlay.mu.
	askers               int
	flying, orphan, over bool
}

// join begins flights for those of ds that are in none, and returns them with the others. The caller waits for each of
// them. A large blob flies by itself, so that whoever wants it can join. Who asks for one blob alone does not join a
// flight of many small ones: he would wait for all of them, and fail with any.
func (s *store) join(ds []cas.Digest) (began, joined []*flight) {
	s.o.mu.Lock()
	defer s.o.mu.Unlock()
	var small []cas.Digest
	seen := map[*flight]bool{}
	turn := make(chan struct{}, streams)
	for _, d := range ds {
		f := s.o.flights[key{s.name, d}]
		switch {
		case f != nil && seen[f]:
		case f != nil && (len(ds) > 1 || len(f.blobs) == 1):
			seen[f] = true
			f.askers++
			s.o.adopt(f)
			joined = append(joined, f)
			if !f.flying {
				s.hasten(f, turn)
			}
		case d.Size() > smallBlob:
			f := s.begin([]cas.Digest{d}, turn)
			seen[f] = true // d may be listed again
			began = append(began, f)
		default:
			small = append(small, d)
		}
	}
	if len(small) > 0 {
		began = append(began, s.begin(small, nil))
	}
	return began, joined
}

// hasten has f fly as soon as it has this turn: who began it may have many to fly before it. The caller holds s.o.mu.
func (s *store) hasten(f *flight, turn chan struct{}) {
	s.o.work.Go(func() {
		select {
		case turn <- struct{}{}:
			f.hurry()
			<-f.done
			<-turn
		case <-f.done:
		}
	})
}

// begin begins a flight when it has its turn, if that is not nil. The caller holds s.o.mu.
func (s *store) begin(blobs []cas.Digest, turn chan struct{}) *flight {
	soon := make(chan struct{})
	f := &flight{blobs: blobs, hurry: sync.OnceFunc(func() { close(soon) }), done: make(chan struct{}), askers: 1, flying: turn == nil}
	if s.o.closed {
		f.err, f.over = errClosed, true
		close(f.done)
		return f
	}
	f.ctx, f.cancel = context.WithCancel(s.o.ctx)
	for _, d := range blobs {
		s.o.flights[key{s.name, d}] = f
	}
	s.o.work.Go(func() {
		if turn != nil {
			select {
			case turn <- struct{}{}:
				defer func() { <-turn }()
			case <-soon:
			case <-f.ctx.Done():
			}
			s.o.mu.Lock()
			f.flying = true
			s.o.mu.Unlock()
		}
		f.err = s.carry(f)
		s.o.mu.Lock()
		s.land(f)
		s.o.adopt(f)
		f.over = true
		s.o.mu.Unlock()
		f.cancel()
		close(f.done)
	})
	return f
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

// wait waits for f, and returns how it ended.
func (s *store) wait(ctx context.Context, f *flight) error {
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

// carry brings the blobs of f near. One that is absent far is cas.ErrNotFound if it is alone, and else no error.
func (s *store) carry(f *flight) error {
	err := s.carryAll(f)
	if s.o.ctx.Err() != nil {
		return errClosed
	}
	return err
}

func (s *store) carryAll(f *flight) error {
	copier, ok := s.far.Store.(Copier)
	if ok && len(f.blobs) > 1 {
		absent, err := copier.Fetch(f.ctx, s.near.Store, f.blobs)
		if err == nil {
			f.absent = absent
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
		err := s.copy(f.ctx, d)
		if errors.Is(err, cas.ErrNotFound) {
			f.absent = append(f.absent, d)
		}
		if err != nil && (len(f.blobs) == 1 || !errors.Is(err, cas.ErrNotFound)) {
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
