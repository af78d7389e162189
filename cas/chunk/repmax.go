// SPDX-License-Identifier: Apache-2.0

package chunk

import "fmt"

// MaxHorizon bounds how far RepMaxCDC may look ahead, in bytes, for it holds as much.
const MaxHorizon = 64 << 20

// RepMaxCDC is the function of github.com/buildbarn/go-cdc. A cut is where the hash is the greatest of all places from
// the least size on, up to the horizon, the first if several are; but if that would leave a chunk of twice the least
// size or more, it is where the hash is the greatest of those places that leave room for a chunk between, and so on.
// Chunks are from the least size to less than twice that, but for a stream that is smaller. So is the last one: no cut
// is nearer to the end than the least size.
type RepMaxCDC struct {
	Min     int // bytes: at least 64
	Horizon int // bytes: 0 to MaxHorizon; the API recommends 8 times Min
}

// Max implements Params.
func (p RepMaxCDC) Max() int { return 2*p.Min - 1 }

func (p RepMaxCDC) cutter() (cutter, error) {
	if p.Min < window || p.Min > MaxAverage {
		return nil, fmt.Errorf("RepMaxCDC with chunks of at least %d bytes: it must be from %d to %d", p.Min, window, MaxAverage)
	}
	if p.Horizon < 0 || p.Horizon > MaxHorizon {
		return nil, fmt.Errorf("RepMaxCDC with a horizon of %d bytes: it must be from 0 to %d", p.Horizon, MaxHorizon)
	}
	return &repMax{least: p.Min, horizon: p.Horizon}, nil
}

// A repMax implements cutter. It hashes each byte about once.
//
// A stair is a place with a greater hash than all before it, from the first place on at which there may be a cut. The
// greatest hash up to anywhere is that of the last stair until there. So what the definition asks for are stairs: the
// top one, the last one that is at least a chunk below it, and so on down to the first cut. Where the next stair is a
// chunk away, or more, from the top one, that is a cut whatever follows, and so are all those on the way down to it.
type repMax struct {
	least, horizon int // bytes

	decided []int   // cuts that are known, last first, counted from the next byte of the stream
	stairs  []stair // counted likewise; none at the beginning, and after a cut at the top one
	seen    int     // how far there are stairs
	hash    uint64  // there
}

// A stair is a place for a cut, and the hash of the bytes before it.
type stair struct {
	at   int
	hash uint64
}

func (c *repMax) ahead() int { return 2*c.least + c.horizon }

func (c *repMax) cut(b []byte) int {
	if last := len(c.decided) - 1; last >= 0 {
		n := c.decided[last]
		c.decided = c.decided[:last]
		for i := range c.decided {
			c.decided[i] -= n
		}
		return n
	}
	if len(b) < 2*c.least {
		return len(b)
	}
	c.climb(b, len(b)-c.least)
	top := c.stairs[len(c.stairs)-1].at
	n := c.descend()
	if c.seen == top+c.least-1 {
		c.stairs = c.stairs[:0] // the top one is a cut, too
		for i := range c.decided {
			c.decided[i] -= n
		}
		return n
	}
	// Only this cut is sure: the rest of the stairs is for the next ones.
	c.decided = c.decided[:0]
	c.advance(b, n)
	return n
}

// climb finds stairs up to limit, or until the next one cannot be nearer than a chunk to the top one.
func (c *repMax) climb(b []byte, limit int) {
	if len(c.stairs) == 0 {
		c.seen, c.hash = c.least, hashBefore(b, c.least)
		c.stairs = append(c.stairs, stair{c.least, c.hash})
	}
	top := c.stairs[len(c.stairs)-1]
	for c.seen < limit && c.seen < top.at+c.least-1 {
		c.hash = c.hash<<1 + gear[b[c.seen]]
		c.seen++
		if c.hash > top.hash {
			top = stair{c.seen, c.hash}
			c.stairs = append(c.stairs, top)
		}
	}
}

// descend returns the first cut, and leaves those after it, up to the top stair, in decided.
func (c *repMax) descend() int {
	i := len(c.stairs) - 1
	n := c.stairs[i].at
	c.decided = c.decided[:0]
	for n >= 2*c.least {
		from := n
		for ; i >= 0 && c.stairs[i].at > from-c.least; i-- {
		}
		c.decided = append(c.decided, from)
		n = c.stairs[i].at // the first one is at least
	}
	return n
}

// advance counts the stairs from the cut n on, leaves out those at which there may be none now, and finds those that
// were hidden by them.
func (c *repMax) advance(b []byte, n int) {
	kept := c.stairs[:0]
	var all []stair // if some were hidden
	for _, s := range c.stairs {
		s.at -= n
		if s.at < c.least {
			continue
		}
		if len(kept) == 0 && s.at > c.least {
			all = hidden(b[n:], c.least, s.at)
		}
		kept = append(kept, s)
	}
	if c.stairs = kept; len(all) > 0 {
		c.stairs = append(all, kept...)
	}
	c.seen -= n
}

// hidden returns the stairs from one place to another, which is not included.
func hidden(b []byte, from, to int) []stair {
	h := hashBefore(b, from)
	all := []stair{{from, h}}
	for i := from; i < to-1; i++ {
		if h = h<<1 + gear[b[i]]; h > all[len(all)-1].hash {
			all = append(all, stair{i + 1, h})
		}
	}
	return all
}

// hashBefore returns the hash of the bytes of b before at, which is at least the window.
func hashBefore(b []byte, at int) (h uint64) {
	for _, v := range b[at-window : at] {
		h = h<<1 + gear[v]
	}
	return h
}
