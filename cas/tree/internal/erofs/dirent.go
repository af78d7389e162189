// SPDX-License-Identifier: Apache-2.0

package erofs

import (
	"encoding/binary"
	"strings"
)

// names writes the names of d at the offset at: in each block a record for each name, then the names.
func (w *writer) names(at int, d *Dir, entries []Entry) {
	end := at + int(d.size)
	first := merge(entries)
	for at < end {
		block := w.b[at:min(at+BlockSize, end)]
		var size blocks
		n := 0
		for ahead := first; ; n++ {
			name, _, ok := ahead.next()
			if !ok || !size.add(len(name)) && n > 0 {
				break
			}
		}
		off := n * direntSize
		for k := range n {
			name, e, _ := first.next()
			inode, kind := d.inode, Directory
			switch {
			case e != nil:
				inode, kind = e.inode, e.Kind
			case name == "..":
				inode = d.parent
			}
			record := block[k*direntSize:]
			binary.LittleEndian.PutUint64(record, uint64(inode/compactSize))
			binary.LittleEndian.PutUint16(record[8:], uint16(off))
			record[10] = byte(kind)
			off += copy(block[off:], name)
		}
		at += BlockSize
	}
}

// blocks computes the size of a directory. No name crosses a block boundary.
type blocks struct {
	full int64
	used int // of the last one
}

// add adds a name of n bytes and reports whether it is in the same block as the previous one.
func (s *blocks) add(n int) bool {
	s.used += direntSize + n
	if s.used <= BlockSize {
		return true
	}
	s.full, s.used = s.full+1, direntSize+n
	return false
}

func (s *blocks) total() int64 { return s.full<<blockBits + int64(s.used) }

// A merged iterates over the sorted names of a directory, including . and .. .
type merged struct {
	entries []Entry
	dots    int // how many of . and .. it has returned
}

func merge(entries []Entry) merged { return merged{entries: entries} }

// next returns the next name and its entry, which is nil for . and .. .
func (m *merged) next() (string, *Entry, bool) {
	if m.dots < 2 {
		if dot := ".."[:m.dots+1]; len(m.entries) == 0 || m.entries[0].Name > dot {
			m.dots++
			return dot, nil, true
		}
	}
	if len(m.entries) == 0 {
		return "", nil, false
	}
	e := &m.entries[0]
	m.entries = m.entries[1:]
	return e.Name, e, true
}

// badName returns what is wrong with a name, or "".
func badName(name string) string {
	switch {
	case name == "" || len(name) > maxName:
		return "is not 1 to 255 bytes long"
	case name == "." || name == "..":
		return "is reserved"
	case strings.IndexByte(name, '/') >= 0 || strings.IndexByte(name, 0) >= 0:
		return "contains a slash or NUL"
	}
	return ""
}
