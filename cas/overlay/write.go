// SPDX-License-Identifier: Apache-2.0

package overlay

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"sync"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
)

const (
	smallBlob  = 1 << 20 // bytes of a blob that is sent among others
	batchBytes = 8 << 20 // of the blobs that are sent together, in memory
	streams    = 4       // large blobs that are sent at once
)

// errUnserved says that far has no such digest function.
var errUnserved = fmt.Errorf("%w: the upstream does not serve the digest function", cas.ErrInvalid)

// unserved returns errUnserved if far is known not to serve the digest function of d: what is near could never be
// sent on.
func (s *store) unserved(d cas.Digest) error {
	if s.far.Functions == nil || slices.Contains(s.far.Functions, d.Function()) {
		return nil
	}
	return fmt.Errorf("%w %v of %s; it serves %v", errUnserved, d.Function(), d, s.far.Functions)
}

// Put implements cas.Store. A digest whose function far is known not to serve is cas.ErrInvalid.
func (s *store) Put(ctx context.Context, d cas.Digest, r io.Reader) error {
	if err := s.unserved(d); err != nil {
		return err
	}
	if err := s.near.Store.Put(ctx, d, r); err != nil || d.IsEmpty() {
		return err
	}
	s.brought(d, nil)
	if s.o.config.Policy == WriteBack {
		return s.o.pending.add(entry{blob, s.name, d})
	}
	err := s.copyFar(ctx, d)
	s.sent(d, err)
	return err
}

// PutAll implements cas.Batcher: one batch is one batch far.
func (s *store) PutAll(ctx context.Context, blobs []cas.Blob) []error {
	for _, b := range blobs {
		if s.unserved(b.Digest) != nil {
			return s.putEach(ctx, blobs) // a call names blobs of one function, but for a client's mistake
		}
	}
	errs := cas.PutAll(ctx, s.near.Store, blobs)
	var stored []cas.Blob
	var entries []entry
	var at []int // of stored in blobs
	for i, b := range blobs {
		if errs[i] == nil && !b.Digest.IsEmpty() {
			s.brought(b.Digest, nil)
			stored = append(stored, b)
			entries = append(entries, entry{blob, s.name, b.Digest})
			at = append(at, i)
		}
	}
	if s.o.config.Policy == WriteBack {
		if err := s.o.pending.add(entries...); err != nil {
			for _, i := range at {
				errs[i] = err
			}
		}
		return errs
	}
	for j, err := range cas.PutAll(ctx, s.far.Store, stored) {
		s.sent(stored[j].Digest, err)
		errs[at[j]] = err
	}
	return errs
}

// putEach is PutAll one by one.
func (s *store) putEach(ctx context.Context, blobs []cas.Blob) []error {
	errs := make([]error, len(blobs))
	for i, b := range blobs {
		if errs[i] = s.unserved(b.Digest); errs[i] == nil {
			errs[i] = s.PutAll(ctx, blobs[i:i+1])[0]
		}
	}
	return errs
}

// Record implements cas.ActionCache. Far has the result only if it has, by then, every blob of it: a result
// some of whose blobs are nowhere is recorded near alone. So is one that far does not take, for whatever reason:
// that is a hit less some day, and no cause for an action to fail that has run.
func (s *store) Record(ctx context.Context, action cas.Digest, r *repb.ActionResult) error {
	if err := s.unserved(action); err != nil {
		return err
	}
	if err := s.near.Actions.Record(ctx, action, r); err != nil {
		return err
	}
	if s.o.config.Policy == WriteBack {
		return s.o.pending.add(entry{result, s.name, action})
	}
	if err := s.recordFar(ctx, action, r); err != nil && ctx.Err() == nil {
		s.o.count(func(st *Stats) { st.Refused++ })
		s.o.warn("result is not recorded far", "error", err)
	}
	return ctx.Err()
}

var (
	// errIncomplete says that blobs of a result are nowhere.
	errIncomplete = errors.New("the result is not complete")
	// errGone says that near does not have what was to be sent. That far answers cas.ErrNotFound says nothing of near.
	errGone = errors.New("it is no longer near")
	// errRefused says that far takes no results, or not from here.
	errRefused = errors.New("the result was refused")
)

// gone adds to an error of near that it is errGone if it is. What near finds corrupt it has dropped.
func gone(err error) error {
	if errors.Is(err, cas.ErrNotFound) || errors.Is(err, cas.ErrCorrupt) {
		return fmt.Errorf("%w: %w", errGone, err)
	}
	return err
}

// recordFar sends what far lacks of a result, and then records it there.
func (s *store) recordFar(ctx context.Context, action cas.Digest, r *repb.ActionResult) error {
	ds, err := cas.Closure(ctx, s, action.Function(), r)
	if errors.Is(err, cas.ErrNotFound) || errors.Is(err, cas.ErrInvalid) {
		return fmt.Errorf("action %s: %w: %v", action, errIncomplete, err)
	} else if err != nil {
		return err
	}
	failed := s.send(ctx, ds)
	for _, d := range ds {
		if err := failed[d]; errors.Is(err, errGone) {
			return fmt.Errorf("action %s: %w: blob %s is neither near nor far", action, errIncomplete, d)
		} else if err != nil {
			return err
		}
	}
	err = s.far.Actions.Record(ctx, action, r)
	if errors.Is(err, os.ErrPermission) || errors.Is(err, errors.ErrUnsupported) {
		return fmt.Errorf("%w: %w", errRefused, err)
	}
	return err
}

// copyFar sends one blob.
func (s *store) copyFar(ctx context.Context, d cas.Digest) error {
	r, err := s.near.Store.Open(ctx, d, 0)
	if err != nil {
		return gone(err)
	}
	defer r.Close()
	return s.far.Store.Put(ctx, d, r)
}

// send sends those of ds that far lacks, and returns why those failed that did. One that is not near either is
// errGone.
func (s *store) send(ctx context.Context, ds []cas.Digest) map[cas.Digest]error {
	failed := map[cas.Digest]error{}
	ds = slices.DeleteFunc(slices.Clone(ds), func(d cas.Digest) bool {
		err := s.unserved(d)
		if err != nil {
			failed[d] = err
		}
		return err != nil
	})
	if len(ds) == 0 {
		return failed
	}
	lacking, err := s.far.Store.Missing(ctx, ds)
	if err != nil {
		for _, d := range ds {
			failed[d] = err
		}
		return failed
	}
	var mu sync.Mutex
	ended := func(d cas.Digest, err error) {
		s.sent(d, err)
		mu.Lock()
		defer mu.Unlock()
		if err != nil {
			failed[d] = err
		}
	}
	var group sync.WaitGroup
	defer group.Wait()
	turn := make(chan struct{}, streams)
	var batch []cas.Blob
	var size int64
	flush := func() {
		for i, err := range cas.PutAll(ctx, s.far.Store, batch) {
			ended(batch[i].Digest, err)
		}
		batch, size = nil, 0
	}
	for _, d := range lacking {
		if d.Size() > smallBlob {
			turn <- struct{}{}
			group.Go(func() {
				defer func() { <-turn }()
				ended(d, s.copyFar(ctx, d))
			})
			continue
		}
		data, err := cas.ReadAll(ctx, s.near.Store, d, smallBlob)
		if err != nil {
			ended(d, gone(err))
			continue
		}
		batch = append(batch, cas.Blob{Digest: d, Data: data})
		if size += d.Size(); size > batchBytes {
			flush()
		}
	}
	flush()
	return failed
}
