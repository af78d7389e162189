// SPDX-License-Identifier: Apache-2.0

package disk

import (
	"cmp"
	"context"
	"errors"
	"fmt"

	"github.com/cloister-build/cloister/cas/disk/internal/commit"
	"github.com/cloister-build/cloister/cas/disk/internal/index"
	"github.com/cloister-build/cloister/cas/disk/internal/segment"
	"github.com/cloister-build/cloister/cas/durable"
)

// moveBytes is the size of a commit of moved data.
const moveBytes = 1 << 20

// evacuate evicts from g what p selects, moves the rest to another segment, and removes g. If it fails, g stays without
// what was evicted or moved.
func (c *Cache) evacuate(ctx context.Context, p *plan, g *segment.Segment) error {
	evicted, err := c.empty(ctx, p, g, c.segments.Trusted())
	if err == nil {
		err = c.removeSegment(p, g)
	}
	if err != nil {
		// While the segment exists, its log must not hold them.
		for i := range evicted {
			c.forget(&evicted[i])
		}
	}
	return err
}

// empty evicts from g what p selects, and moves the rest to another segment. It returns the evicted results and chunk
// lists. The files in g were written after the given number of failed flushes; it fails if there are more.
func (c *Cache) empty(
	ctx context.Context, p *plan, g *segment.Segment, failures uint32,
) (evicted []index.Entry, err error) {
	c.seal(g)
	m := mover{cache: c, failures: failures}
	var failed error
	err = g.Puts(0, func(r *segment.Record) bool {
		if failed = ctx.Err(); failed == nil && c.closed.Load() {
			failed = c.closedError()
		}
		if failed != nil {
			return false
		}
		e, ok := c.index.Get(r.Key)
		if !ok || e.Position != r.Position {
			return true
		}
		if !e.File && c.evictPacked(p, &e) {
			if isRecord(e.Key) {
				evicted = append(evicted, e)
			}
			return true
		}
		failed = m.add(r, e)
		return failed == nil
	})
	if err = cmp.Or(failed, err); err == nil {
		err = m.flush()
	}
	p.report.Moved += m.bytes
	if err != nil {
		err = c.writeError(err)
	}
	return evicted, err
}

// evictPacked removes e if p still selects it.
func (c *Cache) evictPacked(p *plan, e *index.Entry) bool {
	gone, removed := c.index.Remove(e.Key, func(now *index.Entry) bool {
		return now.Position == e.Position && c.evictable(p, now)
	})
	if removed {
		c.uncount(&gone)
		p.report.Blobs++
		c.evictedBlobs.Add(1)
		c.evictedBytes.Add(segment.Padded(int64(gone.Length)))
	}
	return removed
}

// removeSegment removes a segment without live entries. It first syncs what was moved out of it.
func (c *Cache) removeSegment(p *plan, g *segment.Segment) error {
	if live, files := g.Live.Load(), g.Files.Load(); live != 0 || files != 0 {
		return fmt.Errorf("store %s: segment %d stays: %d bytes and %d files in it are live", c.dir, g.N, live, files)
	}
	if err := errors.Join(c.moved.Flush(), durable.SyncDir(c.segments.Dir)); err != nil {
		return c.writeError(err)
	}
	commit.Point("moved and flushed")
	if err := c.segments.Remove(g); err != nil {
		return c.writeError(err)
	}
	p.report.Segments++
	c.shrinkHeld(p.held)
	return nil
}

// A mover moves entries to another segment, many in a commit.
type mover struct {
	cache    *Cache
	failures uint32 // of the items
	items    []segment.Item
	from     []index.Position
	size     int64 // of the data of items
	bytes    int64 // moved in total
}

// add moves e, whose record is r, in this or a later commit. It drops a damaged entry.
func (m *mover) add(r *segment.Record, e index.Entry) error {
	it := segment.Item{Record: *r, Failures: m.failures}
	it.Stamp = e.Stamp
	if !e.File {
		b, err := m.cache.read(e)
		switch {
		case err == nil && !m.cache.sound(&e, b):
			_ = m.cache.damaged(e, b)
			return nil
		case isDropped(err):
			return nil
		case err != nil:
			return err
		}
		it.Data, it.Verified = b, true
	} else {
		it.Verified = e.Verified
	}
	m.items, m.from = append(m.items, it), append(m.from, e.Position)
	if m.size += int64(len(it.Data)); m.size < moveBytes && len(m.items) < 10_000 {
		return nil
	}
	return m.flush()
}

// sound reports whether b is the content of e.
func (c *Cache) sound(e *index.Entry, b []byte) bool {
	if isRecord(e.Key) {
		return soundRecord(b)
	}
	f, err := functionOf(e.Key)
	return err == nil && is(e.Key, f.Sum(b))
}

// flush moves the added entries.
func (m *mover) flush() error {
	if len(m.items) == 0 {
		return nil
	}
	var late []index.Key // used since add
	i := 0
	err := m.cache.moved.Append(m.items, func(it *segment.Item) {
		from := m.from[i]
		i++
		var old index.Entry
		moved := false
		m.cache.index.Update(it.Key, func(e *index.Entry) {
			if e.Position != from {
				return
			}
			old, moved = *e, true
			stamp, verified := max(e.Stamp, it.Stamp), e.Verified || it.Verified
			if stamp > it.Stamp {
				late = append(late, it.Key)
			}
			*e = it.Entry
			e.Stamp, e.Verified = stamp, verified
		})
		switch {
		case moved:
			m.cache.addLive(&old, -1)
			m.cache.addLive(&it.Entry, 1)
		case isRecord(it.Key):
			m.cache.forget(&it.Entry) // it was replaced meanwhile and must not reappear
		}
	})
	if err != nil {
		return err
	}
	commit.Point("moved")
	if len(late) > 0 {
		m.cache.touch(late, m.cache.now())
	}
	m.bytes += m.size
	m.items, m.from, m.size = m.items[:0], m.from[:0], 0
	return nil
}
