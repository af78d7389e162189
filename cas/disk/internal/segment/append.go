// SPDX-License-Identifier: Apache-2.0

package segment

import (
	"math"
	"slices"
	"sync"

	"github.com/cloister-build/cloister/cas/disk/internal/commit"
)

// An Item is a record to be put, and its bytes; none for a file.
type Item struct {
	Record
	Data []byte
	// Next gives the record the next order.
	Next bool
}

// An Appender adds to one segment at a time. Those who append while a commit is being written share the next one:
// the first of them to get hold of the Appender writes for all. It is safe for concurrent use.
type Appender struct {
	// Flushed says that Flush will be called, so that what is appended is remembered for it. It is set before the
	// first use.
	Flushed bool

	set *Set

	mu      sync.Mutex
	pending []*batch // guarded by mu

	writing sync.Mutex
	active  *Segment // guarded by writing; nil before the first, and after a failure
	buffer  []byte   // guarded by writing

	unflushed []*Segment // guarded by writing; to which was appended since the last Flush
	lost      error      // guarded by writing; why a Flush failed
}

// A batch is what one call appends.
type batch struct {
	items     []Item
	bytes     int64 // padded
	committed func(*Item)
	done      bool // guarded by Appender.writing
	err       error
}

// maxCommit is how many bytes share a commit, unless a single batch has more.
const maxCommit = 16 << 20

// keepBuffer is the largest buffer that is kept from one commit to the next, in bytes.
const keepBuffer = 8 << 20

// NewAppender returns an Appender that goes on with g, if that is not nil, and makes segments as it needs them.
func (s *Set) NewAppender(g *Segment) *Appender {
	if g != nil {
		g.growing.Store(true)
	}
	return &Appender{set: s, active: g}
}

// Append puts items, in one commit and next to each other, and says in each where it is. Before it returns, and
// before any later commit is written, it calls committed with each of them. If it fails none of them is put.
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

// take returns the batches of the next commit.
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

// commit puts all items of batches, or none.
func (a *Appender) commit(batches []*batch) {
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

// write is the one place where bytes of blobs are written.
func (a *Appender) write(batches []*batch) error {
	a.buffer = a.buffer[:0]
	var total int64
	for _, b := range batches {
		total += b.bytes
	}
	g, err := a.room(total)
	if err != nil {
		return err
	}
	begin := g.size.Load()
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
	if len(a.buffer) > 0 {
		err := g.change(func() error {
			_, err := g.data.WriteAt(a.buffer, begin)
			if err != nil {
				// If this fails too, the next write goes over the rest, or Open cuts it off.
				_ = g.data.Truncate(begin)
			}
			return err
		})
		if err != nil {
			return err
		}
		g.size.Store(begin + total)
		a.set.bytes.Add(total)
		commit.Point("data written")
		if a.set.Sync {
			if err := flush(g.data); err != nil {
				a.abandon()
				return err
			}
			commit.Point("data flushed")
		}
	}
	if err := a.record(g, batches); err != nil {
		// Nothing tells of the bytes. If they cannot be cut off, they count until the segment goes.
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

var zeros [Block]byte

// record writes the records of batches.
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
	g.logging.Unlock()
	if err != nil {
		return err
	}
	// Commit point: from here on the puts exist.
	commit.Point("records written")
	if !a.set.Sync {
		return nil
	}
	if err := flush(g.log); err != nil {
		// What the kernel has not written it may have forgotten. The records may come back at the next Open,
		// and what they tell of is there: that is more than was acknowledged, and not less.
		a.abandon()
		return err
	}
	commit.Point("records flushed")
	return nil
}

// room returns the segment for n more bytes. The caller holds writing.
func (a *Appender) room(n int64) (*Segment, error) {
	const most = int64(math.MaxUint32) * Block
	if g := a.active; g != nil {
		size := g.size.Load()
		if g.growing.Load() && (size == 0 || size+n <= a.set.Limit) && size+n <= most {
			return g, nil
		}
	}
	a.abandon()
	g, err := a.set.create()
	if err != nil {
		return nil, err
	}
	a.active = g
	return g, nil
}

// abandon seals the active segment. The caller holds writing.
func (a *Appender) abandon() {
	if a.active != nil {
		a.active.growing.Store(false)
		a.active = nil
	}
}

// Seal makes g, if the Appender adds to it, one that nobody adds to: what was committed to it has been told to
// whoever appended it.
func (a *Appender) Seal(g *Segment) {
	a.writing.Lock()
	defer a.writing.Unlock()
	if a.active == g {
		a.abandon()
	}
}

// Remember makes Flush write g, too, if not all of it is known to be on the disk: an earlier process may have ended
// before its own Flush.
func (a *Appender) Remember(g *Segment) {
	g.logging.Lock()
	known := g.units <= g.marked
	g.logging.Unlock()
	a.writing.Lock()
	defer a.writing.Unlock()
	if !known && !slices.Contains(a.unflushed, g) {
		a.unflushed = append(a.unflushed, g)
	}
}

// Flush writes to the disk all that was appended. If that has failed once it fails for good: what the kernel has not
// written it may have forgotten, and would not say so again.
func (a *Appender) Flush() error {
	a.writing.Lock()
	defer a.writing.Unlock()
	for len(a.unflushed) > 0 && a.lost == nil {
		a.lost = a.unflushed[0].flush()
		a.unflushed = a.unflushed[1:]
	}
	return a.lost
}

// flush writes both files to the disk, unless they are gone.
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
