// SPDX-License-Identifier: Apache-2.0

package history

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

const (
	// suffix ends the name of a segment. A change of the format changes it.
	suffix = ".v1.jsonl"
	// DefaultBytes is the default of Config.MaxBytes: some 100,000 entries of Bazel's.
	DefaultBytes = 64 << 20
	// DefaultAge is the default of Config.MaxAge.
	DefaultAge = 90 * 24 * time.Hour
	// segments is how many segments MaxBytes and MaxAge are divided into, and maxSegment the most bytes of one.
	segments   = 8
	maxSegment = 64 << 20
	// waiting is how many entries may wait to be written.
	waiting = 4096
	// maxLine bounds an entry, in bytes: more than all of its texts could take.
	maxLine = 64 << 10
	// maxReaders is how many searches read at once, each with a block or two in memory. Whoever reads slowly keeps the
	// turn: that is at the cost of other readers alone.
	maxReaders = 32
)

// Config says where a Log is and how much it keeps.
type Config struct {
	// Dir is a directory of the Log's own, which is made if it is not there. No two processes may have it open for
	// writing: the store, whose directory it lies in, sees to that.
	Dir string
	// MaxBytes and MaxAge bound what is kept: the oldest entries go first, a segment of them at once. 0 is the default.
	MaxBytes int64
	MaxAge   time.Duration
	// Log is told when entries cannot be written, and when they can again; nil discards that.
	Log *slog.Logger
	// now tells the time; nil is time.Now.
	now func() time.Time
}

// A Log is the one writer of a directory. Its methods are safe for concurrent use.
type Log struct {
	cfg     Config
	entries chan Entry
	flushed chan chan struct{} // whoever wants to see all that was added
	ended   chan struct{}      // closed when nothing is written any more
	readers chan struct{}
	lost    atomic.Int64 // entries that could not be written

	closing sync.RWMutex // held to send to entries, and to close that
	closed  bool         // guarded by closing

	// The rest is the writer's own.
	next  uint64   // number of the next entry
	file  *os.File // the newest segment, or nil
	size  int64    // of file, in bytes
	begun time.Time
	said  int64 // how many of lost an entry says that is encoded,
	told  int64 // and one that is written
	bad   bool  // the last write failed
}

// Open opens the log in c.Dir, to go on behind its last entry. An unfinished line at the end, as a writer leaves it that
// is killed, is cut off. The caller closes the Log.
func Open(c Config) (*Log, error) {
	c.MaxBytes = cmp.Or(c.MaxBytes, DefaultBytes)
	c.MaxAge = cmp.Or(c.MaxAge, DefaultAge)
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	if c.now == nil {
		c.now = time.Now
	}
	l := &Log{cfg: c, entries: make(chan Entry, waiting), flushed: make(chan chan struct{}), ended: make(chan struct{}),
		readers: make(chan struct{}, maxReaders), next: 1}
	if err := l.open(); err != nil {
		return nil, fmt.Errorf("history %s: %w", c.Dir, err)
	}
	go l.write()
	return l, nil
}

// open finds the end of the log.
func (l *Log) open() error {
	// What others build is nobody else's business.
	if err := os.MkdirAll(l.cfg.Dir, 0o700); err != nil {
		return err
	}
	firsts, err := list(l.cfg.Dir)
	if err != nil || len(firsts) == 0 {
		return err
	}
	first := firsts[len(firsts)-1]
	l.next = first
	f, err := os.OpenFile(l.path(first), os.O_RDWR|os.O_APPEND, 0)
	if err != nil {
		return err
	}
	err = backwards(f, func(line []byte) error {
		var e Entry
		if json.Unmarshal(line, &e) != nil {
			return nil // damage: the entry before has a lower number
		}
		l.next = max(l.next, e.Number+1)
		return errStop
	})
	if err == nil || errors.Is(err, errStop) {
		if l.size, err = wholeSize(f); err == nil {
			err = f.Truncate(l.size)
		}
	}
	if err != nil {
		return errors.Join(err, f.Close())
	}
	l.file, l.begun = f, l.cfg.now()
	l.expire()
	return nil
}

// Add adds an entry, and sets its number; a zero Time is now. It never waits: where there is no room, as when the disk
// does not answer, the entry is lost, which the next one that is written tells.
func (l *Log) Add(e Entry) {
	if e.Time.IsZero() {
		e.Time = l.cfg.now()
	}
	l.closing.RLock()
	defer l.closing.RUnlock()
	if l.closed {
		return
	}
	select {
	case l.entries <- e:
	default:
		l.lost.Add(1)
	}
}

// Lost returns how many entries could not be written since the log was opened.
func (l *Log) Lost() int64 { return l.lost.Load() }

// Close writes what was added, and ends the log. It may be called again.
func (l *Log) Close() error {
	l.closing.Lock()
	if !l.closed {
		l.closed = true
		close(l.entries)
	}
	l.closing.Unlock()
	<-l.ended
	return nil
}

// flush returns when what was added before is written, or lost.
func (l *Log) flush(ctx context.Context) error {
	done := make(chan struct{})
	select {
	case l.flushed <- done:
	case <-l.ended:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
	select {
	case <-done:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// write writes what is added, as many entries at once as there are, until the log is closed.
func (l *Log) write() {
	defer close(l.ended)
	var lines bytes.Buffer
	for {
		select {
		case e, more := <-l.entries:
			if !more {
				if l.file != nil {
					_ = l.file.Close() // every write was seen to succeed
				}
				return
			}
			l.encode(&lines, &e)
		case done := <-l.flushed:
			l.drain(&lines)
			close(done)
		}
		l.drain(&lines)
	}
}

// drain writes lines and what waits, as it is now.
func (l *Log) drain(lines *bytes.Buffer) {
	most := int(min(256<<10, l.segment()/2)) // bytes of one write
	for n := len(l.entries); n > 0; n-- {
		e, more := <-l.entries
		if !more {
			break
		}
		l.encode(lines, &e)
		if lines.Len() > most {
			l.append(lines)
		}
	}
	if lines.Len() > 0 {
		l.append(lines)
	}
}

// encode adds the line of e.
func (l *Log) encode(lines *bytes.Buffer, e *Entry) {
	e.bound()
	e.Number, l.next = l.next, l.next+1
	e.Time = e.Time.UTC().Round(0)
	lost := l.lost.Load()
	e.Lost, l.said = lost-l.said, lost
	b, err := json.Marshal(e)
	if err != nil { // a time beyond the year 9999
		l.lost.Add(1)
		return
	}
	lines.Write(b)
	lines.WriteByte('\n')
}

// append writes lines to the newest segment, or to the next one. Nothing of what cannot be written stays there.
func (l *Log) append(lines *bytes.Buffer) {
	defer lines.Reset()
	now := l.cfg.now()
	var err error
	if l.file == nil || l.size > 0 && l.size+int64(lines.Len()) > l.segment() || now.Sub(l.begun) > l.cfg.MaxAge/segments {
		err = l.rotate(lines, now)
	}
	if err == nil {
		_, err = l.file.Write(lines.Bytes())
		if err == nil {
			l.size += int64(lines.Len())
		} else if cut := l.file.Truncate(l.size); cut != nil {
			// A part of a line may be there, which no reader takes for an entry. The next one must not follow it.
			_ = l.file.Close()
			l.file = nil
		}
	}
	if err == nil {
		l.told = l.said
	} else {
		l.said = l.told
		l.lost.Add(int64(bytes.Count(lines.Bytes(), []byte("\n"))))
	}
	if bad := err != nil; bad != l.bad {
		l.bad = bad
		if bad {
			l.cfg.Log.Warn("the history cannot be written: what is asked for is not remembered", "dir", l.cfg.Dir, "err", err)
		} else {
			l.cfg.Log.Info("the history can be written again", "dir", l.cfg.Dir, "lost", l.lost.Load())
		}
	}
}

// rotate begins the segment that lines are the first of, and deletes what is too old or too much.
func (l *Log) rotate(lines *bytes.Buffer, now time.Time) error {
	var first Entry
	line, _, _ := bytes.Cut(lines.Bytes(), []byte("\n"))
	if err := json.Unmarshal(line, &first); err != nil {
		return err
	}
	f, err := os.OpenFile(l.path(first.Number), os.O_WRONLY|os.O_APPEND|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	if l.file != nil {
		_ = l.file.Close() // every write was seen to succeed
	}
	l.file, l.size, l.begun = f, 0, now
	l.expire()
	return nil
}

// expire deletes the oldest segments, as far as they are too old or too much with a newest one that is full. One that
// cannot be deleted is tried again with the next.
func (l *Log) expire() {
	firsts, err := list(l.cfg.Dir)
	if err != nil {
		return
	}
	total := l.segment()
	for _, first := range slices.Backward(firsts[:max(0, len(firsts)-1)]) {
		info, err := os.Stat(l.path(first))
		if err != nil {
			continue
		}
		if total += info.Size(); total > l.cfg.MaxBytes || l.cfg.now().Sub(info.ModTime()) > l.cfg.MaxAge {
			_ = os.Remove(l.path(first))
		}
	}
}

// segment returns the most bytes of a segment.
func (l *Log) segment() int64 { return min(l.cfg.MaxBytes/segments, maxSegment) }

func (l *Log) path(first uint64) string { return filepath.Join(l.cfg.Dir, segmentName(first)) }

func segmentName(first uint64) string { return fmt.Sprintf("%020d%s", first, suffix) }

// list returns the numbers with which the segments of dir begin, in order. Files of other names are not ours.
func list(dir string) ([]uint64, error) {
	files, err := os.ReadDir(dir)
	if err != nil {
		return nil, err
	}
	var firsts []uint64
	for _, f := range files {
		n, err := strconv.ParseUint(strings.TrimSuffix(f.Name(), suffix), 10, 64)
		if err == nil && f.Name() == segmentName(n) {
			firsts = append(firsts, n)
		}
	}
	slices.Sort(firsts)
	return firsts, nil
}
