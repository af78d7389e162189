// SPDX-License-Identifier: Apache-2.0

package overlay

import (
	"errors"
	"slices"
	"time"

	"github.com/cloister-build/cloister/cas"
)

const (
	maxSend    = 1000             // entries sent in one round
	minBackoff = time.Second      // after a failure of the upstream; doubled each time,
	maxBackoff = 30 * time.Second // up to this
	maxDelay   = 10 * time.Minute // of an entry that the upstream rejects, from minBackoff on, doubled each time
)

// sendPending sends the pending entries, oldest first, until the Overlay is closed.
func (o *Overlay) sendPending() {
	backoff := minBackoff
	for {
		entries := o.pending.take(o.ctx, maxSend)
		if entries == nil {
			return
		}
		sent, err := o.sendAll(entries)
		if o.ctx.Err() != nil {
			return
		}
		if sent > 0 {
			backoff = minBackoff
		}
		if err == nil {
			continue
		}
		o.warn("cannot send to the upstream yet", "pending", o.pending.len(), "error", err)
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
	done          []entry // sent, or never to be sent
	retry         []entry // to be sent when the upstream is available
	delay         []entry // rejected: to be sent after a delay
	sent          int64
	lost, refused int64
	unavailable   error
}

// ended records the result of sending e. An entry that fails although the upstream is available is delayed, longer each
// time: it may be large, and must not delay the others.
func (r *round) ended(e entry, err error) {
	switch {
	case err == nil:
		r.sent++
		r.done = append(r.done, e)
	case errors.Is(err, errLost), errors.Is(err, errIncomplete), errors.Is(err, errUnserved):
		// errUnserved is possible for writes accepted before the digest functions of the upstream were known.
		r.o.config.Log.Error("lost before it was sent to the upstream", "what", e.String(), "error", err)
		r.lost++
		r.done = append(r.done, e)
	case errors.Is(err, errRefused):
		r.o.warn("the upstream does not record results", "error", err)
		r.refused++
		r.done = append(r.done, e)
	case errors.Is(err, cas.ErrUnavailable):
		r.unavailable = err
		r.retry = append(r.retry, e)
	default:
		r.o.warn("the upstream does not accept an entry yet", "what", e.String(), "error", err)
		r.delay = append(r.delay, e)
	}
}

// sendAll sends entries, in each instance blobs before results. It returns the number of sent entries, and the error if
// the upstream is unavailable.
func (o *Overlay) sendAll(entries []entry) (sent int64, err error) {
	r := &round{o: o}
	for instance, ds := range blobsByInstance(entries) {
		s, err := o.store(instance)
		var errs map[cas.Digest]error
		if err == nil {
			errs = s.send(o.ctx, ds)
		}
		for _, d := range ds {
			if err == nil {
				r.ended(entry{blob, instance, d}, errs[d])
			} else {
				r.ended(entry{blob, instance, d}, err)
			}
		}
	}
	for _, e := range entries {
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
	return s.recordUpstream(o.ctx, e.digest, r)
}

// renewPending renews the local leases of pending entries until the Overlay is closed, so that they are not evicted.
func (o *Overlay) renewPending() {
	tick := time.NewTicker(o.config.RenewInterval)
	defer tick.Stop()
	for {
		o.renewOnce()
		select {
		case <-tick.C:
		case <-o.ctx.Done():
			return
		}
	}
}

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
			o.config.Log.Warn("cannot renew the lease of a pending result", "what", e.String(), "error", err)
		}
	}
	for instance, ds := range blobsByInstance(entries) {
		s, err := o.store(instance)
		if err != nil {
			continue
		}
		for part := range slices.Chunk(ds, maxSend) {
			if _, err := s.local.Store.Missing(o.ctx, part); err != nil && o.ctx.Err() == nil {
				o.config.Log.Warn("cannot renew the leases of pending blobs", "instance", instance, "error", err)
			}
		}
	}
}
