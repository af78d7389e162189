// SPDX-License-Identifier: Apache-2.0

package disk

import (
	"errors"
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
			_ = c.makeDurable() // maintainOnce retries, and reports the error
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

// maintainOnce makes the segments durable and compacts logs. Errors are retried at the next call; see noteMaintenance.
func (c *Cache) maintainOnce() {
	c.noteSuspension()
	err := c.makeDurable()
	idle := c.room.TryLock()
	if idle { // otherwise eviction may be reading a log
		err = errors.Join(err, c.compact())
		c.room.Unlock()
	}
	if err = errors.Join(err, c.saveCheckpoint(omitNone)); err != nil || idle {
		c.noteMaintenance(err)
	}
}

// noteMaintenance logs when maintenance begins to fail and when it works again. If all writes fail, noteFailure logs
// that instead.
func (c *Cache) noteMaintenance(err error) {
	failing := err != nil
	if failing && c.noteFailure(err) != nil || c.failing.Swap(failing) == failing {
		return
	}
	if failing {
		c.config.Log.Warn("store maintenance is failing: logs may grow, and the next start may take longer",
			"dir", c.dir, "err", err)
	} else {
		c.config.Log.Info("store maintenance works again", "dir", c.dir)
	}
}

// compact compacts the logs that need it, and returns the errors. A log that it cannot compact stays long. The caller
// holds room.
func (c *Cache) compact() error {
	long := map[*segment.Segment]bool{}
	for _, g := range c.segments.Segments() {
		if g.NeedsCompaction() {
			long[g] = true
		}
	}
	// A log that is shorter than in the checkpoint is damaged.
	if len(long) == 0 {
		return nil
	}
	if err := c.saveCheckpoint(func(g *segment.Segment) bool { return long[g] }); err != nil {
		return err
	}
	var errs []error
	for g := range long {
		c.seal(g)
		err := c.rewindVerify(g.N)
		if err == nil {
			err = g.Compact(c.now(), c.isLive, c.recordMoved)
		}
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}
