// SPDX-License-Identifier: Apache-2.0

package disk

import (
	"time"

	"github.com/cloister-build/cloister/cas/disk/internal/index"
)

// The stamp of an entry is the time of its last use. It is updated only when it is older than the grain: eviction
// needs no more precision, and reads should rarely write. A lease therefore starts at the end of the grain and is
// never too short. A stamp is in the log before the use is acknowledged.

const maxGrain = 15 * time.Minute

func (c *Cache) setLease(lease time.Duration) {
	if lease < 0 {
		c.grain = int64(maxGrain / time.Second)
		return
	}
	// Stamps are rounded down to whole seconds.
	c.lease = int64(lease / time.Second)
	if lease%time.Second > 0 {
		c.lease++
	}
	c.grain = min(c.lease/8, int64(maxGrain/time.Second))
}

// leased reports whether e must not be evicted at the time now.
func (c *Cache) leased(e *index.Entry, now uint32) bool {
	return c.lease > 0 && int64(e.Stamp)+c.grain+c.lease >= int64(now)
}

// stale reports whether the stamp of e must be updated.
func (c *Cache) stale(e *index.Entry, now uint32) bool { return int64(e.Stamp)+c.grain < int64(now) }

// use returns the entry of k and renews its lease.
func (c *Cache) use(k index.Key) (e index.Entry, ok bool) {
	e, ok = c.index.Get(k)
	if !ok {
		return e, false
	}
	if now := c.now(); c.stale(&e, now) {
		if len(c.touch([]index.Key{k}, now)) > 0 {
			return e, false
		}
		return c.index.Get(k)
	}
	return e, true
}

// touch sets the stamps of keys to now, and returns the keys that are absent. If a log cannot be written, because the
// disk is full, the stamps last only until the end of the process.
func (c *Cache) touch(keys []index.Key, now uint32) (absent []index.Key) {
	bySegment := map[uint32][]index.Key{}
	for len(keys) > 0 {
		clear(bySegment)
		for _, k := range keys {
			if e, ok := c.index.Get(k); ok {
				bySegment[e.Segment] = append(bySegment[e.Segment], k)
			} else {
				absent = append(absent, k)
			}
		}
		keys = nil
		for n, ks := range bySegment {
			if g := c.segments.Segment(n); g != nil {
				c.noted(g.Touch(ks, func(k index.Key) (record, stamp uint32, ok bool) {
					e, ok := c.index.Get(k)
					return e.Record, now, ok && e.Segment == n
				}))
			}
			for _, k := range ks {
				still := false
				ok := c.index.Update(k, func(e *index.Entry) {
					if still = e.Segment == n; still {
						e.Stamp = max(e.Stamp, now)
					}
				})
				if !ok {
					absent = append(absent, k)
				} else if !still {
					keys = append(keys, k) // moved with its old stamp
				}
			}
		}
	}
	return absent
}
