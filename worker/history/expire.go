// SPDX-License-Identifier: Apache-2.0

package history

import (
	"cmp"
	"encoding/json"
	"errors"
	"io/fs"
	"os"
	"slices"
	"time"

	"github.com/cloister-build/cloister/cas/durable"
	"google.golang.org/grpc/codes"
)

// A segment is a file of entries.
type segment struct {
	first   uint64 // number of its first entry, or of the first that it had
	path    string
	reduced bool // it has only failures, and successes of actions that failed before
	size    int64
	written time.Time // when it was last written
}

// segments returns the present segments, in ascending order.
func (l *Log) segments() ([]segment, error) {
	var all []segment
	for _, of := range []durable.Segments{l.segs, l.reduced} {
		firsts, err := of.List()
		if err != nil {
			return nil, err
		}
		for _, first := range firsts {
			path := of.Path(first)
			switch fi, err := os.Stat(path); {
			case errors.Is(err, fs.ErrNotExist): // reduced or deleted meanwhile
			case err != nil:
				return nil, err
			default:
				all = append(all, segment{first, path, of == l.reduced, fi.Size(), fi.ModTime()})
			}
		}
	}
	slices.SortStableFunc(all, func(a, b segment) int { return cmp.Compare(a.first, b.first) })
	// A killed writer may leave both; the complete one comes first.
	return slices.CompactFunc(all, func(a, b segment) bool { return a.first == b.first }), nil
}

// expire makes room for a full newest segment. It deletes segments that are too old, reduces the oldest ones to their
// failures, and deletes the oldest failures if these take more than half of the limit. It logs errors. Deletions are
// retried at the next rotation.
func (l *Log) expire() {
	if err := l.shrink(); err != nil {
		l.cfg.Log.Warn("the oldest entries of the history cannot be reduced or deleted: it may exceed its limit",
			"dir", l.cfg.Dir, "limit", l.cfg.MaxBytes, "err", err)
	}
}

// shrink implements expire and returns the last error.
func (l *Log) shrink() error {
	all, err := l.segments()
	if err != nil || len(all) == 0 {
		return err
	}
	remove := func(path string) {
		if e := os.Remove(path); e != nil && !errors.Is(e, fs.ErrNotExist) {
			err = e
		}
	}
	all = all[:len(all)-1] // without the newest
	total, failures := l.segmentBytes(), int64(0)
	oldest := l.cfg.now().Add(-l.cfg.MaxAge)
	all = slices.DeleteFunc(all, func(g segment) bool {
		if g.written.Before(oldest) {
			remove(g.path)
			return true
		}
		total += g.size
		if g.reduced {
			failures += g.size
		}
		return false
	})
	for total > l.cfg.MaxBytes && len(all) > 0 {
		i := slices.IndexFunc(all, func(g segment) bool { return !g.reduced })
		if i > 0 && failures > l.cfg.MaxBytes/2 || i < 0 {
			i = 0
		}
		g := &all[i]
		total -= g.size
		if g.reduced {
			failures -= g.size
		}
		before := g.reduced
		if !before {
			switch e := l.reduce(g, all[:i]); {
			case e == nil:
			case g.reduced: // but not deleted
				err, g.size = e, 0
			default:
				l.cfg.Log.Warn("the oldest entries of the history cannot be reduced: the failures among them are lost",
					"file", g.path, "err", e)
				g.size = 0
			}
		}
		if before || g.size == 0 {
			remove(g.path)
			all = slices.Delete(all, i, i+1)
			continue
		}
		total += g.size
		failures += g.size
	}
	return err
}

// reduce replaces g, which is complete, by a segment with its failures, and with the newest success of each action that
// failed before, in g or in earlier segments: without it, that failure would be the action's latest run. Both segments
// exist for a moment, so that no search misses a failure. If nothing is kept, reduce only sets the size of g to 0. After
// an error, g.reduced reports whether its failures are kept.
func (l *Log) reduce(g *segment, earlier []segment) error {
	type key struct{ instance, action string }
	failed := map[key]bool{}
	for _, h := range append(slices.Clone(earlier), *g) {
		err := readBackwards(h.path, func(line []byte) error {
			var e Entry
			if mayFail(line) && json.Unmarshal(line, &e) == nil && e.lasting() {
				failed[key{e.Instance, e.Action}] = true
			}
			return nil
		})
		if err != nil && h.path == g.path { // searches report unreadable earlier segments
			return err
		}
	}
	if len(failed) == 0 {
		g.size = 0
		return nil
	}
	var kept [][]byte // last first
	seen := map[key]bool{}
	err := readBackwards(g.path, func(line []byte) error {
		var e Entry
		if json.Unmarshal(line, &e) != nil {
			return nil
		}
		k := key{e.Instance, e.Action}
		answers := !e.Failed() && e.How != Absent && e.How != Checked && failed[k] && !seen[k]
		if e.lasting() || answers {
			seen[k] = true
			kept = append(kept, append(slices.Clone(line), '\n'))
		}
		return nil
	})
	if err != nil {
		return err
	}
	slices.Reverse(kept)
	text := slices.Concat(kept...)
	if g.size = int64(len(text)); g.size == 0 {
		return nil
	}
	path := l.reduced.Path(g.first)
	err = durable.Replace(path, func(f *os.File) error {
		_, err := f.Write(text)
		return err
	})
	if err != nil {
		return err
	}
	g.reduced = true
	if err := os.Chtimes(path, g.written, g.written); err != nil {
		return err
	}
	if err := os.Remove(g.path); err != nil {
		return err
	}
	g.path = path
	return nil
}

// lasting reports whether e is a failure of its action. A run that a client cancelled or that a server lost says
// nothing about the action.
func (e *Entry) lasting() bool {
	code := codes.Code(e.Code)
	return e.Failed() && code != codes.Canceled && code != codes.Unavailable
}
