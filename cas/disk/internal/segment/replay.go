// SPDX-License-Identifier: Apache-2.0

package segment

import (
	"errors"
	"fmt"
	"io"
	"os"

	"github.com/cloister-build/cloister/cas/disk/internal/fault"
)

// A Visitor receives the events of a log, in order.
type Visitor interface {
	// Put reports a put. Doubtful means that a power failure may have destroyed its content.
	Put(r *Record, doubtful bool)
	// Drop reports, instead of Put, a put that is absent. Another log may hold a later put of the same key: logs are
	// replayed in no particular order.
	Drop(r *Record)
	// Touch reports that the put r was used at stamp.
	Touch(r *Record, stamp uint32)
}

// ErrUnreadable reports that a log cannot be read.
var ErrUnreadable = errors.New("log of a segment cannot be read")

// Replay reports the log of g to v, and truncates both files to their valid length. It returns the number of unreadable
// bytes in the log, not counting a torn end, and the number of puts whose data is missing. Replay drops those, since
// other content will be written in their place. The log is known to have had at least the length expected (see Length):
// a missing part of that counts as unreadable. If all of the log is unreadable, Replay returns ErrUnreadable and
// reports nothing.
func (g *Segment) Replay(v Visitor, expected uint32) (damaged int64, lost int, err error) {
	log, err := readWhole(g.log)
	if fault.Unreadable(err) {
		return 0, 0, fmt.Errorf("%w: %w", ErrUnreadable, err)
	} else if err != nil {
		return 0, 0, err
	}
	fi, err := g.data.Stat()
	if err != nil {
		return 0, 0, err
	}
	r := replayer{g: g, log: log, dataSize: fi.Size(), dropped: map[uint32]bool{}, visitor: v}
	scan(log, r.collectNotes)
	scan(log, r.visit)
	g.units, g.durable, g.synced, g.notes, g.puts = r.end, r.durable, r.synced, r.notes, r.puts
	if r.durable+1 == r.end {
		g.durable = r.end
	}
	g.size.Store(r.used)
	end := int64(r.end) * unit
	g.set.bytes.Add(r.used + end)
	if end < int64(len(log)) || len(log)%unit != 0 {
		if err := g.log.Truncate(end); err != nil {
			return 0, 0, err
		}
	}
	if r.used < fi.Size() {
		if err := g.change(func() error { return g.data.Truncate(r.used) }); err != nil {
			return 0, 0, err
		}
	}
	damaged = end - r.valid + max(0, int64(expected)*unit-end)
	return damaged, len(r.missing), g.note(typeDrop, func(yield func(record, stamp uint32)) {
		for _, record := range r.missing {
			yield(record, 0)
		}
	})
}

// replayer is the state of Replay.
type replayer struct {
	g        *Segment
	log      []byte
	dataSize int64
	visitor  Visitor

	// Found by collectNotes:
	durable, synced uint32
	dropped         map[uint32]bool

	// Found by visit:
	missing     []uint32 // puts without data
	used, valid int64    // bytes of data with records; bytes of valid log
	end, notes  uint32
	puts        uint32 // where the last put ends
}

// collectNotes reads the notes that decide how visit reports puts. A note about a later record is damaged, and must not
// apply to a put that is yet to be written there.
func (r *replayer) collectNotes(kind byte, at uint32, b []byte) {
	switch {
	case kind == typeDurable && noteRecord(b) <= at:
		r.durable, r.synced = max(r.durable, noteRecord(b)), max(r.synced, noteStamp(b))
	case kind == typeDrop && noteRecord(b) < at:
		r.dropped[noteRecord(b)] = true
	}
}

func (r *replayer) visit(kind byte, at uint32, b []byte) {
	units := uint32(1)
	switch kind {
	case typePacked, typeFile:
		units = putUnits
		r.visitPut(kind, at, b)
		r.puts = at + units
	case typeTouch:
		r.notes++
		r.visitTouch(at, b)
	case typeDrop, typeDurable:
		r.notes++
	}
	r.valid += int64(units) * unit
	r.end = at + units
}

func (r *replayer) visitPut(kind byte, at uint32, b []byte) {
	put := decodePut(b, r.g.N, at)
	end := int64(put.Offset)*Block + Padded(int64(put.Length))
	present := kind == typeFile || end <= r.dataSize
	if kind == typePacked && present {
		r.used = max(r.used, end)
	}
	switch {
	case r.dropped[at]:
		r.visitor.Drop(&put)
	case !present:
		r.missing = append(r.missing, at)
		r.visitor.Drop(&put)
	default:
		r.visitor.Put(&put, at >= r.durable && !put.Synced)
	}
}

func (r *replayer) visitTouch(at uint32, b []byte) {
	target := int64(noteRecord(b)) * unit
	if target+putBytes > int64(at)*unit {
		return
	}
	if kind, _ := parse(r.log[target:]); kind == typePacked || kind == typeFile {
		put := decodePut(r.log[target:], r.g.N, noteRecord(b))
		r.visitor.Touch(&put, noteStamp(b))
	}
}

// Puts calls visit with each put of the log, in order, starting at record from, until visit returns false.
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
	more := true
	scan(log, func(kind byte, at uint32, b []byte) {
		if more && at >= from && (kind == typePacked || kind == typeFile) {
			r := decodePut(b, g.N, at)
			more = visit(&r)
		}
	})
	return nil
}

// Bad sectors of a log are skipped: unreadable pages of pageSize bytes count as zeros, up to maxBadPages of them,
// because a disk may take seconds for each.
const (
	pageSize    = 4096
	maxBadPages = 64
)

// readWhole reads a log, an *os.File.
func readWhole(f interface {
	io.ReaderAt
	Stat() (os.FileInfo, error)
},
) ([]byte, error) {
	fi, err := f.Stat()
	if err != nil {
		return nil, err
	}
	b := make([]byte, fi.Size())
	n, err := f.ReadAt(b, 0)
	for bad := 0; fault.Unreadable(err) && bad < maxBadPages && n < len(b); bad++ {
		page := n / pageSize * pageSize
		next := min(page+pageSize, len(b))
		clear(b[page:next])
		if n = next; n == len(b) {
			return b, nil
		}
		var more int
		more, err = f.ReadAt(b[n:], int64(n))
		n += more
	}
	if err == io.EOF {
		err = nil
	}
	return b[:n], err
}

// scan calls visit with each record of log. After damage it resumes at a put: a unit inside a damaged put may consist
// of hash bytes, which a client chooses, and look like a note.
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
