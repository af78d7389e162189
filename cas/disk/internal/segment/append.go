// SPDX-License-Identifier: Apache-2.0

package segment

import (
	"fmt"
	"math"
	"slices"
	"sync"

	"github.com/cloister-build/cloister/cas/disk/internal/commit"
)

// An Item is a record to append, and its content unless it is a file.
type Item struct {
	Record
	Data []byte
	// Failures is the result of Set.Failures before the content of a file was written.
	Failures uint32
	// Next assigns the next order to the record.
	Next bool
}

// An Appender appends to one segment at a time. Calls that arrive during a commit share the next one: the first of them
// to lock the Appender writes for all. It is safe for concurrent use.
type Appender struct {
	// Flushed makes the Appender remember segments for Flush. It is set before the first use.
	Flushed bool

	set *Set

	mu      sync.Mutex
	pending []*batch // guarded by mu

	writing sync.Mutex
	active  *Segment // guarded by writing; nil at first and after a failure
	buffer  []byte   // guarded by writing

	unflushed []*Segment // guarded by writing; appended to since the last Flush
	unsynced  error      // guarded by writing; why the last commit could not be synced
}

// A batch is the items of one call.
type batch struct {
	items     []Item
	bytes     int64 // padded
	committed func(*Item)
	done      bool // guarded by Appender.writing
	err       error
}

// maxCommit limits the bytes of a commit, unless a single batch has more.
const maxCommit = 16 << 20

// keepBuffer is the largest buffer kept between commits, in bytes.
const keepBuffer = 8 << 20

// NewAppender returns an Appender that continues g, if not nil, and creates segments as needed.
func (s *Set) NewAppender(g *Segment) *Appender {
	if g != nil {
		g.growing.Store(true)
	}
	return &Appender{set: s, active: g}
}

// Append appends items next to each other in one commit and sets their positions. It calls committed for each item
// before it returns and before any later commit. If it fails, no item is appended.
func (a *Appender) Append(items []Item, committed func(*Item)) error {
	b := &batch{items: items, committed: committed}
	for i := range items {
		b.bytes += Padded(int64(len(items[i].Data)))
	}
	a.mu.Lock()
	a.pending = append(a.pending, b)
	a.mu.Unlock()
	a.writing.Lock()
	defer a.writing.Unlock()
	for !b.done {
		a.commit(a.take())
	}
	return b.err
}

// take removes the batches of the next commit from pending.
func (a *Appender) take() []*batch {
	a.mu.Lock()
	defer a.mu.Unlock()
	n, bytes := 0, int64(0)
	for n < len(a.pending) && (n == 0 || bytes+a.pending[n].bytes <= min(maxCommit, a.set.Limit)) {
		bytes += a.pending[n].bytes
		n++
	}
	batches := a.pending[:n:n]
	a.pending = a.pending[n:]
	return batches
}

// commit appends all items of batches, or none, except batches with files that a failed flush may have lost.
func (a *Appender) commit(batches []*batch) {
	a.commitTrusted(batches)
	if err := a.unsynced; err != nil {
		a.unsynced = nil
		a.set.Distrust(err)
	}
}

// commitTrusted is commit without Distrust, which it excludes.
func (a *Appender) commitTrusted(batches []*batch) {
	a.set.appending.RLock()
	defer a.set.appending.RUnlock()
	batches = slices.DeleteFunc(batches, func(b *batch) bool {
		if slices.ContainsFunc(b.items, func(it Item) bool { return it.File && it.Failures != a.set.failures }) {
			b.done, b.err = true, ErrDistrusted
		}
		return b.done
	})
	if len(batches) == 0 {
		return
	}
	err := a.write(batches)
	for _, b := range batches {
		if b.done, b.err = true, err; err != nil {
			continue
		}
		for i := range b.items {
			b.committed(&b.items[i])
		}
	}
}

// write appends the batches to the active segment. It is the only function that writes content of blobs.
func (a *Appender) write(batches []*batch) error {
	var total int64
	for _, b := range batches {
		total += b.bytes
	}
	g, err := a.segmentFor(total)
	if err != nil {
		return err
	}
	begin := g.size.Load()
	a.assemble(g, batches, begin, total)
	if len(a.buffer) > 0 {
		if err := a.writeData(g, begin); err != nil {
			return err
		}
	}
	if err := a.record(g, batches); err != nil {
		// No record refers to the bytes. If truncating fails, they count until the segment is removed.
		if a.active == g && g.change(func() error { return g.data.Truncate(begin) }) == nil {
			g.size.Store(begin)
			a.set.bytes.Add(-total)
		}
		return err
	}
	if a.Flushed && !slices.Contains(a.unflushed, g) {
		a.unflushed = append(a.unflushed, g)
	}
	if cap(a.buffer) > keepBuffer {
		a.buffer = nil
	}
	return nil
}

// assemble collects the content of batches, padded size bytes, in the buffer and sets their positions from begin.
func (a *Appender) assemble(g *Segment, batches []*batch, begin, size int64) {
	a.buffer = slices.Grow(a.buffer[:0], int(size))
	for _, b := range batches {
		for i := range b.items {
			it := &b.items[i]
			it.Segment = g.N
			it.Synced = a.set.Sync
			if it.Next {
				it.Order = a.set.order.Add(1)
			}
			if it.File {
				continue
			}
			it.Offset = uint32((begin + int64(len(a.buffer))) / Block)
			a.buffer = append(a.buffer, it.Data...)
			a.buffer = append(a.buffer, zeros[:Padded(int64(len(it.Data)))-int64(len(it.Data))]...)
		}
	}
}

// writeData writes the buffer to the data of g at begin, its end.
func (a *Appender) writeData(g *Segment, begin int64) error {
	err := g.change(func() error {
		_, err := g.data.WriteAt(a.buffer, begin)
		if err != nil {
			// If this fails too, the next write overwrites the rest or Open truncates it.
			_ = g.data.Truncate(begin)
		}
		return err
	})
	if err != nil {
		return err
	}
	g.size.Store(begin + int64(len(a.buffer)))
	a.set.bytes.Add(int64(len(a.buffer)))
	commit.Point("data written")
	if !a.set.Sync {
		return nil
	}
	if err := flush(g.data); err != nil {
		a.sealActive()
		a.unsynced = err
		return err
	}
	commit.Point("data flushed")
	return nil
}

var zeros [Block]byte

// record appends the records of batches to the log.
func (a *Appender) record(g *Segment, batches []*batch) error {
	g.logging.Lock()
	var log []byte
	at := g.units
	for _, b := range batches {
		for i := range b.items {
			b.items[i].Record.Position.Record = at
			log = appendPut(log, &b.items[i].Record)
			at += putUnits
		}
	}
	err := g.write(log)
	if err == nil {
		g.puts = g.units
	}
	g.logging.Unlock()
	if err != nil {
		return err
	}
	// Commit point: the puts exist.
	commit.Point("records written")
	if !a.set.Sync {
		return nil
	}
	if err := flush(g.log); err != nil {
		// The kernel may have dropped the records it failed to write. If they reappear at the next Open, so does their
		// content: more than was acknowledged, not less.
		a.sealActive()
		a.unsynced = err
		return err
	}
	commit.Point("records flushed")
	return nil
}

// segmentFor returns the segment for n more bytes. The caller holds writing.
func (a *Appender) segmentFor(n int64) (*Segment, error) {
	const maxData = int64(math.MaxUint32) * Block
	if g := a.active; g != nil {
		size := g.size.Load()
		if g.growing.Load() && (size == 0 || size+n <= a.set.Limit) && size+n <= maxData {
			return g, nil
		}
	}
	a.sealActive()
	g, err := a.set.create()
	if err != nil {
		return nil, err
	}
	a.active = g
	return g, nil
}

// sealActive ends appending to the active segment. The caller holds writing.
func (a *Appender) sealActive() {
	if a.active != nil {
		a.active.growing.Store(false)
		a.active = nil
	}
}

// Seal ends appending to g. Afterwards all commits to g have been reported to their callers.
func (a *Appender) Seal(g *Segment) {
	a.writing.Lock()
	defer a.writing.Unlock()
	if a.active == g {
		a.sealActive()
	}
}

// FlushToo makes the next Flush write g if not all of it is known to be durable: an earlier process may have ended
// before its Flush.
func (a *Appender) FlushToo(g *Segment) {
	g.logging.Lock()
	known := g.units <= g.durable
	g.logging.Unlock()
	a.writing.Lock()
	defer a.writing.Unlock()
	if !known && !slices.Contains(a.unflushed, g) {
		a.unflushed = append(a.unflushed, g)
	}
}

// Abandon makes Flush ignore g, whose live entries were appended to another segment.
func (a *Appender) Abandon(g *Segment) {
	a.writing.Lock()
	defer a.writing.Unlock()
	a.unflushed = slices.DeleteFunc(a.unflushed, func(u *Segment) bool { return u == g })
}

// Flush syncs everything that was appended. If it fails, it calls Set.Distrust, and fails until the affected segments
// are abandoned.
func (a *Appender) Flush() error {
	a.writing.Lock()
	defer a.writing.Unlock()
	for len(a.unflushed) > 0 {
		g := a.unflushed[0]
		if g.isLost() {
			return fmt.Errorf("%w: %w", ErrDistrusted, a.set.Failure())
		}
		if err := g.flush(); err != nil {
			a.set.Distrust(err)
			return err
		}
		a.unflushed = a.unflushed[1:]
	}
	return nil
}

// flush syncs both files unless they were removed.
func (g *Segment) flush() error {
	g.using.RLock()
	defer g.using.RUnlock()
	if g.data == nil {
		return nil
	}
	if err := flush(g.data); err != nil {
		return err
	}
	g.logging.Lock()
	defer g.logging.Unlock()
	return flush(g.log)
}
