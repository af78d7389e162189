// SPDX-License-Identifier: Apache-2.0

package overlay

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"sync"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
)

const (
	smallBlob  = 1 << 20 // bytes of a blob that is sent in a batch
	batchBytes = 8 << 20 // of the blobs of a batch, in memory
	streams    = 4       // large blobs that are copied in parallel by one call, or by the sender
)

// checkFunction returns errUnserved if the upstream is known not to serve the digest function of d: a local blob could
// never be sent.
func (s *store) checkFunction(d cas.Digest) error {
	if err := cas.CheckDigests(d); err != nil {
		return err
	}
	if s.upstream.Functions == nil || slices.Contains(s.upstream.Functions, d.Function()) {
		return nil
	}
	return fmt.Errorf("%w %v of %s; it serves %v", errUnserved, d.Function(), d, s.upstream.Functions)
}

// Put implements cas.Store. A digest function that the upstream is known not to serve is cas.ErrInvalid.
func (s *store) Put(ctx context.Context, d cas.Digest, r io.Reader) error {
	s.o.used()
	switch err := s.checkFunction(d); {
	case err != nil:
		return err
	case d.IsEmpty():
		return s.local.Store.Put(ctx, d, r)
	case s.o.config.Policy == WriteBack:
		if err := s.local.Store.Put(ctx, d, r); err != nil {
			return err
		}
		return s.sendLater(d)
	case d.Size() > smallBlob:
		return s.putLarge(ctx, d, r)
	}
	var data bytes.Buffer
	if _, err := data.ReadFrom(io.LimitReader(r, d.Size()+1)); err != nil {
		return err
	}
	if int64(data.Len()) > d.Size() {
		return cas.Mismatch(d, cas.Digest{})
	}
	if err := s.upstream.Store.Put(ctx, d, bytes.NewReader(data.Bytes())); err != nil {
		return err
	}
	s.recordSent(d)
	return s.local.Store.Put(ctx, d, &data)
}

// A healthChecker is an optional interface of an upstream store. Err returns the error with which every call fails
// while the upstream is known to be down, and otherwise nil.
type healthChecker interface{ Err() error }

// unusable reports whether err, of a call of the upstream, says nothing about a blob or result: the upstream does not
// answer, or is known to be down, which includes that it refuses our credentials.
func (o *Overlay) unusable(instance string, err error) bool {
	if err == nil || errors.Is(err, cas.ErrUnavailable) {
		return err != nil
	}
	s, failed := o.store(instance)
	if failed != nil {
		return false
	}
	h, ok := cas.As[healthChecker](s.upstream.Store)
	return ok && h.Err() != nil
}

// putLarge is Put with WriteThrough for a blob that does not fit into memory. The upstream gets it from the local
// store, since the client may be slow or pause: meanwhile, the blob is unsent, and thus missing, unless it was present
// before or another Put has sent it.
func (s *store) putLarge(ctx context.Context, d cas.Digest, r io.Reader) error {
	if h, ok := cas.As[healthChecker](s.upstream.Store); ok {
		if err := h.Err(); err != nil {
			return fmt.Errorf("store blob %s: %w", d, err) // before the client sends it
		}
	}
	k := key{s.name, d}
	room, err := s.o.unsent.begin(k, s.present(ctx, d))
	if err != nil {
		return err
	}
	if !room { // a copy that nobody remembers as unsent must not become visible
		if err := s.upstream.Store.Put(ctx, d, r); err != nil {
			return err
		}
		s.recordSent(d)
		return nil
	}
	defer s.o.unsent.end(k)
	if err := s.local.Store.Put(ctx, d, r); err != nil {
		return err
	}
	s.o.unsent.stored(k)
	return s.o.await(ctx, s.upload(k))
}

// present reports whether d is local and not missing. It renews the lease of d.
func (s *store) present(ctx context.Context, d cas.Digest) bool {
	ds := []cas.Digest{d}
	absent, err := s.local.Store.Missing(ctx, ds)
	// If another Put stores d meanwhile, it has been marked before it is local.
	return err == nil && len(absent) == 0 && len(s.suspect(ds, ds)) == 0
}

// upload returns the running upload of k, or starts one: over a slow connection it takes longer than clients wait, and
// their next attempts join it. If it is cancelled, the blob remains unsent. The caller waits for it.
func (s *store) upload(k key) *transfer {
	s.o.mu.Lock()
	defer s.o.mu.Unlock()
	if u := s.o.uploads[k]; u != nil {
		u.join()
		return u
	}
	u := &transfer{done: make(chan struct{}), waiters: 1, orphans: &s.o.abandoned}
	if s.o.closed {
		u.err, u.over = errClosed, true
		close(u.done)
		return u
	}
	ctx, cancel := context.WithCancel(s.o.ctx)
	u.cancel = cancel
	s.o.uploads[k] = u
	u.unindex = func() {
		if s.o.uploads[k] == u {
			delete(s.o.uploads, k)
		}
	}
	s.o.work.Go(func() {
		defer cancel()
		u.err = s.copyUpstream(ctx, k.digest, unpaced)
		// A Put that stores its local copy after recordSent must not join this upload: nothing would strike out its
		// record.
		s.o.end(u)
		if u.err == nil {
			s.recordSent(k.digest)
		}
		close(u.done)
	})
	return u
}

// sendLater makes the local blobs ds pending. It keeps ds.
func (s *store) sendLater(ds ...cas.Digest) error {
	if err := s.o.pending.add(blob, s.name, ds...); err != nil {
		s.notQueued(ds...)
		return err
	}
	s.readable(ds...)
	s.o.unsent.sent(s.name, ds...) // an earlier WriteThrough could not send them; now the journal has them
	return nil
}

// recordSent records that the upstream has received d.
func (s *store) recordSent(d cas.Digest) {
	s.o.recent.add(key{s.name, d}) // first: see unsent.lost
	s.o.unsent.sent(s.name, d)
	s.o.uses.renewed(blob, s.name, d)
	s.readable(d)
	if s.o.leftover() {
		s.o.pending.drop(s.name, d)
	}
}

// PutAll implements cas.Batcher. A batch is one batch in the upstream.
func (s *store) PutAll(ctx context.Context, blobs []cas.Blob) []error {
	s.o.used()
	for _, b := range blobs {
		if s.checkFunction(b.Digest) != nil {
			return s.putEach(ctx, blobs) // rare: the blobs of a call usually have one function
		}
	}
	if s.o.config.Policy == WriteThrough {
		return s.putAllThrough(ctx, blobs)
	}
	errs := cas.PutAll(ctx, s.local.Store, blobs)
	stored := make([]cas.Digest, 0, len(blobs))
	for i, b := range blobs {
		if errs[i] == nil && !b.Digest.IsEmpty() {
			stored = append(stored, b.Digest)
		}
	}
	if err := s.sendLater(stored...); err != nil {
		for i, b := range blobs {
			if errs[i] == nil && !b.Digest.IsEmpty() {
				errs[i] = err
			}
		}
	}
	return errs
}

// putAllThrough is PutAll with WriteThrough.
func (s *store) putAllThrough(ctx context.Context, blobs []cas.Blob) []error {
	errs := make([]error, len(blobs))
	put := func(store cas.Store, skip func(i int) bool) {
		var some []cas.Blob
		var at []int // of some in blobs
		for i, b := range blobs {
			if !skip(i) {
				some, at = append(some, b), append(at, i)
			}
		}
		for j, err := range cas.PutAll(ctx, store, some) {
			errs[at[j]] = err
		}
	}
	put(s.upstream.Store, func(i int) bool { return blobs[i].Digest.IsEmpty() })
	for i, b := range blobs {
		if errs[i] == nil && !b.Digest.IsEmpty() {
			s.recordSent(b.Digest)
		}
	}
	put(s.local.Store, func(i int) bool { return errs[i] != nil })
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

// Record implements cas.ActionCache. The upstream gets a result only after all of its blobs. A result whose blobs are
// in neither store is only recorded locally. So is one that the upstream does not accept: a later cache miss is better
// than the failure of an action that has run.
func (s *store) Record(ctx context.Context, action cas.Digest, r *repb.ActionResult) error {
	if err := s.checkFunction(action); err != nil {
		return err
	}
	if err := s.local.Actions.Record(ctx, action, r); err != nil {
		return err
	}
	if s.o.config.Policy == WriteBack {
		if err := s.o.pending.add(result, s.name, action); err != nil {
			s.resultNotQueued(action)
			return err
		}
		return nil
	}
	if err := s.recordUpstream(ctx, action, r, func([]cas.Digest) error { return nil }); err != nil && ctx.Err() == nil {
		s.o.count(func(st *Stats) { st.Refused++ })
		s.o.warn("the upstream does not record results", "err", err)
	}
	return ctx.Err()
}

var (
	errUnserved   = fmt.Errorf("%w: the upstream does not serve the digest function", cas.ErrInvalid)
	errIncomplete = errors.New("the result is not complete")
	errRefused    = errors.New("the upstream records no results")
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

// A background store is used by the sender.
type background struct{ *store }

// Open implements cas.Store.
func (s background) Open(ctx context.Context, d cas.Digest, off int64) (io.ReadCloser, error) {
	return s.open(ctx, d, off)
}

// recordUpstream sends the blobs of a result that are absent from the upstream, and then records it there. If check
// returns an error for the blobs, recordUpstream only returns this error.
func (s *store) recordUpstream(
	ctx context.Context, action cas.Digest, r *repb.ActionResult, check func(ds []cas.Digest) error,
) error {
	ds, err := cas.Closure(ctx, background{s}, action.Function(), r)
	if errors.Is(err, cas.ErrNotFound) || errors.Is(err, cas.ErrInvalid) {
		return fmt.Errorf("action %s: %w: %v", action, errIncomplete, err)
	} else if err != nil {
		return err
	}
	if err := check(ds); err != nil {
		return err
	}
	failed := s.sendMissing(ctx, ds)
	for _, d := range ds {
		if err := failed[d]; errors.Is(err, errLost) {
			return fmt.Errorf("action %s: %w: blob %s is neither in the local store nor in the upstream", action,
				errIncomplete, d)
		} else if err != nil {
			return err
		}
	}
	err = s.upstream.Actions.Record(ctx, action, r)
	if errors.Is(err, errors.ErrUnsupported) {
		return fmt.Errorf("%w: %w", errRefused, err)
	}
	return err
}

// unpaced is a reader without rests.
func unpaced(r io.Reader) io.Reader { return r }

// copyUpstream copies one blob from the local store, read through paced, to the upstream.
func (s *store) copyUpstream(ctx context.Context, d cas.Digest, paced func(io.Reader) io.Reader) error {
	r, err := s.local.Store.Open(ctx, d, 0)
	if err != nil {
		return lostIfAbsent(err)
	}
	defer r.Close()
	return s.upstream.Store.Put(ctx, d, paced(r))
}

// sendMissing is send for the blobs of ds that are absent from the upstream.
func (s *store) sendMissing(ctx context.Context, ds []cas.Digest) map[cas.Digest]error {
	if ds = s.o.recent.without(s.name, ds); len(ds) == 0 {
		return nil
	}
	missing, err := s.upstream.Store.Missing(ctx, ds)
	if err != nil {
		failed := map[cas.Digest]error{}
		for _, d := range ds {
			failed[d] = err
		}
		return failed
	}
	return s.send(ctx, missing, unpaced)
}

// send copies the local blobs ds to the upstream, large ones read through paced, and returns the errors. It does not
// query first which are absent. A blob that is not local is errLost.
func (s *store) send(ctx context.Context, ds []cas.Digest, paced func(io.Reader) io.Reader) map[cas.Digest]error {
	failed := map[cas.Digest]error{}
	var mu sync.Mutex
	ended := func(d cas.Digest, err error) {
		if err == nil {
			s.recordSent(d)
			return
		}
		mu.Lock()
		defer mu.Unlock()
		failed[d] = err
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
	for _, d := range ds {
		if err := s.checkFunction(d); err != nil {
			ended(d, err)
			continue
		}
		if d.Size() > smallBlob {
			slots <- struct{}{}
			group.Go(func() {
				defer func() { <-slots }()
				ended(d, s.copyUpstream(ctx, d, paced))
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
