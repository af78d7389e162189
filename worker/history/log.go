// SPDX-License-Identifier: Apache-2.0

package history

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/cloister-build/cloister/cas/durable"
)

const (
	// suffix ends the names of segments, and reducedSuffix those of reduced segments. A change of the format changes
	// both.
	suffix        = ".v1.jsonl"
	reducedSuffix = ".failed.v1.jsonl"
	// DefaultBytes is the default of Config.MaxBytes: about 100,000 entries of Bazel's.
	DefaultBytes = 64 << 20
	// defaultAge is the default of Config.MaxAge.
	defaultAge = 90 * 24 * time.Hour
	// maxSegments is the number of segments into which MaxBytes and MaxAge are divided, maxSegmentBytes the size limit
	// of each.
	maxSegments     = 8
	maxSegmentBytes = 64 << 20
	// maxBuffered is the number of entries that may wait to be written.
	maxBuffered = 4096
	// maxLine bounds the bytes of an entry; its texts take less.
	maxLine = 64 << 10
	// maxReaders limits the searches that read at once. A search that waits for its client does not count, so that a
	// client that does not receive delays no others. Each search holds a block or two in memory, also while it waits.
	maxReaders = 32
	// maxLists limits concurrent calls of List, including those that wait for clients. Further calls fail at once.
	maxLists = 8 * maxReaders
)

// Config configures a Log.
type Config struct {
	// Dir is the directory of the Log, which Open creates. Only one process may write to it: the lock of the store
	// around it ensures that.
	Dir string
	// MaxBytes and MaxAge limit what is kept. Beyond MaxBytes the oldest segments lose all but their failures, which
	// may take half of it; then the oldest failures are deleted. 0 selects the default.
	MaxBytes int64
	MaxAge   time.Duration
	// Log receives failures to write, and their end; nil discards them.
	Log *slog.Logger
	// now returns the time; nil is time.Now.
	now func() time.Time
}

// A Log is the only writer of a directory. Its methods are safe for concurrent use.
type Log struct {
	cfg     Config
	segs    durable.Segments
	reduced durable.Segments
	entries chan Entry
	flushes chan chan struct{} // requests of flush
	ended   chan struct{}      // closed when the writer has ended
	readers chan struct{}
	lists   chan struct{} // holds a value for each call of List in progress
	lost    atomic.Int64  // entries that could not be written

	closing sync.RWMutex // held to send to entries and to close it
	closed  bool         // guarded by closing

	// The fields below belong to the writer.
	next      uint64       // number of the next entry
	newest    *durable.Log // the newest segment, or nil
	begun     time.Time    // when newest was created or opened
	encoded   int64        // the part of lost that encoded entries report,
	reported  int64        // and that written entries report
	failing   bool         // the last write failed
	batch     [][]byte     // encoded entries
	batchSize int64        // bytes of batch
}

// Open opens the log in c.Dir and continues it. An unfinished line, left by a killed writer, is dropped. The caller
// closes the Log.
func Open(c Config) (*Log, error) {
	c.MaxBytes = cmp.Or(c.MaxBytes, DefaultBytes)
	c.MaxAge = cmp.Or(c.MaxAge, defaultAge)
	c.Log = cmp.Or(c.Log, slog.New(slog.DiscardHandler))
	if c.now == nil {
		c.now = time.Now
	}
	l := &Log{
		cfg: c, segs: durable.Segments{Dir: c.Dir, Suffix: suffix},
		reduced: durable.Segments{Dir: c.Dir, Suffix: reducedSuffix}, entries: make(chan Entry, maxBuffered),
		flushes: make(chan chan struct{}), ended: make(chan struct{}), readers: make(chan struct{}, maxReaders),
		lists: make(chan struct{}, maxLists), next: 1,
	}
	if err := l.open(); err != nil {
		return nil, fmt.Errorf("history %s: %w", c.Dir, err)
	}
	go l.write()
	return l, nil
}

// open opens the newest segment, if there is one, and sets l.next.
func (l *Log) open() error {
	if err := os.MkdirAll(l.cfg.Dir, 0o700); err != nil { // builds are private
		return err
	}
	firsts, err := l.segs.List()
	if err != nil || len(firsts) == 0 {
		return err
	}
	l.next = firsts[len(firsts)-1]
	path := l.segs.Path(l.next)
	err = readBackwards(path, func(line []byte) error {
		var e Entry
		if json.Unmarshal(line, &e) != nil {
			return nil // damaged: try the entry before
		}
		l.next = max(l.next, e.Number+1)
		return errStop
	})
	if err != nil && !errors.Is(err, errStop) {
		return err
	}
	if l.newest, err = durable.Open(durable.Config{Path: path}); err != nil {
		return err
	}
	l.begun = l.cfg.now()
	l.expire()
	return nil
}

// Add adds an entry and sets its number; a zero Time becomes the present. It never blocks: if the buffer is full,
// because the disk does not answer, the entry is lost and the next one written reports that.
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

// Lost returns the number of entries that could not be written since Open.
func (l *Log) Lost() int64 { return l.lost.Load() }

// Close writes the buffered entries and ends the log. Further calls do nothing.
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

// flush waits until every entry added before is written or lost.
func (l *Log) flush(ctx context.Context) error {
	done := make(chan struct{})
	select {
	case l.flushes <- done:
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

// write writes entries, as many at once as are buffered, until the log is closed.
func (l *Log) write() {
	defer close(l.ended)
	for {
		select {
		case e, more := <-l.entries:
			if !more {
				if l.newest != nil {
					_ = l.newest.Close() // every write has succeeded
				}
				return
			}
			l.encode(&e)
			l.drain()
		case done := <-l.flushes:
			l.drain()
			close(done)
		}
	}
}

// drain writes the batch and the entries that are buffered now.
func (l *Log) drain() {
	most := min(256<<10, l.segmentBytes()/2) // bytes of one write
	for n := len(l.entries); n > 0; n-- {
		e, more := <-l.entries
		if !more {
			break
		}
		l.encode(&e)
		if l.batchSize > most {
			l.writeBatch()
		}
	}
	if len(l.batch) > 0 {
		l.writeBatch()
	}
}

// encode adds e to the batch.
func (l *Log) encode(e *Entry) {
	e.bound()
	e.Number, l.next = l.next, l.next+1
	e.Time = e.Time.UTC().Round(0)
	lost := l.lost.Load()
	e.Lost, l.encoded = lost-l.encoded, lost
	b, err := json.Marshal(e)
	if err != nil { // a time beyond the year 9999
		l.lost.Add(1)
		return
	}
	l.batch = append(l.batch, b)
	l.batchSize += int64(len(b)) + 1
}

// writeBatch writes the batch to the newest segment or to a new one. A failed write leaves nothing behind.
func (l *Log) writeBatch() {
	now := l.cfg.now()
	var err error
	if l.newest == nil || l.newest.Size() > 0 && l.newest.Size()+l.batchSize > l.segmentBytes() ||
		now.Sub(l.begun) > l.cfg.MaxAge/maxSegments {
		err = l.rotate(now)
	}
	if err == nil {
		err = l.newest.Append(l.batch...)
	}
	if err == nil {
		l.reported = l.encoded
	} else {
		l.encoded = l.reported
		l.lost.Add(int64(len(l.batch)))
	}
	clear(l.batch)
	l.batch, l.batchSize = l.batch[:0], 0
	if failing := err != nil; failing != l.failing {
		l.failing = failing
		if failing {
			l.cfg.Log.Warn("cannot write the history: entries are lost", "dir", l.cfg.Dir, "err", err)
		} else {
			l.cfg.Log.Info("writing the history again", "dir", l.cfg.Dir, "lost", l.lost.Load())
		}
	}
}

// rotate starts the segment that begins with the batch, and deletes segments that exceed the limits.
func (l *Log) rotate(now time.Time) error {
	var first Entry
	if err := json.Unmarshal(l.batch[0], &first); err != nil {
		return err
	}
	s, err := l.segs.Create(first.Number, false)
	if err != nil {
		return err
	}
	if l.newest != nil {
		_ = l.newest.Close() // every write has succeeded
	}
	l.newest, l.begun = s, now
	l.expire()
	return nil
}

// segmentBytes returns the size limit of a segment.
func (l *Log) segmentBytes() int64 { return min(l.cfg.MaxBytes/maxSegments, maxSegmentBytes) }
