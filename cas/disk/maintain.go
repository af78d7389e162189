// SPDX-License-Identifier: Apache-2.0

package disk

import (
	"time"

	"github.com/cloister-build/cloister/cas/disk/internal/segment"
)

// maintainInterval is the time between calls of maintainOnce. After a power failure, Open reads what was put in the
// last interval.
const maintainInterval = 30 * time.Second

// maintain calls maintainOnce periodically until Close.
func (c *Cache) maintain() {
	tick := time.NewTicker(maintainInterval)
	defer tick.Stop()
	shrunk := false
	for {
		select {
		case <-c.stop:
			return
		case <-c.unflushed:
			c.makeDurable()
			continue
		case <-tick.C:
		}
		if !shrunk { // afterwards only puts evict
			c.shrink()
			shrunk = true
		}
		c.maintainOnce()
	}
}

// maintainOnce makes the segments durable and compacts logs. It logs errors, and runs again soon.
func (c *Cache) maintainOnce() {
	c.noteSuspension()
	c.makeDurable()
	if c.room.TryLock() { // otherwise eviction may be reading a log
		c.compact()
		c.room.Unlock()
	}
	if err := c.saveCheckpoint(omitNone); err != nil {
		c.noted(err) // this may be the first write in a long time
	}
}

// compact compacts the logs that need it. The caller holds room.
func (c *Cache) compact() {
	long := map[*segment.Segment]bool{}
	for _, g := range c.segments.Segments() {
		if g.NeedsCompaction() {
			long[g] = true
		}
	}
	// A log that is shorter than in the checkpoint is damaged.
	if len(long) == 0 || c.saveCheckpoint(func(g *segment.Segment) bool { return long[g] }) != nil {
		return
	}
	for g := range long {
		c.seal(g)
		err := c.rewindVerify(g.N)
		if err == nil {
			err = g.Compact(c.now(), c.isLive, c.recordMoved)
		}
		if err != nil {
			c.noted(err) // the log stays long
		}
	}
}
