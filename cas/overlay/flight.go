// SPDX-License-Identifier: Apache-2.0

package overlay

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"github.com/cloister-build/cloister/cas"
)

// maxOrphans limits the flights, and the uploads, that continue without waiters: a client that gives up on a large blob
// returns, and should then find progress. Each upload has a local file open.
const maxOrphans = 16

// A transfer copies blobs from one store to the other, for all concurrent callers that wait for it. Without waiters it
// continues as an orphan. If there are maxOrphans already, it is cancelled instead.
type transfer struct {
	cancel  context.CancelFunc
	unindex func()        // prevents others from joining it; the caller holds Overlay.mu
	done    chan struct{} // closed when err is set
	err     error
	waiters int  // guarded by Overlay.mu
	orphans *int // guarded by Overlay.mu; number of its kind

	orphan, over bool // guarded by Overlay.mu
}

// join adds a waiter. The caller holds o.mu.
func (t *transfer) join() {
	t.waiters++
	t.adopt()
}

// adopt clears the orphan state of t. The caller holds o.mu.
func (t *transfer) adopt() {
	if t.orphan {
		t.orphan = false
		*t.orphans--
	}
}

// await waits for t and returns its error, or that of ctx.
func (o *Overlay) await(ctx context.Context, t *transfer) error {
	defer func() {
		o.mu.Lock()
		defer o.mu.Unlock()
		if t.waiters--; t.waiters > 0 || t.over {
			return
		}
		if *t.orphans < maxOrphans {
			t.orphan = true
			*t.orphans++
			return
		}
		t.unindex()
		t.cancel()
	}()
	select {
	case <-t.done:
		return t.err
	case <-ctx.Done():
		return ctx.Err()
	}
}

// end keeps others from joining t and from making it an orphan.
func (o *Overlay) end(t *transfer) {
	o.mu.Lock()
	defer o.mu.Unlock()
	t.unindex()
	t.adopt()
	t.over = true
}

// A flight is a transfer from the upstream to the local store.
type flight struct {
	transfer
	blobs   []cas.Digest
	ctx     context.Context
	skip    func()       // ends its wait for a slot of the call that started it
	absent  []cas.Digest // with err: the blobs that are absent from the upstream, if known
	running bool         // guarded by Overlay.mu
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
		err := s.o.await(ctx, &f.transfer)
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
		others = worse(others, s.o.await(ctx, &f.transfer))
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
	return s.o.await(ctx, &append(started, joined...)[0].transfer)
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
			f.join()
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
		transfer: transfer{done: make(chan struct{}), waiters: 1, orphans: &s.o.orphans},
		blobs:    blobs, skip: sync.OnceFunc(func() { close(skip) }), running: slots == nil,
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
	f.unindex = func() {
		for _, d := range blobs {
			if k := (key{s.name, d}); s.o.flights[k] == f {
				delete(s.o.flights, k)
			}
		}
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
		s.o.end(&f.transfer)
		f.cancel()
		close(f.done)
	})
	return f
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
