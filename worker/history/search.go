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

	"github.com/cloister-build/cloister/cas/durable"
)

// errStop ends a search that has found enough.
var errStop = errors.New("enough")

// Search calls visit for at most limit entries that f selects, newest first, including all entries added before. An
// error of visit ends it and is returned. Damaged lines are skipped.
//
// Search may read everything that is kept; it takes about 0.1 s for 100 MB in the page cache.
func (l *Log) Search(ctx context.Context, f Filter, limit int, visit func(*Entry) error) error {
	return l.search(ctx, f, limit, &readerSlot{readers: l.readers}, visit)
}

// search is Search with a slot that visit may suspend.
func (l *Log) search(ctx context.Context, f Filter, limit int, slot *readerSlot, visit func(*Entry) error) error {
	if limit <= 0 {
		return nil
	}
	f = f.bound()
	if err := slot.acquire(ctx); err != nil {
		return err
	}
	defer slot.release()
	if err := l.flush(ctx); err != nil {
		return err
	}
	segments, err := l.segments()
	if err != nil {
		return err
	}
	s := search{
		ctx: ctx, Filter: f, needles: f.needles(), oldest: l.cfg.now().Add(-l.cfg.MaxAge).UnixNano(),
		left: limit, visit: visit, seen: map[string]bool{},
	}
	for _, g := range slices.Backward(segments) {
		if f.Before != 0 && g.first >= f.Before {
			continue
		}
		err := ctx.Err()
		if err == nil {
			err = readBackwards(g.path, s.line)
		}
		if errors.Is(err, fs.ErrNotExist) && !g.reduced { // it may be reduced meanwhile
			err = readBackwards(l.reduced.Path(g.first), s.line)
		}
		switch {
		case errors.Is(err, errStop):
			return nil
		case err != nil && !errors.Is(err, fs.ErrNotExist): // the oldest may be deleted meanwhile
			return err
		}
	}
	return nil
}

// A readerSlot is one of the slots of Log.readers, without which a search must not read segments.
type readerSlot struct {
	readers chan struct{}
	held    bool
}

// acquire waits for a slot until ctx ends.
func (s *readerSlot) acquire(ctx context.Context) error {
	select {
	case s.readers <- struct{}{}:
		s.held = true
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// release releases the slot if it is held.
func (s *readerSlot) release() {
	if s.held {
		s.held = false
		<-s.readers
	}
}

// suspend releases the slot while f runs, which may wait for a client, and then waits for a slot again. After an error,
// the slot is not held.
func (s *readerSlot) suspend(ctx context.Context, f func() error) error {
	s.release()
	if err := f(); err != nil {
		return err
	}
	return s.acquire(ctx)
}

// A search is the state of Search.
type search struct {
	Filter
	ctx     context.Context
	needles [][]byte
	oldest  int64 // in Unix nanoseconds
	left    int
	visit   func(*Entry) error
	seen    map[string]bool // instances and actions, for Distinct
}

// The line of a failed entry contains at least one of failures, that of an entry with a Response contains response.
var (
	failures = [][]byte{[]byte(`,"code":`), []byte(`,"exit":`)}
	response = []byte(`,"response":`)
)

// mayFail reports whether a line may be a failed entry. If it returns false, the entry is certainly none.
func mayFail(line []byte) bool {
	return bytes.Contains(line, failures[0]) || bytes.Contains(line, failures[1])
}

// line handles a line of a segment.
func (s *search) line(line []byte) error {
	for _, n := range s.needles {
		if !bytes.Contains(line, n) {
			return nil
		}
	}
	if s.Failed && !mayFail(line) || s.kept && !bytes.Contains(line, response) {
		return nil
	}
	var e Entry
	if json.Unmarshal(line, &e) != nil {
		return nil
	}
	if bytes.ContainsFunc(line, func(r rune) bool { return r > '~' }) {
		e.bound() // early versions wrote printable texts that are not ASCII
	}
	// An old entry does not end the search: the clock may have been set back.
	if e.Time.UnixNano() < s.oldest || !s.matches(&e) || s.Distinct && (s.seen[e.Instance+" "+e.Action] || e.How == Checked) {
		return s.ctx.Err()
	}
	if s.Distinct {
		s.seen[e.Instance+" "+e.Action] = true
	}
	if err := s.visit(&e); err != nil {
		return err
	}
	if s.left--; s.left == 0 {
		return errStop
	}
	return s.ctx.Err()
}

// block is the number of bytes read at once.
const block = 256 << 10

// readBackwards calls visit for the complete lines of a file, last first, without newlines. It skips empty lines and
// those longer than maxLine. An error of visit ends it and is returned; visit must not retain the line.
func readBackwards(path string, visit func(line []byte) error) error {
	f, err := durable.OpenFile(path, os.O_RDONLY, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	end, err := f.Seek(0, io.SeekEnd)
	if err != nil {
		return err
	}
	buf := make([]byte, block)
	var rest []byte // the end of the line that begins before buf
	skip := true    // the line of rest is unfinished or too long
	pass := func(line []byte) error {
		ok := !skip && len(line) > 0 && len(line) <= maxLine
		rest, skip = rest[:0], false
		if !ok {
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
		if skip = skip || len(b)+len(rest) > maxLine; !skip {
			rest = slices.Concat(b, rest)
		}
	}
	return pass(rest)
}
