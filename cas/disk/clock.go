// SPDX-License-Identifier: Apache-2.0

package disk

import (
	"sync/atomic"
	"time"

	"github.com/cloister-build/cloister/cas/disk/internal/index"
)

// A clock counts the seconds of stamps. It begins with the wall clock at Open, and then counts the time that passes:
// setting the wall clock neither ends leases nor prolongs them. Suspending the machine prolongs them.
//
// From one process to the next only the wall clock counts, unless the machine was not restarted. If the wall clock has
// advanced by more than is known to have passed, it may have been set: entries that were leased when the earlier
// process ended keep the rest of their leases. If it has moved back, stamps from the future move back by the
// difference; see restamp.
type clock struct {
	start     time.Time     // for its monotonic clock
	wall      time.Time     // the wall clock at start
	slept     time.Duration // sleepTime() at start
	suspended atomic.Int64  // nanoseconds since start that the monotonic clock did not count
}

func (k *clock) begin() { k.start, k.wall, k.slept = time.Now(), wall(), sleepTime() }

// wall returns the time on the wall clock. Tests replace it.
var wall = time.Now

// sleepTime returns for how long the machine was suspended since it was started. Tests replace it.
var sleepTime = asleep

// noteSuspension adds the time for which the machine was suspended to the clock. It prolongs leases by that time, since
// nobody could renew them.
func (c *Cache) noteSuspension() {
	k := &c.clock
	suspended := sleepTime() - k.slept
	gap := int64((suspended - time.Duration(k.suspended.Load())) / time.Second)
	if gap <= tolerance {
		k.suspended.Store(int64(suspended))
		return
	}
	c.room.Lock() // no eviction sees the one without the other
	defer c.room.Unlock()
	var keys []index.Key
	before := c.now()
	c.index.Each(func(e *index.Entry) bool {
		if c.leased(e, before) {
			keys = append(keys, e.Key)
		}
		return true
	})
	k.suspended.Store(int64(suspended))
	now := int64(c.now())
	for _, key := range keys {
		c.index.Update(key, func(e *index.Entry) { e.Stamp = uint32(min(int64(e.Stamp)+gap, now)) })
	}
}

// stamp returns the stamp of t, a time of this process.
func (k *clock) stamp(t time.Time) uint32 {
	return seconds(k.wall.Add(t.Sub(k.start) + time.Duration(k.suspended.Load())))
}

// now returns the stamp of the present.
func (k *clock) now() uint32 {
	return seconds(k.wall.Add(time.Since(k.start) + time.Duration(k.suspended.Load())))
}

// seconds returns the time on the wall clock in seconds since 1970.
func seconds(t time.Time) uint32 { return uint32(t.Unix()) }

// uptime returns the seconds since the machine was started, including those for which it was suspended, or 0 if
// unknown. Tests replace it.
var uptime = func() int64 { return int64(sinceBoot() / time.Second) }

// maxCountedGap is the longest time between two processes, in seconds, that restamp does not write to the logs.
const maxCountedGap = 60

// gap returns the seconds by which the wall clock, which shows now, has moved since the last stamp of the earlier
// process, minus the time that is known to have passed.
func (p *checkpoint) gap(now, last int64) int64 {
	if p.at == 0 {
		return 0
	}
	if p.boot == thisBoot() {
		if passed := uptime() - p.uptime; p.uptime > 0 && passed >= 0 {
			if gap := now - (p.at + passed); gap < -tolerance || gap > tolerance {
				return gap
			}
			return 0
		}
	}
	return now - last
}

// tolerance is the maximum difference between two clocks, in seconds, that rounding can cause.
const tolerance = 2

// restamp adapts the stamps of earlier processes to the clock of this one, so that a wall clock that was set in between
// does not end leases. No entry keeps a stamp from the future. It records changed stamps in the logs, so that the next
// process need not know about this one. Newest is the last stamp of the earlier process, and ahead whether there are
// stamps from the future.
func (r *recovery) restamp(newest int64, ahead bool) {
	c, p, now := r.cache, r.earlier, int64(r.cache.now())
	gap := p.gap(now, max(newest, p.at))
	if (gap <= 0 || c.lease == 0) && !ahead {
		return
	}
	changed := map[uint32][]index.Key{} // by segment
	stamps := map[index.Key]uint32{}
	c.index.Each(func(e *index.Entry) bool {
		stamp := int64(e.Stamp)
		moved := stamp
		if stamp <= p.until {
			moved = max(stamp+gap, 0)
		}
		if leased := c.lease > 0 && moved+c.grain+c.lease >= now; stamp > now || gap > 0 && leased {
			if moved = min(moved, now); moved != stamp {
				changed[e.Segment] = append(changed[e.Segment], e.Key)
				stamps[e.Key] = uint32(moved)
			}
		}
		return true
	})
	for k, stamp := range stamps {
		c.index.Update(k, func(e *index.Entry) { e.Stamp = stamp })
	}
	if gap <= maxCountedGap && !ahead {
		return
	}
	for n, keys := range changed {
		// If the disk is full, the stamps are lost at the end of the process.
		c.noted(c.segments.Segment(n).Touch(keys, func(k index.Key) (record, stamp uint32, ok bool) {
			e, ok := c.index.Get(k)
			return e.Record, e.Stamp, ok
		}))
	}
}
