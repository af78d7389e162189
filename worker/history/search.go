// SPDX-License-Identifier: Apache-2.0

package history

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"io/fs"
	"os"
	"slices"
)

// errStop ends a search that has found enough.
var errStop = errors.New("enough")

// Search calls visit for the entries that f admits, the newest first, at most limit of them. It sees all that was added
// before. An error of visit ends it and is returned. Lines that are no entries, as damage leaves them, are passed over.
//
// It reads up to all that is kept, and takes some 0.1 s for 100 MB of a file that is in memory.
func (l *Log) Search(ctx context.Context, f Filter, limit int, visit func(*Entry) error) error {
	if limit <= 0 {
		return nil
	}
	f = f.printable()
	select {
	case l.readers <- struct{}{}:
		defer func() { <-l.readers }()
	case <-ctx.Done():
		return ctx.Err()
	}
	if err := l.flush(ctx); err != nil {
		return err
	}
	firsts, err := list(l.cfg.Dir)
	if err != nil {
		return err
	}
	s := search{ctx: ctx, Filter: f, marks: f.marks(), oldest: l.cfg.now().Add(-l.cfg.MaxAge).UnixNano(), left: limit, visit: visit, seen: map[string]bool{}}
	for _, first := range slices.Backward(firsts) {
		if f.Before != 0 && first >= f.Before {
			continue
		}
		err := s.segment(l.path(first))
		switch {
		case errors.Is(err, errStop):
			return nil
		case err != nil && !errors.Is(err, fs.ErrNotExist): // the oldest may be deleted at any time
			return err
		}
	}
	return nil
}

// A search is one that has begun.
type search struct {
	Filter
	ctx    context.Context
	marks  [][]byte
	oldest int64 // in nanoseconds since 1970
	left   int
	visit  func(*Entry) error
	seen   map[string]bool // actions, if they are to be distinct
}

// failures are in the lines of all entries that have failed.
var failures = [][]byte{[]byte(`,"code":`), []byte(`,"exit":`)}

func (s *search) segment(path string) error {
	if err := s.ctx.Err(); err != nil {
		return err
	}
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	return backwards(f, func(line []byte) error {
		for _, m := range s.marks {
			if !bytes.Contains(line, m) {
				return nil
			}
		}
		if s.Failed && !bytes.Contains(line, failures[0]) && !bytes.Contains(line, failures[1]) {
			return nil
		}
		var e Entry
		if json.Unmarshal(line, &e) != nil {
			return nil
		}
		// Others before it need not be older: clocks are set back.
		if e.Time.UnixNano() < s.oldest || !s.admits(&e) || s.Distinct && (s.seen[e.Action] || e.How == Checked) {
			return s.ctx.Err()
		}
		if s.Distinct {
			s.seen[e.Action] = true
		}
		if err := s.visit(&e); err != nil {
			return err
		}
		if s.left--; s.left == 0 {
			return errStop
		}
		return s.ctx.Err()
	})
}

// block is how many bytes are read at once.
const block = 256 << 10

// wholeSize returns the size of f up to the end of its last whole line.
func wholeSize(f *os.File) (int64, error) {
	end, err := f.Seek(0, io.SeekEnd)
	if err != nil {
		return 0, err
	}
	for buf := make([]byte, block); end > 0; {
		n := min(end, block)
		if _, err := f.ReadAt(buf[:n], end-n); err != nil {
			return 0, err
		}
		if i := bytes.LastIndexByte(buf[:n], '\n'); i >= 0 {
			return end - n + int64(i) + 1, nil
		}
		end -= n
	}
	return 0, nil
}

// backwards calls visit for the whole lines of f, the last first, without their ends. One of more than maxLine bytes,
// or of none, is passed over. An error of visit ends it and is returned; what visit is given is valid until it returns.
func backwards(f *os.File, visit func(line []byte) error) error {
	end, err := wholeSize(f)
	if err != nil {
		return err
	}
	end-- // the end of the last line
	buf := make([]byte, block)
	var rest []byte // the line that began before what is in buf
	long := false   // it is longer than any entry, and rest not all of it
	pass := func(line []byte) error {
		skip := long || len(line) == 0 || len(line) > maxLine
		rest, long = rest[:0], false
		if skip {
			return nil
		}
		return visit(line)
	}
	for end > 0 {
		n := min(end, block)
		end -= n
		b := buf[:n]
		if _, err := f.ReadAt(b, end); err != nil {
			return err
		}
		for i := bytes.LastIndexByte(b, '\n'); i >= 0; i = bytes.LastIndexByte(b, '\n') {
			line := b[i+1:]
			if len(rest) > 0 {
				line = slices.Concat(line, rest)
			}
			if err := pass(line); err != nil {
				return err
			}
			b = b[:i]
		}
		if long = long || len(b)+len(rest) > maxLine; !long {
			rest = slices.Concat(b, rest)
		}
	}
	return pass(rest)
}
