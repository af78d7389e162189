// SPDX-License-Identifier: Apache-2.0

package casserver

import (
	"context"
	"errors"
	"fmt"
	"io"
	"runtime/debug"
	"sync"
	"sync/atomic"
	"time"

	"github.com/cloister-build/cloister/cas"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

const (
	// keepUploads is how many uploads wait for a stream that goes on with them; one more, and the one that has waited
	// longest is dropped.
	keepUploads = 64
	// keepUpload is how long one waits.
	keepUpload = 10 * time.Minute
	// keepShare is which part of the largest blob that is taken all of them may have brought together, so that what
	// actions write and others upload finds room beside them; the newest waits whatever it has brought.
	keepShare = 8
)

// Why an upload ended that no stream ended.
var (
	// errTaken is the answer to a stream in whose place another goes on: most often its client's own, after a
	// connection that the server does not know to be lost yet.
	errTaken   = status.Error(codes.Aborted, "upload: another stream of the same upload has taken the place of this one")
	errStopped = fmt.Errorf("%w: the server stops", cas.ErrUnavailable)
	errAnew    = errors.New("upload: it was begun anew")
	errDropped = errors.New("upload: it was waiting for its client too long")
)

// An uploadKey names an upload: a client may use one UUID for several blobs.
type uploadKey struct {
	instance, upload string
	digest           cas.Digest
}

// uploads are those that come in more than one message, and so may break off and go on in another stream. The
// Store.Put of each runs in a goroutine of its own and reads one stream after the other; between them it waits. So
// what has arrived lies where the store has put it, and no second copy is kept.
type uploads struct {
	mu     sync.Mutex
	all    map[uploadKey]*session // guarded by mu
	parted uint64                 // guarded by mu; how many streams have broken off
	closed bool                   // guarded by mu

	most    int64          // bytes of those that wait
	running sync.WaitGroup // of the sessions
}

// newUploads returns none, of blobs of up to maxBlob bytes.
func newUploads(maxBlob int64) *uploads {
	return &uploads{all: map[uploadKey]*session{}, most: maxBlob / keepShare}
}

// A session is one upload.
type session struct {
	uploads   *uploads
	key       uploadKey
	cancel    context.CancelCauseFunc
	ctx       context.Context // of Put
	committed atomic.Int64    // bytes that Put has read
	next      chan *turn      // to go on with; holds one

	turn  *turn  // guarded by uploads.mu; nil while it waits for one
	told  int64  // guarded by uploads.mu; the least that was told of committed since the turn came; 0: nobody has asked
	since uint64 // guarded by uploads.mu; when it began to wait, in streams that broke off

	now    *turn // Put's own
	failed error // Put's own; what ended the data if not io.EOF

	done     chan struct{} // closed when Put has returned
	err      error         // of Put, then
	panicked any           // of Put, then
}

// A turn is the part of an upload that one stream brings.
type turn struct {
	upload *upload
	left   chan struct{} // closed when the session looks at it no more, and waits for another
	taken  chan struct{} // closed when it is to give place
	gives  bool          // guarded by uploads.mu; taken is closed
	gone   bool          // guarded by uploads.mu; its stream has ended
}

// write has the stream of u begin the upload of key, or go on with it, and returns when that is stored or the stream
// has ended. From when it has lent u, that is the session's.
func (us *uploads) write(ctx context.Context, store cas.Store, key uploadKey, u *upload) error {
	t := &turn{upload: u, left: make(chan struct{}), taken: make(chan struct{})}
	s, err := us.join(ctx, store, key, t)
	if s == nil {
		return err
	}
	u.lent = true
	select {
	case <-t.taken:
		return us.why()
	case <-t.left:
		return u.err
	case <-ctx.Done():
		// Either the session finds the stream broken, and waits for another, or all has come, and the store may take its
		// time over it: nobody is held up by that who stops the server, and a client that comes back finds it.
		us.abandon(s, t)
		return ctx.Err()
	case <-s.done:
	}
	if s.panicked != nil {
		panic(s.panicked)
	}
	return s.err
}

// join returns the session that t is a turn of from now on, or nil with the result of the upload.
func (us *uploads) join(ctx context.Context, store cas.Store, key uploadKey, t *turn) (*session, error) {
	off := t.upload.message.WriteOffset
	us.mu.Lock()
	defer us.mu.Unlock()
	for {
		s := us.all[key]
		switch {
		case us.closed:
			return nil, errStopped
		case s == nil && off != 0:
			return nil, fmt.Errorf("%w write: write_offset is %d, and nothing is kept of this upload; begin at offset 0", cas.ErrInvalid, off)
		case s == nil:
			return us.begin(ctx, store, key, t), nil
		case s.turn != nil:
			s.turn.give()
			if over, err := us.await(ctx, s, s.turn); over || err != nil {
				return nil, err
			}
		case s.goesOn(off):
			t.upload.offset, t.upload.skip = off, s.committed.Load()-off
			s.turn, s.told = t, 0
			s.next <- t
			return s, nil
		case off == 0:
			us.drop(s, errAnew)
		default:
			return nil, fmt.Errorf("%w write: write_offset is %d, and %d bytes of this upload are kept; go on at offset %[3]d, or begin at offset 0",
				cas.ErrInvalid, off, s.committed.Load())
		}
	}
}

// goesOn reports whether a stream may go on at off with what waits: where it ended or, since what the last stream
// brought may have been read only after its client had asked how far that was, where that was told to be. The caller
// holds uploads.mu.
func (s *session) goesOn(off int64) bool {
	committed := s.committed.Load()
	return off == committed || s.told > 0 && off >= s.told && off < committed
}

// begin starts a session. The caller holds us.mu.
func (us *uploads) begin(ctx context.Context, store cas.Store, key uploadKey, t *turn) *session {
	s := &session{uploads: us, key: key, next: make(chan *turn, 1), turn: t, now: t, done: make(chan struct{})}
	s.ctx, s.cancel = context.WithCancelCause(context.WithoutCancel(ctx))
	us.all[key] = s
	us.running.Go(func() { s.run(store) })
	return s
}

// await waits until s waits for another turn than t, or has ended: over says that the blob is stored. The caller holds
// us.mu, and does not meanwhile.
func (us *uploads) await(ctx context.Context, s *session, t *turn) (over bool, err error) {
	us.mu.Unlock()
	defer us.mu.Lock()
	select {
	case <-t.left:
	case <-s.done:
		return s.err == nil && s.panicked == nil, nil
	case <-ctx.Done():
		return false, ctx.Err()
	}
	return false, nil
}

// give has the stream of a turn end. The caller holds uploads.mu.
func (t *turn) give() {
	if !t.gives {
		t.gives = true
		close(t.taken)
	}
}

// why returns the error of a stream that had to give place.
func (us *uploads) why() error {
	us.mu.Lock()
	defer us.mu.Unlock()
	if us.closed {
		return errStopped
	}
	return errTaken
}

// abandon has s wait without the stream of its turn t, which has ended, for as long as one that broke off.
func (us *uploads) abandon(s *session, t *turn) {
	us.mu.Lock()
	defer us.mu.Unlock()
	if s.turn != t {
		return
	}
	t.gone = true
	us.parted++
	s.since = us.parted
	us.dropOldest(s)
	timer := time.AfterFunc(keepUpload, func() {
		us.mu.Lock()
		defer us.mu.Unlock()
		if s.turn == t {
			us.drop(s, errDropped)
		}
	})
	context.AfterFunc(s.ctx, func() { timer.Stop() }) // it holds the stream
}

// waits reports whether no stream brings anything. The caller holds uploads.mu.
func (s *session) waits() bool { return s.turn == nil || s.turn.gone }

// drop ends a session of which nobody holds a stream. The caller holds us.mu.
func (us *uploads) drop(s *session, why error) {
	us.forget(s)
	s.cancel(why)
}

// forget has the key of s free for another. The caller holds us.mu.
func (us *uploads) forget(s *session) {
	if us.all[s.key] == s {
		delete(us.all, s.key)
	}
}

// dropWaiting ends all sessions that wait, since the room that they hold is needed.
func (us *uploads) dropWaiting() {
	us.mu.Lock()
	defer us.mu.Unlock()
	for _, s := range us.all {
		if s.waits() {
			us.drop(s, errDropped)
		}
	}
}

// committed returns how many bytes have arrived of an upload, where its client may go on; ok is false if nothing is
// known of it.
func (us *uploads) committed(key uploadKey) (n int64, ok bool) {
	us.mu.Lock()
	defer us.mu.Unlock()
	s, ok := us.all[key]
	if !ok {
		return 0, false
	}
	n = s.committed.Load()
	if s.told == 0 {
		s.told = n
	}
	return n, true
}

// close ends all sessions, waits for them, and refuses others.
func (us *uploads) close() {
	us.mu.Lock()
	us.closed = true
	for _, s := range us.all {
		if s.turn != nil {
			s.turn.give() // what a stream waits for, the context does not end
		}
		s.cancel(errStopped)
	}
	us.mu.Unlock()
	us.running.Wait()
}

// run is the session's goroutine.
func (s *session) run(store cas.Store) {
	defer func() {
		if p := recover(); p != nil {
			s.panicked = fmt.Sprintf("%v\n%s", p, debug.Stack())
		}
		s.now.upload.message.release()
		s.uploads.mu.Lock()
		s.uploads.forget(s)
		s.uploads.mu.Unlock()
		s.cancel(nil)
		close(s.done)
	}()
	s.err = store.Put(s.ctx, s.key.digest, s)
	switch why := context.Cause(s.ctx); {
	case s.err == nil:
	case why != nil:
		s.err = why
	case s.failed != nil:
		s.err = s.failed // the store saw no other, but may have wrapped it in words of its own
	}
}

// Read implements io.Reader, for Put: what one stream brings, and then another.
func (s *session) Read(p []byte) (int, error) {
	for s.failed == nil {
		n, err := s.now.upload.Read(p)
		s.committed.Add(int64(n))
		if err == nil || err == io.EOF {
			return n, err
		}
		if s.failed = err; s.now.upload.broken {
			s.failed = s.wait(err)
		}
	}
	return 0, s.failed
}

// wait gives back the turn, whose stream broke off by err, and returns nil when there is another.
func (s *session) wait(err error) error {
	if !s.uploads.park(s) {
		return err
	}
	timer := time.NewTimer(keepUpload)
	defer timer.Stop()
	select {
	case s.now = <-s.next:
		return nil
	case <-timer.C:
	case <-s.ctx.Done():
		return context.Cause(s.ctx)
	}
	s.uploads.mu.Lock()
	defer s.uploads.mu.Unlock()
	if s.turn != nil {
		s.now = <-s.next // it came at the last moment
		return nil
	}
	s.uploads.drop(s, errDropped)
	return errDropped
}

// park has s wait for another turn, and another session end if too many do; ok is false if s is not kept.
func (us *uploads) park(s *session) (ok bool) {
	us.mu.Lock()
	defer us.mu.Unlock()
	if us.closed || s.committed.Load() == 0 || s.ctx.Err() != nil {
		return false
	}
	us.parted++
	s.since = us.parted
	close(s.turn.left)
	s.turn = nil
	us.dropOldest(s)
	return true
}

// dropOldest drops uploads that wait, as long as they are too many or have brought too much, but not the newest. The
// caller holds us.mu.
func (us *uploads) dropOldest(newest *session) {
	for {
		waiting, brought, oldest := 0, int64(0), newest
		for _, s := range us.all {
			if !s.waits() {
				continue
			}
			waiting++
			brought += s.committed.Load()
			if s.since < oldest.since {
				oldest = s
			}
		}
		if oldest == newest || waiting <= keepUploads && brought <= us.most {
			return
		}
		us.drop(oldest, errDropped)
	}
}
