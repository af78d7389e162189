// SPDX-License-Identifier: Apache-2.0

package overlay

import (
	"errors"
	"slices"
	"time"

	"github.com/cloister-build/cloister/cas"
)

const (
	atOnce   = 1000             // entries that are sent in one go
	minPause = time.Second      // after far failed; doubled each time,
	maxPause = 30 * time.Second // up to this
	maxRest  = 10 * time.Minute // of an entry that far refuses, from minPause on, doubled each time
)

// sendLater sends what is pending, oldest first, until the Overlay is closed.
func (o *Overlay) sendLater() {
	pause := minPause
	for {
		entries := o.pending.first(o.ctx, atOnce)
		if entries == nil {
			return
		}
		sent, away := o.sendAll(entries)
		if o.ctx.Err() != nil {
			return
		}
		if sent > 0 {
			pause = minPause
		}
		if away == nil {
			continue
		}
		o.warn("not yet sent on", "pending", o.pending.len(), "error", away)
		select {
		case <-time.After(pause):
		case <-o.ctx.Done():
		}
		pause = min(2*pause, maxPause)
	}
}

// sendAll sends entries, of each instance the blobs first, and strikes out those that are far, or never will be. It
// returns how many are far, and why none can be sent now. What fails though far can be reached rests by itself, the
// longer the more often: it may be large, and it must not hold up the others.
func (o *Overlay) sendAll(entries []entry) (sent int64, away error) {
	blobs := map[string][]cas.Digest{}
	var done, again, rest []entry
	var lost, refused int64
	ended := func(e entry, err error) {
		switch {
		case err == nil:
			sent++
			done = append(done, e)
		case errors.Is(err, errGone), errors.Is(err, errIncomplete), errors.Is(err, errUnserved):
			// Unserved is what was taken while far had not yet said what it serves.
			o.config.Log.Error("lost before it was sent on", "what", e.String(), "error", err)
			lost++
			done = append(done, e)
		case errors.Is(err, errRefused):
			o.warn("result is not recorded far", "error", err)
			refused++
			done = append(done, e)
		case errors.Is(err, cas.ErrUnavailable):
			away = err
			again = append(again, e)
		default:
			o.warn("not yet sent on", "what", e.String(), "error", err)
			rest = append(rest, e)
		}
	}
	for _, e := range entries {
		if e.kind == blob {
			blobs[e.instance] = append(blobs[e.instance], e.digest)
		}
	}
	for instance, ds := range blobs {
		s, err := o.store(instance)
		var errs map[cas.Digest]error
		if err == nil {
			errs = s.send(o.ctx, ds)
		}
		for _, d := range ds {
			if err == nil {
				ended(entry{blob, instance, d}, errs[d])
			} else {
				ended(entry{blob, instance, d}, err)
			}
		}
	}
	for _, e := range entries {
		if e.kind == result {
			ended(e, o.sendResult(e))
		}
	}
	o.count(func(st *Stats) { st.Sent += sent; st.Lost += lost; st.Refused += refused })
	if err := o.pending.strike(done, again, rest); err != nil {
		return sent, err
	}
	return sent, away
}

// sendResult sends a result as near has it now.
func (o *Overlay) sendResult(e entry) error {
	s, err := o.store(e.instance)
	if err != nil {
		return err
	}
	if err := s.unserved(e.digest); err != nil {
		return err
	}
	r, err := s.near.Actions.Lookup(o.ctx, e.digest)
	if err != nil {
		return gone(err)
	}
	return s.recordFar(o.ctx, e.digest, r)
}

// renew marks what is pending as used near, now and then, until the Overlay is closed: near must not evict it.
func (o *Overlay) renew() {
	tick := time.NewTicker(o.config.RenewInterval)
	defer tick.Stop()
	for {
		blobs := map[string][]cas.Digest{}
		for _, e := range o.pending.all() {
			s, err := o.store(e.instance)
			if err != nil {
				continue // sendLater reports it
			}
			if e.kind == blob {
				blobs[e.instance] = append(blobs[e.instance], e.digest)
			} else if _, err := s.near.Actions.Lookup(o.ctx, e.digest); err != nil && o.ctx.Err() == nil {
				o.config.Log.Warn("result cannot be kept near", "what", e.String(), "error", err)
			}
		}
		for instance, ds := range blobs {
			s, err := o.store(instance)
			if err != nil {
				continue
			}
			for part := range slices.Chunk(ds, atOnce) {
				if _, err := s.near.Store.Missing(o.ctx, part); err != nil && o.ctx.Err() == nil {
					o.config.Log.Warn("blobs cannot be kept near", "instance", instance, "error", err)
				}
			}
		}
		select {
		case <-tick.C:
		case <-o.ctx.Done():
			return
		}
	}
}
