// SPDX-License-Identifier: Apache-2.0

package segment

import (
	"cmp"
	"errors"
	"fmt"
	"math"

	"github.com/cloister-build/cloister/cas/disk/internal/commit"
	"github.com/cloister-build/cloister/cas/disk/internal/index"
)

// Touch records when entries of the segment were last used. It calls find for each key, which returns the current
// record of the key, the stamp, and whether the record is in this segment.
func (g *Segment) Touch(keys []index.Key, find func(index.Key) (record, stamp uint32, ok bool)) error {
	return g.note(typeTouch, func(yield func(record, stamp uint32)) {
		for _, k := range keys {
			if record, stamp, ok := find(k); ok {
				yield(record, stamp)
			}
		}
	})
}

// Drop records that an entry of the segment is absent. It calls find for the record of the entry, if it still has one.
func (g *Segment) Drop(find func() (record uint32, ok bool)) error {
	return g.note(typeDrop, func(yield func(record, stamp uint32)) {
		if record, ok := find(); ok {
			yield(record, 0)
		}
	})
}

// Forget is Drop of an entry that is not in the index and may have moved: it records nothing if r.Record is another
// put.
func (g *Segment) Forget(r *index.Entry) error {
	return g.note(typeDrop, func(yield func(record, stamp uint32)) {
		b := make([]byte, putBytes)
		if _, err := g.log.ReadAt(b, int64(r.Record)*unit); err != nil {
			return
		}
		if kind, _ := parse(b); kind != typePacked && kind != typeFile {
			return
		}
		if now := decodePut(b, g.N, r.Record); now.Key == r.Key && now.Offset == r.Offset {
			yield(r.Record, 0)
		}
	})
}

// note appends a record of one unit for each record that each yields. Each runs while the log is locked, so that its
// answers are current.
func (g *Segment) note(kind byte, each func(yield func(record, stamp uint32))) error {
	g.logging.Lock()
	defer g.logging.Unlock()
	if g.log == nil {
		return nil // the segment was removed
	}
	var b []byte
	each(func(record, stamp uint32) { b = appendNote(b, kind, stamp, record) })
	if len(b) == 0 {
		return nil
	}
	if err := g.write(b); err != nil {
		return err
	}
	g.notes += uint32(len(b) / unit)
	return nil
}

// write appends b to the log, or leaves the log unchanged. The caller holds logging.
func (g *Segment) write(b []byte) error {
	if int64(g.units)+int64(len(b)/unit) > math.MaxUint32 {
		return fmt.Errorf("log of segment %d has reached its maximum length", g.N)
	}
	if g.broken {
		if err := g.log.Truncate(int64(g.units) * unit); err != nil {
			return fmt.Errorf("log of segment %d ends in a torn record: %w", g.N, err)
		}
		g.broken = false
	}
	if n, err := g.log.WriteAt(b, int64(g.units)*unit); err != nil {
		// Whole records in the written part would refer to data that is about to be overwritten.
		if n > 0 && g.log.Truncate(int64(g.units)*unit) != nil {
			g.broken = true
			g.growing.Store(false)
		}
		return err
	}
	g.units += uint32(len(b) / unit)
	g.set.bytes.Add(int64(len(b)))
	return nil
}

// Length returns the length of the log, and of the part of it that is known to be durable, in an opaque unit. The log
// becomes shorter only by Compact.
func (g *Segment) Length() (all, durable uint32) {
	g.logging.Lock()
	defer g.logging.Unlock()
	return g.units, min(g.durable, g.units)
}

// DurableSince returns when all of the segment was last known to be durable, in seconds since 1970, or 0.
func (g *Segment) DurableSince() uint32 {
	g.logging.Lock()
	defer g.logging.Unlock()
	return g.synced
}

// MarkDurable calls flush, which syncs the whole store, and records at the time now that everything committed before
// is durable, except in segments that Distrusted returns. If flush fails, it calls Distrust.
func (s *Set) MarkDurable(now uint32, flush func() error) error {
	type mark struct {
		g     *Segment
		units uint32
	}
	var marks []mark
	for _, g := range s.Segments() {
		g.logging.Lock()
		if g.log != nil && g.units > g.durable && !g.lost {
			marks = append(marks, mark{g, g.units})
		}
		g.logging.Unlock()
	}
	if len(marks) == 0 {
		return nil
	}
	if err := flush(); errors.Is(err, errors.ErrUnsupported) {
		return err
	} else if err != nil {
		s.Distrust(err)
		return err
	}
	commit.Point("flushed")
	var first error
	for _, m := range marks {
		err := m.g.note(typeDurable, func(yield func(record, stamp uint32)) { yield(m.units, now) })
		if err != nil {
			first = cmp.Or(first, err)
			continue
		}
		m.g.logging.Lock()
		m.g.synced = now
		// The mark itself does not call for another one.
		if m.g.durable = m.units; m.g.units == m.units+1 {
			m.g.durable = m.g.units
		}
		m.g.logging.Unlock()
	}
	return first
}
