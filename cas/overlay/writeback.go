// SPDX-License-Identifier: Apache-2.0

package overlay

import (
	"errors"
	"io"
	"os"
	"slices"
	"time"

	"github.com/cloister-build/cloister/cas"
)

const (
	maxSend    = 200              // entries sent in one round, unless the upstream is unbatched
	minBackoff = time.Second      // after a failure of the upstream; doubled each time,
	maxBackoff = 30 * time.Second // up to this
	maxDelay   = 10 * time.Minute // of an entry that the upstream rejects, from minBackoff on, doubled each time
	maxDenied  = 24 * time.Hour   // age of a result that the upstream denies us, and of an entry that it calls invalid
)

// Sending costs as much as writing, or more if the upstream is on the same machine. Therefore, while the overlay is in
// use, the sender rests between small rounds and while it reads large blobs. Above maxPatience or maxBacklog, rests
// become shorter, so that the sender reaches full speed gradually.
const (
	busyShare   = 4                      // a round uses this part of an unbatched upstream's calls
	busyRest    = 30                     // maximum rest, as a multiple of the time of the round
	restEach    = 40 * time.Millisecond  // maximum rest for each entry,
	restPerMiB  = 60 * time.Millisecond  // and for its bytes
	idleAfter   = 200 * time.Millisecond // time since the last use after which the overlay is not in use
	firstRest   = time.Second            // maximum rest at the start of a burst of writes; most bursts are shorter
	maxPatience = 5 * time.Minute        // age of the oldest entry above which rests become shorter
	maxBacklog  = 100_000                // number of entries above which rests become shorter
	noRest      = 3                      // multiple of maxPatience and maxBacklog at which rests are zero
)

// used records that the overlay is in use. Every call of a store does this, so it reads no clock and rarely writes.
func (o *Overlay) used() {
	if !o.inUse.Load() {
		o.inUse.Store(true)
	}
}

// busy reports whether the overlay is in use, and not about to be closed.
func (o *Overlay) busy() bool {
	if o.inUse.Swap(false) {
		o.lastUse.Store(time.Now().UnixNano())
	}
	return time.Since(time.Unix(0, o.lastUse.Load())) < idleAfter && !o.draining.Load()
}

// restShare returns the fraction of a full rest that the sender takes if the oldest of n entries has waited for this
// time.
func restShare(waited time.Duration, n int) float64 {
	excess := max(float64(waited)/float64(maxPatience), float64(n)/maxBacklog)
	return min(max((noRest-excess)/(noRest-1), 0), 1)
}

// shorten returns the rest d, shortened if the backlog is large or its oldest entry, written at since, is old.
func (o *Overlay) shorten(d time.Duration, since time.Time) time.Duration {
	return time.Duration(restShare(time.Since(since), o.pending.len()) * float64(d))
}

// rest pauses after a round that took this time.
func (o *Overlay) rest(took time.Duration, r *round) {
	var limit time.Duration
	for _, e := range r.entries {
		limit += restEach
		if e.bytes() <= smallBlob { // a pacedReader has paused for others
			limit += time.Duration(e.bytes()) * restPerMiB >> 20
		}
	}
	d := o.shorten(min(busyRest*took, limit), r.since)
	if d > 0 && r.entries[0].bytes() > smallBlob { // sequential, like the rests of the readers
		o.pacing <- struct{}{}
		defer func() { <-o.pacing }()
	}
	o.pause(d)
}

// pause waits while the overlay is in use, for d at most.
func (o *Overlay) pause(d time.Duration) {
	for ; d > 0 && o.busy(); d -= idleAfter {
		select {
		case <-time.After(min(d, idleAfter)):
		case <-o.ctx.Done():
		}
	}
}

// A pacedReader reads a large blob for a sender that rests. The rests of all readers are sequential.
type pacedReader struct {
	io.Reader
	o     *Overlay
	since time.Time // when the oldest entry was written
	read  int64     // bytes since the last rest
}

func (r *pacedReader) Read(p []byte) (int, error) {
	if r.read >= smallBlob {
		if d := r.o.shorten(time.Duration(r.read)*restPerMiB>>20, r.since); d > 0 {
			r.o.pacing <- struct{}{}
			r.o.pause(d)
			<-r.o.pacing
		}
		r.read = 0
	}
	n, err := r.Reader.Read(p[:min(len(p), smallBlob)])
	r.read += int64(n)
	return n, err
}

// roundSize returns the number of entries of the next round. A round cannot be interrupted when a use begins.
func (o *Overlay) roundSize() int {
	calls := maxSend
	if in, err := o.config.Upstream(""); err == nil {
		if u, ok := cas.As[unbatched](in.Store); ok {
			calls = u.Calls()
			if o.busy() {
				calls = max(calls/busyShare, 1)
			}
		}
	}
	return calls
}

// sendPending sends the pending small blobs and results, oldest first, until the Overlay is closed.
func (o *Overlay) sendPending() {
	o.sendRounds(func() *round { return o.pending.take(o.ctx, o.firstRest, o.roundSize) })
}

// sendLarge is sendPending for large blobs. Several calls run in parallel with sendPending: a large blob may take hours,
// and must not delay other entries.
func (o *Overlay) sendLarge() {
	o.sendRounds(func() *round { return o.pending.takeLarge(o.ctx, o.firstRest) })
}

func (o *Overlay) firstRest() { o.pause(firstRest) }

// sendRounds sends the rounds that take returns, until it returns nil.
func (o *Overlay) sendRounds(take func() *round) {
	backoff := minBackoff
	for {
		r := take()
		if r == nil {
			return
		}
		r.o = o
		began := time.Now()
		sent, err := r.send()
		if o.ctx.Err() != nil {
			return
		}
		if sent > 0 {
			backoff = minBackoff
		}
		if err == nil {
			o.rest(time.Since(began), r)
			continue
		}
		o.warn("cannot send to the upstream yet", "pending", o.pending.len(), "err", err)
		select {
		case <-time.After(backoff):
		case <-o.ctx.Done():
		}
		backoff = min(2*backoff, maxBackoff)
	}
}

// A round is one attempt to send some pending entries.
type round struct {
	o             *Overlay
	entries       []entry
	since         time.Time       // when the first was added
	takenAt       uint64          // the clock of pending
	done          []entry         // sent, or never to be sent
	retry         []entry         // to be sent when the upstream is available
	delay         []entry         // rejected: to be sent after a delay
	wait          map[entry]entry // results to be sent after this large blob
	sent          int64
	lost, refused int64
	unavailable   error
}

// ended records the result of sending e. An entry that fails although the upstream is available is delayed, each time
// for longer: it may be large and must not delay others.
func (r *round) ended(e entry, err error) {
	var first *sendFirstError
	switch {
	case err == nil:
		r.sent++
		r.done = append(r.done, e)
	case errors.As(err, &first):
		r.wait[e] = first.blob
	case errors.Is(err, errLost), errors.Is(err, errIncomplete), errors.Is(err, errUnserved):
		// errUnserved is possible for writes accepted before the digest functions of the upstream were known.
		r.o.config.Log.Error("a blob or result was lost before it was sent to the upstream", "what", e.String(), "err", err)
		r.lost++
		r.done = append(r.done, e)
	case errors.Is(err, errRefused):
		r.o.warn("the upstream does not record results", "err", err)
		r.refused++
		r.done = append(r.done, e)
	case r.o.unusable(e.instance, err):
		r.unavailable = err
		r.retry = append(r.retry, e)
	case tooLarge(err) && r.o.keptUnsent(e), rejected(e, err) && r.o.outdated(e) && r.o.keptUnsent(e):
		r.o.config.Log.Error("the upstream permanently refuses a blob or result; it stays local", "what", e.String(), "err", err)
		r.refused++
		r.done = append(r.done, e)
	default:
		r.o.warn("the upstream does not accept an entry yet", "what", e.String(), "err", err)
		r.delay = append(r.delay, e)
	}
}

// tooLarge reports whether err, of sending a blob or a result, means that the upstream never accepts a blob of this
// size.
func tooLarge(err error) bool {
	return errors.Is(err, cas.ErrUpstreamFull) && errors.Is(err, errors.ErrUnsupported)
}

// rejected reports whether err, of sending e, means that the upstream rejects e until somebody changes its rules or our
// permissions. A denied blob is not rejected: nobody else would send it.
func rejected(e entry, err error) bool {
	return errors.Is(err, cas.ErrInvalid) || e.kind == result && errors.Is(err, os.ErrPermission)
}

// keptUnsent records that a blob that an earlier WriteBack left is given up, so that it stays missing with
// WriteThrough. It returns false if there is no room for the record. Other entries need no record.
func (o *Overlay) keptUnsent(e entry) bool {
	if e.kind == result || !o.leftover() {
		return true
	}
	k := key{e.instance, e.digest}
	room, err := o.unsent.begin(k, false)
	if !room || err != nil {
		return false
	}
	o.unsent.stored(k)
	o.unsent.end(k)
	return true
}

// outdated reports whether to give up an entry that the upstream rejects. An operator may correct the cause, but the
// journal must not grow without bound. With a large backlog, it gives up results at once: a missing result only costs
// another run of the action, but nobody else sends a missing blob.
func (o *Overlay) outdated(e entry) bool {
	return time.Since(o.pending.since(e)) > maxDenied || e.kind == result && o.pending.len() > maxBacklog
}

// paced returns a reader that rests.
func (r *round) paced(from io.Reader) io.Reader {
	return &pacedReader{Reader: from, o: r.o, since: r.since}
}

// send sends the entries, in each instance blobs before results. It returns the number of sent entries, and the error
// if the upstream is unavailable.
func (r *round) send() (sent int64, err error) {
	o := r.o
	r.wait = map[entry]entry{}
	for instance, ds := range blobsByInstance(r.entries) {
		s, err := o.store(instance)
		var errs map[cas.Digest]error
		if err == nil {
			errs = s.send(o.ctx, ds, r.paced)
		}
		for _, d := range ds {
			if err == nil {
				r.ended(entry{blob, instance, d}, errs[d])
			} else {
				r.ended(entry{blob, instance, d}, err)
			}
		}
	}
	for _, e := range r.entries {
		if e.kind == result {
			r.ended(e, o.sendResult(e))
		}
	}
	o.count(func(st *Stats) { st.Sent += r.sent; st.Lost += r.lost; st.Refused += r.refused })
	if err := o.pending.settle(r); err != nil {
		return r.sent, err
	}
	return r.sent, r.unavailable
}

func blobsByInstance(entries []entry) map[string][]cas.Digest {
	blobs := map[string][]cas.Digest{}
	for _, e := range entries {
		if e.kind == blob {
			blobs[e.instance] = append(blobs[e.instance], e.digest)
		}
	}
	return blobs
}

// sendResult sends the current local result of an action.
func (o *Overlay) sendResult(e entry) error {
	s, err := o.store(e.instance)
	if err != nil {
		return err
	}
	if err := s.checkFunction(e.digest); err != nil {
		return err
	}
	r, err := s.local.Actions.Lookup(o.ctx, e.digest)
	if err != nil {
		return lostIfAbsent(err)
	}
	return s.recordUpstream(o.ctx, e.digest, r, func(ds []cas.Digest) error { return s.awaited(e, ds) })
}

// A sendFirstError is that of a result whose large blob is to be sent first.
type sendFirstError struct{ blob entry }

func (e *sendFirstError) Error() string { return e.blob.String() + " is to be sent first" }

// awaited returns a sendFirstError if a large blob among ds, those of the result e, is pending and the upstream has not
// just received it. An outdated result does not wait for a blob that the upstream rejects.
func (s *store) awaited(e entry, ds []cas.Digest) error {
	large := slices.DeleteFunc(slices.Clone(ds), func(d cas.Digest) bool { return d.Size() <= smallBlob })
	if large = s.o.recent.without(s.name, large); len(large) == 0 {
		return nil
	}
	for d := range s.o.pending.has(s.name, large) {
		b := entry{blob, s.name, d}
		if !s.o.pending.rejected(b) || !s.o.outdated(e) {
			return &sendFirstError{b}
		}
	}
	return nil
}

// renewPending keeps renewing the local leases of pending entries, and queuing results that could not be queued, until
// the Overlay is closed.
func (o *Overlay) renewPending() {
	tick, queue := time.NewTicker(o.config.RenewInterval), time.NewTicker(maxBackoff)
	defer tick.Stop()
	defer queue.Stop()
	for {
		select {
		case <-tick.C:
			o.renewOnce()
		case <-queue.C:
			if err := o.queueResults(); err != nil {
				o.warn("cannot queue results for the upstream yet", "err", err)
			}
		case <-o.ctx.Done():
			return
		}
	}
}

// renewOnce renews the local leases of pending entries, so that they are not evicted.
func (o *Overlay) renewOnce() {
	entries := o.pending.all()
	for _, e := range entries {
		if e.kind != result {
			continue
		}
		s, err := o.store(e.instance)
		if err != nil {
			continue // sendPending reports it
		}
		if _, err := s.local.Actions.Lookup(o.ctx, e.digest); err != nil && o.ctx.Err() == nil {
			o.config.Log.Warn("cannot renew the lease of a pending result", "what", e.String(), "err", err)
		}
	}
	for instance, ds := range blobsByInstance(entries) {
		s, err := o.store(instance)
		if err != nil {
			continue
		}
		for part := range slices.Chunk(ds, maxSend) {
			if _, err := s.local.Store.Missing(o.ctx, part); err != nil && o.ctx.Err() == nil {
				o.config.Log.Warn("cannot renew the leases of pending blobs", "instance", instance, "err", err)
			}
		}
	}
}
