// SPDX-License-Identifier: Apache-2.0

package overlay

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"github.com/cloister-build/cloister/cas"
)

// maxOrphans limits the flights that continue without waiters: a client that gives up on a large blob returns, and
// should then find progress.
const maxOrphans = 16

// A flight copies blobs from the upstream to the local store, for all concurrent callers that need one of them. Without
// waiters it continues as an orphan, or ends if there are too many orphans.
type flight struct {
	blobs   []cas.Digest
	ctx     context.Context
	cancel  context.CancelFunc
	skip    func()        // ends its wait for a slot of the call that started it
	done    chan struct{} // closed when err is set
	err     error
	absent  []cas.Digest // with err: the blobs that are absent from the upstream, if known
	waiters int          // guarded by Overlay.mu

	running, orphan, over bool // guarded by Overlay.mu
}

// fetch copies blobs to the local store. It returns the error of the flights it started, and that of the flights of
// other calls it joined. A blob that is absent from the upstream is not an error: fetch adds it to upstreamLacks.
func (s *store) fetch(ctx context.Context, ds []cas.Digest, upstreamLacks map[cas.Digest]bool) (own, others error) {
	own, others = s.tryFetch(ctx, ds, upstreamLacks)
	if own != nil || others == nil || ctx.Err() != nil {
		return own, others
	}
	// The blob that failed another call's flight need not be one of ds.
	rest, err := s.local.Store.Missing(ctx, ds)
	if err != nil {
		return err, nil
	}
	return s.tryFetch(ctx, rest, upstreamLacks)
}

// tryFetch is fetch without a second attempt.
func (s *store) tryFetch(ctx context.Context, ds []cas.Digest, upstreamLacks map[cas.Digest]bool) (own, others error) {
	started, joined := s.join(ds)
	for _, f := range started {
		err := s.wait(ctx, f)
		own = worse(own, err)
		if err != nil && !errors.Is(err, cas.ErrNotFound) {
			continue
		}
		// A joined flight may have missed a blob that was put since.
		for _, d := range f.absent {
			upstreamLacks[d] = true
		}
	}
	for _, f := range joined {
		others = worse(others, s.wait(ctx, f))
	}
	return own, others
}

// worse returns the more severe error. An absent blob is no error, and a corrupt one is less severe than others.
func worse(a, b error) error {
	if errors.Is(b, cas.ErrNotFound) || a != nil && (b == nil || !absentOrCorrupt(a)) {
		return a
	}
	return b
}

// fetchOne copies one blob to the local store. A blob that is absent from the upstream is cas.ErrNotFound.
func (s *store) fetchOne(ctx context.Context, d cas.Digest) error {
	started, joined := s.join([]cas.Digest{d})
	return s.wait(ctx, append(started, joined...)[0])
}

// join starts flights for the blobs of ds that are in none, and returns them and the others. The caller waits for each.
// A large blob has its own flight, so that other callers can join it. A call for a single blob does not join a flight
// of many: it would wait for all of them, and fail with any.
func (s *store) join(ds []cas.Digest) (started, joined []*flight) {
	s.o.mu.Lock()
	defer s.o.mu.Unlock()
	var small []cas.Digest
	seen := map[*flight]bool{}
	slots := make(chan struct{}, streams)
	for _, d := range ds {
		f := s.o.flights[key{s.name, d}]
		switch {
		case f != nil && seen[f]:
		case f != nil && (len(ds) > 1 || len(f.blobs) == 1):
			seen[f] = true
			f.waiters++
			s.o.adopt(f)
			joined = append(joined, f)
			if !f.running {
				s.hasten(f, slots)
			}
		case d.Size() > smallBlob:
			f := s.start([]cas.Digest{d}, slots)
			seen[f] = true // d may be listed again
			started = append(started, f)
		default:
			small = append(small, d)
		}
	}
	if len(small) > 0 {
		started = append(started, s.start(small, nil))
	}
	return started, joined
}

// hasten runs f as soon as slots has room, since the call that started f may have many flights before it. The caller
// holds s.o.mu.
func (s *store) hasten(f *flight, slots chan struct{}) {
	s.o.work.Go(func() {
		select {
		case slots <- struct{}{}:
			f.skip()
			<-f.done
			<-slots
		case <-f.done:
		}
	})
}

// start starts a flight, which waits for room in slots unless that is nil. The caller holds s.o.mu.
func (s *store) start(blobs []cas.Digest, slots chan struct{}) *flight {
	skip := make(chan struct{})
	f := &flight{
		blobs: blobs, skip: sync.OnceFunc(func() { close(skip) }), done: make(chan struct{}),
		waiters: 1, running: slots == nil,
	}
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
		if slots != nil {
			select {
			case slots <- struct{}{}:
				defer func() { <-slots }()
			case <-skip:
			case <-f.ctx.Done():
			}
			s.o.mu.Lock()
			f.running = true
			s.o.mu.Unlock()
		}
		f.err = s.run(f)
		if s.o.ctx.Err() != nil {
			f.err = errClosed
		}
		s.o.mu.Lock()
		s.unindex(f)
		s.o.adopt(f)
		f.over = true
		s.o.mu.Unlock()
		f.cancel()
		close(f.done)
	})
	return f
}

// adopt clears the orphan state of f. The caller holds o.mu.
func (o *Overlay) adopt(f *flight) {
	if f.orphan {
		f.orphan = false
		o.orphans--
	}
}

// unindex prevents others from joining f. The caller holds s.o.mu.
func (s *store) unindex(f *flight) {
	for _, d := range f.blobs {
		if k := (key{s.name, d}); s.o.flights[k] == f {
			delete(s.o.flights, k)
		}
	}
}

// wait waits for f and returns its error.
func (s *store) wait(ctx context.Context, f *flight) error {
	defer func() {
		s.o.mu.Lock()
		defer s.o.mu.Unlock()
		if f.waiters--; f.waiters > 0 || f.over {
			return
		}
		if s.o.orphans < maxOrphans {
			f.orphan = true
			s.o.orphans++
			return
		}
		s.unindex(f)
		f.cancel()
	}()
	select {
	case <-f.done:
		return f.err
	case <-ctx.Done():
		return ctx.Err()
	}
}

// run copies the blobs of f. An absent blob is cas.ErrNotFound if it is the only one, and otherwise no error.
func (s *store) run(f *flight) error {
	blobs := f.blobs
	copier, ok := cas.As[copier](s.upstream.Store)
	if ok && len(f.blobs) > 1 {
		absent, err := copier.Fetch(f.ctx, s.local.Store, f.blobs)
		if err == nil {
			s.recordCopies(f, absent)
			return nil
		}
		if errors.Is(err, cas.ErrFull) || errors.Is(err, cas.ErrThrottled) {
			return err
		}
		if _, down := s.upstream.Store.Missing(f.ctx, f.blobs[:1]); down != nil {
			return err
		}
		// One unreadable blob may have ended the call. Copying the rest individually finds out which.
		if blobs, err = s.local.Store.Missing(f.ctx, f.blobs); err != nil {
			return err
		}
	}
	for _, d := range blobs {
		err := s.copyLocal(f.ctx, d)
		if errors.Is(err, cas.ErrNotFound) {
			f.absent = append(f.absent, d)
		}
		if err != nil && (len(f.blobs) == 1 || !errors.Is(err, cas.ErrNotFound)) {
			return err
		}
	}
	return nil
}

// recordCopies records the result of a call of copier.Fetch for f.
func (s *store) recordCopies(f *flight, absent []cas.Digest) {
	f.absent = absent
	s.o.count(func(st *Stats) { st.Fetched += int64(len(f.blobs) - len(absent)) })
	for _, d := range f.blobs {
		var err error
		if len(absent) > 0 && d == absent[0] { // they are in order
			err, absent = cas.ErrNotFound, absent[1:]
		}
		s.recordFetch(d, err)
	}
}

// copyLocal copies one blob from the upstream to the local store, which verifies it.
func (s *store) copyLocal(ctx context.Context, d cas.Digest) error {
	r, err := s.openUpstream(ctx, d, 0)
	if err != nil {
		return err
	}
	defer r.Close()
	// The local store may not wrap the error of the reader.
	if err = s.local.Store.Put(ctx, d, r); r.err != nil {
		err = r.err
	}
	if err != nil {
		return fmt.Errorf("copy blob %s from the upstream: %w", d, err)
	}
	s.recordFetch(d, nil)
	s.o.count(func(st *Stats) { st.Fetched++ })
	return nil
}
