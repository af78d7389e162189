// SPDX-License-Identifier: Apache-2.0

package segment

import (
	"os"
	"path/filepath"

	"github.com/cloister-build/cloister/cas/disk/internal/commit"
	"github.com/cloister-build/cloister/cas/disk/internal/index"
	"github.com/cloister-build/cloister/cas/durable"
)

// NeedsCompaction reports whether notes make up much of the log.
func (g *Segment) NeedsCompaction() bool {
	g.logging.Lock()
	defer g.logging.Unlock()
	// The notes of all segments together stay below the space reserved for one segment.
	least := min(64<<10, g.set.Limit/unit/64)
	return g.log != nil && int64(g.notes) >= least && g.notes >= g.units/5
}

// Compact rewrites the log, at the time now, with only the puts for which live returns true, and their latest stamps.
// It reports each new position to moved. No Appender may append to g: its latest puts may not be live yet. The caller
// makes sure that nobody uses Puts to remove the segment.
func (g *Segment) Compact(now uint32, live func(*Record) bool, moved func(from index.Position, to *Record)) error {
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
	var compacted []byte
	var durable uint32 // length of the durable part of compacted, in units
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
		if !live(&r) {
			return
		}
		r.Stamp = max(r.Stamp, min(touched[at], now)) // the index may lag behind
		r.Position.Record = uint32(len(compacted) / unit)
		compacted = appendPut(compacted, &r)
		moves = append(moves, move{from, r})
		if at < g.durable {
			durable = uint32(len(compacted) / unit)
		}
	})
	puts := uint32(len(compacted) / unit)
	compacted = appendNote(compacted, typeDurable, g.synced, durable)
	f, err := replace(g.set.path(g.N, ".log"), compacted)
	if err != nil {
		return err
	}
	_ = g.log.Close() // obsolete
	units := puts + 1
	g.set.bytes.Add((int64(units) - int64(g.units)) * unit)
	g.log, g.units, g.notes, g.puts, g.durable, g.broken = f, units, 1, puts, durable, false
	if durable == puts {
		g.durable = units
	}
	for i := range moves {
		moved(moves[i].from, &moves[i].to)
	}
	return nil
}

// replace atomically replaces the file at path and returns it. It opens the file before it is renamed: afterwards, a
// failure would leave g with the old log. (On Windows, which does not rename open files, it fails.)
func replace(path string, content []byte) (log *os.File, err error) {
	err = durable.Replace(path, func(f *os.File) error {
		_, err := f.Write(content)
		if err == nil {
			log, err = os.OpenFile(f.Name(), os.O_RDWR, 0)
		}
		commit.Point("log rewritten")
		return err
	})
	if err != nil {
		if log != nil {
			_ = log.Close()
		}
		return nil, err
	}
	commit.Point("log renamed")
	// If a power failure undoes the rename, the old log is valid, too.
	_ = durable.SyncDir(filepath.Dir(path))
	return log, nil
}
