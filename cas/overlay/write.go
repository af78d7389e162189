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
	smallBlob  = 1 << 20 // bytes of a blob that is sent in a batch
	batchBytes = 8 << 20 // of the blobs of a batch, in memory
	streams    = 4       // large blobs that are copied in parallel by one call
)

// checkFunction returns errUnserved if the upstream is known not to serve the digest function of d: a local blob could
// never be sent.
func (s *store) checkFunction(d cas.Digest) error {
	if s.upstream.Functions == nil || slices.Contains(s.upstream.Functions, d.Function()) {
		return nil
	}
	return fmt.Errorf("%w %v of %s; it serves %v", errUnserved, d.Function(), d, s.upstream.Functions)
}

// Put implements cas.Store. A digest function that the upstream is known not to serve is cas.ErrInvalid.
func (s *store) Put(ctx context.Context, d cas.Digest, r io.Reader) error {
	if err := s.checkFunction(d); err != nil {
		return err
	}
	if err := s.local.Store.Put(ctx, d, r); err != nil || d.IsEmpty() {
		return err
	}
	s.recordFetch(d, nil)
	if s.o.config.Policy == WriteBack {
		return s.o.pending.add(entry{blob, s.name, d})
	}
	err := s.copyUpstream(ctx, d)
	s.recordSend(d, err)
	return err
}

// PutAll implements cas.Batcher. A batch is one batch in the upstream.
func (s *store) PutAll(ctx context.Context, blobs []cas.Blob) []error {
	for _, b := range blobs {
		if s.checkFunction(b.Digest) != nil {
			return s.putEach(ctx, blobs) // rare: the blobs of a call usually have one function
		}
	}
	errs := cas.PutAll(ctx, s.local.Store, blobs)
	var stored []cas.Blob
	var entries []entry
	var at []int // of stored in blobs
	for i, b := range blobs {
		if errs[i] == nil && !b.Digest.IsEmpty() {
			s.recordFetch(b.Digest, nil)
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
	for j, err := range cas.PutAll(ctx, s.upstream.Store, stored) {
		s.recordSend(stored[j].Digest, err)
		errs[at[j]] = err
	}
	return errs
}

// putEach is PutAll with one call for each blob.
func (s *store) putEach(ctx context.Context, blobs []cas.Blob) []error {
	errs := make([]error, len(blobs))
	for i, b := range blobs {
		if errs[i] = s.checkFunction(b.Digest); errs[i] == nil {
			errs[i] = s.PutAll(ctx, blobs[i:i+1])[0]
		}
	}
	return errs
}

// Record implements cas.ActionCache. The upstream gets a result only after all of its blobs. A result with blobs that
// are nowhere is only recorded locally. So is one that the upstream does not accept, since a later cache miss is better
// than the failure of an action that has run.
func (s *store) Record(ctx context.Context, action cas.Digest, r *repb.ActionResult) error {
	if err := s.checkFunction(action); err != nil {
		return err
	}
	if err := s.local.Actions.Record(ctx, action, r); err != nil {
		return err
	}
	if s.o.config.Policy == WriteBack {
		return s.o.pending.add(entry{result, s.name, action})
	}
	if err := s.recordUpstream(ctx, action, r); err != nil && ctx.Err() == nil {
		s.o.count(func(st *Stats) { st.Refused++ })
		s.o.warn("the upstream does not record results", "error", err)
	}
	return ctx.Err()
}

var (
	errUnserved   = fmt.Errorf("%w: the upstream does not serve the digest function", cas.ErrInvalid)
	errIncomplete = errors.New("the result is not complete")
	errRefused    = errors.New("the upstream refused the result")
	// errLost is an error of the local store. A cas.ErrNotFound of the upstream does not wrap it.
	errLost = errors.New("it is no longer in the local store")
)

// lostIfAbsent wraps an error of the local store in errLost if the blob is lost. The local store drops corrupt blobs.
func lostIfAbsent(err error) error {
	if absentOrCorrupt(err) {
		return fmt.Errorf("%w: %w", errLost, err)
	}
	return err
}

// recordUpstream sends the blobs of a result that are absent from the upstream, and then records it there.
func (s *store) recordUpstream(ctx context.Context, action cas.Digest, r *repb.ActionResult) error {
	ds, err := cas.Closure(ctx, s, action.Function(), r)
	if errors.Is(err, cas.ErrNotFound) || errors.Is(err, cas.ErrInvalid) {
		return fmt.Errorf("action %s: %w: %v", action, errIncomplete, err)
	} else if err != nil {
		return err
	}
	failed := s.send(ctx, ds)
	for _, d := range ds {
		if err := failed[d]; errors.Is(err, errLost) {
			return fmt.Errorf("action %s: %w: blob %s is neither in the local store nor in the upstream", action,
				errIncomplete, d)
		} else if err != nil {
			return err
		}
	}
	err = s.upstream.Actions.Record(ctx, action, r)
	if errors.Is(err, os.ErrPermission) || errors.Is(err, errors.ErrUnsupported) {
		return fmt.Errorf("%w: %w", errRefused, err)
	}
	return err
}

// copyUpstream copies one blob from the local store to the upstream.
func (s *store) copyUpstream(ctx context.Context, d cas.Digest) error {
	r, err := s.local.Store.Open(ctx, d, 0)
	if err != nil {
		return lostIfAbsent(err)
	}
	defer r.Close()
	return s.upstream.Store.Put(ctx, d, r)
}

// send copies the blobs ds that are absent from the upstream, and returns the errors. A blob that is not local either
// is errLost.
func (s *store) send(ctx context.Context, ds []cas.Digest) map[cas.Digest]error {
	failed := map[cas.Digest]error{}
	ds = slices.DeleteFunc(slices.Clone(ds), func(d cas.Digest) bool {
		err := s.checkFunction(d)
		if err != nil {
			failed[d] = err
		}
		return err != nil
	})
	if len(ds) == 0 {
		return failed
	}
	missing, err := s.upstream.Store.Missing(ctx, ds)
	if err != nil {
		for _, d := range ds {
			failed[d] = err
		}
		return failed
	}
	var mu sync.Mutex
	ended := func(d cas.Digest, err error) {
		s.recordSend(d, err)
		mu.Lock()
		defer mu.Unlock()
		if err != nil {
			failed[d] = err
		}
	}
	var group sync.WaitGroup
	defer group.Wait()
	slots := make(chan struct{}, streams)
	var batch []cas.Blob
	var size int64
	flush := func() {
		for i, err := range cas.PutAll(ctx, s.upstream.Store, batch) {
			ended(batch[i].Digest, err)
		}
		batch, size = nil, 0
	}
	for _, d := range missing {
		if d.Size() > smallBlob {
			slots <- struct{}{}
			group.Go(func() {
				defer func() { <-slots }()
				ended(d, s.copyUpstream(ctx, d))
			})
			continue
		}
		data, err := cas.ReadAll(ctx, s.local.Store, d, smallBlob)
		if err != nil {
			ended(d, lostIfAbsent(err))
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
