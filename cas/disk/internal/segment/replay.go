// SPDX-License-Identifier: Apache-2.0

package segment

import (
	"io"
	"os"
	"path/filepath"

	"github.com/cloister-build/cloister/cas/disk/internal/commit"
	"github.com/cloister-build/cloister/cas/disk/internal/index"
	"github.com/cloister-build/cloister/cas/durable"
)

// A Visitor is told what a log says, in order.
type Visitor interface {
	// Put is told of a put. Doubtful says that a loss of power may have taken its bytes.
	Put(r *Record, doubtful bool)
	// Drop is told, in the place of Put, of a put that is absent: logs are read in no order, and the same may have been
	// put again in another one.
	Drop(r *Record)
	// Touch is told that what was put in r was used at stamp.
	Touch(r *Record, stamp uint32)
}

// Replay tells h what the log of g says, and makes both files end where that ends. It returns how many bytes of the
// log were not readable, beside a torn end, and how many puts tell of data that is not there. Those are dropped: other
// bytes will take the place of theirs.
func (g *Segment) Replay(h Visitor) (damaged int64, lost int, err error) {
	log, err := readWhole(g.log)
	if err != nil {
		return 0, 0, err
	}
	fi, err := g.data.Stat()
	if err != nil {
		return 0, 0, err
	}
	var durable, mark uint32
	dropped := map[uint32]bool{}
	scan(log, func(kind byte, at uint32, b []byte) {
		// A note is of what was there before it. One of what comes later is none of ours, and must not decide about what
		// is yet to be put there.
		switch {
		case kind == typeDurable && noteRecord(b) <= at:
			durable, mark = max(durable, noteRecord(b)), max(mark, noteStamp(b))
		case kind == typeDrop && noteRecord(b) < at:
			dropped[noteRecord(b)] = true
		}
	})
	var gone []uint32     // puts whose data is not there
	var size, valid int64 // of the data that records tell of; of the log that is records
	var end uint32
	var notes uint32
	scan(log, func(kind byte, at uint32, b []byte) {
		units := uint32(1)
		switch kind {
		case typePacked, typeFile:
			units = putUnits
			r := decodePut(b, g.N, at)
			stop := int64(r.Offset)*Block + Padded(int64(r.Length))
			there := kind == typeFile || stop <= fi.Size()
			if kind == typePacked && there {
				size = max(size, stop)
			}
			switch {
			case dropped[at]:
				h.Drop(&r)
			case !there:
				gone = append(gone, at)
				h.Drop(&r)
			default:
				h.Put(&r, at >= durable && !r.Synced)
			}
		case typeTouch:
			notes++
			target := int64(noteRecord(b)) * unit
			if target+putBytes > int64(at)*unit {
				break
			}
			if kind, _ := parse(log[target:]); kind != typePacked && kind != typeFile {
				break
			}
			r := decodePut(log[target:], g.N, noteRecord(b))
			h.Touch(&r, noteStamp(b))
		case typeDrop, typeDurable:
			notes++
		}
		valid += int64(units) * unit
		end = at + units
	})
	g.units, g.marked, g.mark, g.notes = end, durable, mark, notes
	if durable+1 == end {
		g.marked = end
	}
	g.size.Store(size)
	g.set.bytes.Add(size + int64(end)*unit)
	if int64(end)*unit < int64(len(log)) || len(log)%unit != 0 {
		if err := g.log.Truncate(int64(end) * unit); err != nil {
			return 0, 0, err
		}
	}
	if size < fi.Size() {
		if err := g.change(func() error { return g.data.Truncate(size) }); err != nil {
			return 0, 0, err
		}
	}
	return int64(end)*unit - valid, len(gone), g.note(typeDrop, 0, func(yield func(uint32)) {
		for _, record := range gone {
			yield(record)
		}
	})
}

// Puts calls visit with each put of the log, in order, from the record from on, until visit returns false.
func (g *Segment) Puts(from uint32, visit func(*Record) bool) error {
	g.logging.Lock()
	if g.log == nil {
		g.logging.Unlock()
		return ErrGone
	}
	log, err := readWhole(g.log)
	g.logging.Unlock()
	if err != nil {
		return err
	}
	going := true
	scan(log, func(kind byte, at uint32, b []byte) {
		if going && at >= from && (kind == typePacked || kind == typeFile) {
			r := decodePut(b, g.N, at)
			going = visit(&r)
		}
	})
	return nil
}

func readWhole(f *os.File) ([]byte, error) {
	fi, err := f.Stat()
	if err != nil {
		return nil, err
	}
	b := make([]byte, fi.Size())
	n, err := f.ReadAt(b, 0)
	if err == io.EOF {
		err = nil
	}
	return b[:n], err
}

// scan calls visit with each record of log. Behind what is damaged it begins with a put again: a unit within a damaged
// put may be all hash, which a client chooses, and look like a note.
func scan(log []byte, visit func(kind byte, at uint32, b []byte)) {
	damaged := false
	for at := uint32(0); int64(at)*unit < int64(len(log)); {
		b := log[int64(at)*unit:]
		kind, units := parse(b)
		if damaged = units == 0 || damaged && units != putUnits; damaged {
			at++
			continue
		}
		visit(kind, at, b)
		at += units
	}
}

// Bloated reports whether notes make up a good part of the log, and enough to make it worth to write it anew.
func (g *Segment) Bloated() bool {
	g.logging.Lock()
	defer g.logging.Unlock()
	// The notes of all segments must not take more than the room that is kept for one of them.
	least := min(64<<10, g.set.Limit/unit/64)
	return g.log != nil && int64(g.notes) >= least && g.notes >= g.units/5
}

// Shorten writes the log anew, at the time now: only the puts that are still wanted, with their latest stamp. Wanted says that of a put;
// it is told by moved where the record is now. Nothing may be reading the log by Puts meanwhile to remove the segment,
// and no Appender may add to it: nobody yet wants what was recorded a moment ago.
func (g *Segment) Shorten(now uint32, wanted func(*Record) bool, moved func(from index.Position, to *Record)) error {
	g.logging.Lock()
	defer g.logging.Unlock()
	if g.log == nil {
		return nil
	}
	log, err := readWhole(g.log)
	if err != nil {
		return err
	}
	type move struct {
		from index.Position
		to   Record
	}
	var moves []move
	var short []byte
	var durable uint32 // where what is known to be on disk ends in the new log
	touched := map[uint32]uint32{}
	scan(log, func(kind byte, at uint32, b []byte) {
		if kind == typeTouch {
			touched[noteRecord(b)] = max(touched[noteRecord(b)], noteStamp(b))
		}
	})
	scan(log, func(kind byte, at uint32, b []byte) {
		if kind != typePacked && kind != typeFile {
			return
		}
		r := decodePut(b, g.N, at)
		from := r.Position
		if !wanted(&r) {
			return
		}
		r.Stamp = max(r.Stamp, min(touched[at], now)) // which the index may not know yet
		r.Position.Record = uint32(len(short) / unit)
		short = appendPut(short, &r)
		moves = append(moves, move{from, r})
		if at < g.marked {
			durable = uint32(len(short) / unit)
		}
	})
	puts := uint32(len(short) / unit)
	short = appendNote(short, typeDurable, g.mark, durable)
	path := g.set.path(g.N, ".log")
	f, err := replace(path, short)
	if err != nil {
		return err
	}
	_ = g.log.Close() // read and written for the last time
	units := puts + 1
	g.set.bytes.Add((int64(units) - int64(g.units)) * unit)
	g.log, g.units, g.notes, g.marked, g.broken = f, units, 1, durable, false
	if durable == puts {
		g.marked = units
	}
	for i := range moves {
		moved(moves[i].from, &moves[i].to)
	}
	return nil
}

// replace atomically replaces the file at path.
func replace(path string, content []byte) (*os.File, error) {
	f, err := durable.Replace(path, func(f *os.File) error {
		_, err := f.Write(content)
		commit.Point("log rewritten")
		return err
	})
	if err != nil {
		return nil, err
	}
	commit.Point("log renamed")
	// If a power failure loses the new name, the old log is still there.
	_ = durable.SyncDir(filepath.Dir(path))
	return f, nil
}
