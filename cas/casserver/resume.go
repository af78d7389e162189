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
	"github.com/cloister-build/cloister/cas/quota"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

const (
	// maxWaiting limits the uploads that wait to be resumed. Of the caller with most, the one that has waited longest is
	// dropped.
	maxWaiting = 64
	// maxWait is how long an upload waits to be resumed.
	maxWait = 10 * time.Minute
	// waitingFraction limits the bytes of all waiting uploads to this fraction of the largest permitted blob, which
	// leaves room for outputs and other uploads. The newest upload waits regardless of its size.
	waitingFraction = 8
)

// Why a stream or a session was ended from outside.
var (
	// errSuperseded usually goes to a client's own earlier stream, on a connection that the server does not know is
	// lost.
	errSuperseded = status.Error(codes.Aborted, "upload: superseded by another stream of the same upload")
	errStopped    = fmt.Errorf("%w: the server is stopping", cas.ErrUnavailable)
	errRestarted  = errors.New("upload: restarted at offset 0")
	errDropped    = errors.New("upload: dropped while waiting to be resumed")
)

// An uploadKey identifies an upload: a client may use one UUID for several blobs.
type uploadKey struct {
	instance, upload string
	digest           cas.Digest
}

// uploads are the uploads of more than one message, which another stream can resume. The Store.Put of each runs in its
// own goroutine, reads the streams in order and waits between them, so the data already received stays where the store
// has put it.
type uploads struct {
	mu          sync.Mutex
	sessions    map[uploadKey]*session // guarded by mu
	disconnects uint64                 // guarded by mu; number of streams that broke off
	closed      bool                   // guarded by mu

	maxWaitingBytes int64
	idle            time.Duration  // Config.StreamIdle
	running         sync.WaitGroup // sessions
}

// newUploads returns an empty set of uploads for blobs of up to maxBlob bytes.
func newUploads(maxBlob int64, idle time.Duration) *uploads {
	return &uploads{sessions: map[uploadKey]*session{}, maxWaitingBytes: maxBlob / waitingFraction, idle: idle}
}

// A session is one upload.
type session struct {
	uploads   *uploads
	key       uploadKey
	ctx       context.Context // of Put
	cancel    context.CancelCauseFunc
	committed atomic.Int64 // bytes that Put has read
	next      chan *stream // the stream that resumes the session; capacity 1

	// Guarded by uploads.mu.
	stream         *stream // nil while waiting for one
	reportedOffset int64   // the first offset reported to the client since the last stream joined; 0: none
	disconnected   uint64  // uploads.disconnects when it began to wait
	waitingSince   time.Time
	caller         string // the key of the caller of the last stream

	// Used only by Put.
	current *stream
	readErr error // how the data ended, unless by io.EOF

	done     chan struct{} // closed after Put returned
	err      error         // of Put; valid after done
	panicked any           // of Put; valid after done
}

// A stream is the part of an upload that one Write call delivers.
type stream struct {
	upload     *upload
	detached   chan struct{} // closed when the session stops using the stream and waits for another
	superseded chan struct{} // closed when another stream replaces this one
	displaced  bool          // guarded by uploads.mu; superseded is closed
	ended      bool          // guarded by uploads.mu; the Write call has returned
}

// write starts or resumes the upload key with the data of u. It returns when the blob is stored or the stream ends.
// Once u.lent is set, the session owns u.
func (us *uploads) write(ctx context.Context, store cas.Store, key uploadKey, u *upload) error {
	st := &stream{upload: u, detached: make(chan struct{}), superseded: make(chan struct{})}
	s, err := us.join(ctx, store, key, st)
	if s == nil {
		return err
	}
	u.lent = true
	select {
	case <-st.superseded:
		return us.supersededError()
	case <-st.detached:
		return u.err
	case <-ctx.Done():
		// Either the session will find the stream broken and wait, or all data has arrived and the store needs time. Do
		// not wait for that here: it would delay stopping the server, and a returning client finds the session.
		us.abandon(s, st)
		return ctx.Err()
	case <-s.done:
	}
	if s.panicked != nil {
		panic(s.panicked)
	}
	return s.err
}

// join makes st the stream of the session of key and returns the session. If there is none to join, it returns nil and
// the result of the upload.
func (us *uploads) join(ctx context.Context, store cas.Store, key uploadKey, st *stream) (*session, error) {
	off := st.upload.message.WriteOffset
	us.mu.Lock()
	defer us.mu.Unlock()
	for {
		s := us.sessions[key]
		switch {
		case us.closed:
			return nil, errStopped
		case s == nil && off != 0:
			return nil, fmt.Errorf("%w write: write_offset is %d, but the upload is unknown; start at offset 0",
				cas.ErrInvalid, off)
		case s == nil:
			return us.start(ctx, store, key, st), nil
		case s.stream != nil:
			s.stream.supersede()
			if stored, err := us.await(ctx, s, s.stream); stored || err != nil {
				return nil, err
			}
		case s.canResumeAt(off):
			st.upload.offset, st.upload.skip = off, s.committed.Load()-off
			s.stream, s.reportedOffset, s.caller = st, 0, quota.Caller(ctx)
			s.next <- st
			return s, nil
		case off == 0:
			us.drop(s, errRestarted)
		default:
			committed := s.committed.Load()
			return nil, fmt.Errorf("%w write: write_offset is %d, but %d bytes were received; "+
				"resume at offset %d or start at offset 0", cas.ErrInvalid, off, committed, committed)
		}
	}
}

// canResumeAt reports whether a stream may resume s at off: at the committed offset or, since more data may be read
// after the client queried the offset, anywhere from the reported offset on. The caller holds uploads.mu.
func (s *session) canResumeAt(off int64) bool {
	committed := s.committed.Load()
	return off == committed || s.reportedOffset > 0 && off >= s.reportedOffset && off < committed
}

// start starts a session. The caller holds us.mu.
func (us *uploads) start(ctx context.Context, store cas.Store, key uploadKey, st *stream) *session {
	s := &session{
		uploads: us, key: key, stream: st, current: st, caller: quota.Caller(ctx),
		next: make(chan *stream, 1), done: make(chan struct{}),
	}
	s.ctx, s.cancel = context.WithCancelCause(context.WithoutCancel(ctx))
	us.sessions[key] = s
	us.running.Go(func() { s.run(store) })
	return s
}

// await waits until s has detached st or has ended; stored reports whether it ended with the blob stored. The caller
// holds us.mu, which await releases meanwhile.
func (us *uploads) await(ctx context.Context, s *session, st *stream) (stored bool, err error) {
	us.mu.Unlock()
	defer us.mu.Lock()
	select {
	case <-st.detached:
	case <-s.done:
		return s.err == nil && s.panicked == nil, nil
	case <-ctx.Done():
		return false, ctx.Err()
	}
	return false, nil
}

// supersede ends the Write call of st. The caller holds uploads.mu.
func (st *stream) supersede() {
	if !st.displaced {
		st.displaced = true
		close(st.superseded)
	}
}

// supersededError returns the error of a superseded stream.
func (us *uploads) supersededError() error {
	us.mu.Lock()
	defer us.mu.Unlock()
	if us.closed {
		return errStopped
	}
	return errSuperseded
}

// abandon marks st, whose Write call has ended, and drops s if nobody resumes it in time.
func (us *uploads) abandon(s *session, st *stream) {
	us.mu.Lock()
	defer us.mu.Unlock()
	if s.stream != st {
		return
	}
	st.ended = true
	us.disconnect(s)
	timer := time.AfterFunc(maxWait, func() {
		us.mu.Lock()
		defer us.mu.Unlock()
		if s.stream == st {
			us.drop(s, errDropped)
		}
	})
	context.AfterFunc(s.ctx, func() { timer.Stop() }) // the timer retains st
}

// disconnect counts a lost stream of s and drops other sessions if too many wait. The caller holds us.mu.
func (us *uploads) disconnect(s *session) {
	us.disconnects++
	s.disconnected, s.waitingSince = us.disconnects, time.Now()
	us.dropOldest(s)
}

// waiting reports whether s has no active stream. The caller holds uploads.mu.
func (s *session) waiting() bool { return s.stream == nil || s.stream.ended }

// drop ends a session without an active stream. The caller holds us.mu.
func (us *uploads) drop(s *session, why error) {
	us.remove(s)
	s.cancel(why)
}

// remove frees the key of s for another session. The caller holds us.mu.
func (us *uploads) remove(s *session) {
	if us.sessions[s.key] == s {
		delete(us.sessions, s.key)
	}
}

// dropWaiting frees space for a retry of caller, whose upload did not fit into the store. It ends the waiting sessions of
// caller or, if there are none, those that have waited for longer than Config.StreamIdle: their clients are probably
// gone. Otherwise, a caller whose blob never fits would end the interrupted uploads of all others with each retry.
func (us *uploads) dropWaiting(caller string) {
	us.mu.Lock()
	defer us.mu.Unlock()
	var own, old []*session
	for _, s := range us.sessions {
		switch {
		case !s.waiting():
		case s.caller == caller:
			own = append(own, s)
		case time.Since(s.waitingSince) > us.idle:
			old = append(old, s)
		}
	}
	if len(own) == 0 {
		own = old
	}
	for _, s := range own {
		us.drop(s, errDropped)
	}
}

// committedSize returns the offset at which a client can resume an upload; ok is false if the upload is unknown.
func (us *uploads) committedSize(key uploadKey) (n int64, ok bool) {
	us.mu.Lock()
	defer us.mu.Unlock()
	s, ok := us.sessions[key]
	if !ok {
		return 0, false
	}
	n = s.committed.Load()
	if s.reportedOffset == 0 {
		s.reportedOffset = n
	}
	return n, true
}

// linger makes close wait for the handler of a call that has already ended for its client.
func (us *uploads) linger(done <-chan struct{}) {
	us.mu.Lock()
	defer us.mu.Unlock()
	if !us.closed {
		us.running.Go(func() { <-done })
	}
}

// close ends all sessions, waits for them and rejects new ones.
func (us *uploads) close() {
	us.mu.Lock()
	us.closed = true
	for _, s := range us.sessions {
		if s.stream != nil {
			s.stream.supersede() // the context does not end a receive
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
		s.current.upload.message.release()
		s.uploads.mu.Lock()
		s.uploads.remove(s)
		s.uploads.mu.Unlock()
		s.cancel(nil)
		close(s.done)
	}()
	s.err = store.Put(s.ctx, s.key.digest, s)
	switch why := context.Cause(s.ctx); {
	case s.err == nil:
	case why != nil:
		s.err = why
	case s.readErr != nil:
		s.err = s.readErr // the original error, which the store may have wrapped
	}
}

// Read implements io.Reader for Put: it concatenates the streams of the session.
func (s *session) Read(p []byte) (int, error) {
	for s.readErr == nil {
		n, err := s.current.upload.Read(p)
		s.committed.Add(int64(n))
		if err == nil || err == io.EOF {
			return n, err
		}
		if s.readErr = err; s.current.upload.broken {
			s.readErr = s.awaitStream(err)
		}
	}
	return 0, s.readErr
}

// awaitStream detaches the current stream, which broke off with err, and waits for the next one.
func (s *session) awaitStream(err error) error {
	if !s.uploads.detach(s) {
		return err
	}
	timer := time.NewTimer(maxWait)
	defer timer.Stop()
	select {
	case s.current = <-s.next:
		return nil
	case <-timer.C:
	case <-s.ctx.Done():
		return context.Cause(s.ctx)
	}
	s.uploads.mu.Lock()
	defer s.uploads.mu.Unlock()
	if s.stream != nil {
		s.current = <-s.next // it arrived just in time
		return nil
	}
	s.uploads.drop(s, errDropped)
	return errDropped
}

// detach makes s wait for another stream, unless the session ends; ok reports whether it waits.
func (us *uploads) detach(s *session) (ok bool) {
	us.mu.Lock()
	defer us.mu.Unlock()
	if us.closed || s.committed.Load() == 0 || s.ctx.Err() != nil {
		return false
	}
	close(s.stream.detached)
	s.stream = nil
	us.disconnect(s)
	return true
}

// dropOldest drops waiting sessions until they are within the limits, except newest. It drops the oldest of the caller
// with the most sessions or bytes, so that a caller cannot displace uploads of a caller with fewer. If only newest
// makes the total exceed the byte limit, it displaces only sessions of its own caller. The caller holds us.mu.
func (us *uploads) dropOldest(newest *session) {
	for {
		count, bytes := 0, int64(0)
		counts, sizes := map[string]int{}, map[string]int64{}
		for _, s := range us.sessions {
			if s.waiting() {
				n := s.committed.Load()
				count, bytes = count+1, bytes+n
				counts[s.caller]++
				sizes[s.caller] += n
			}
		}
		tooMany, othersFit := count > maxWaiting, bytes-newest.committed.Load() <= us.maxWaitingBytes
		if !tooMany && bytes <= us.maxWaitingBytes {
			return
		}
		var drop *session
		most := int64(-1)
		for _, s := range us.sessions {
			if !s.waiting() || s == newest || !tooMany && othersFit && s.caller != newest.caller {
				continue
			}
			n := sizes[s.caller]
			if tooMany {
				n = int64(counts[s.caller])
			}
			if n > most || n == most && s.disconnected < drop.disconnected {
				drop, most = s, n
			}
		}
		if drop == nil {
			return
		}
		us.drop(drop, errDropped)
	}
}
