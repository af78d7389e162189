// SPDX-License-Identifier: Apache-2.0

package audit

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/cloister-build/cloister/cas/durable"
)

// Config configures a Log.
type Config struct {
	// Dir is the log's directory, which is created if necessary.
	Dir string
	// MaxBytes limits the size of all segments: a new segment deletes the oldest, after an entry has announced it. Zero
	// keeps everything. Below MinBytes, a single long entry may exceed the limit.
	MaxBytes int64
	// Sync makes Append return only when the entry survives a power failure. Without it, entries survive the end of the
	// process, but a power failure may cost those of the last seconds (about thirty on Linux), and only a head that is
	// kept elsewhere reveals the loss.
	Sync bool
	// Log receives a message when entries are deleted, or cannot be; nil discards it.
	Log *slog.Logger
	// step, if not nil, is called between the steps of a rotation, by name.
	step func(name string)
}

// A Log is the only writer of a directory. Its methods are safe for concurrent use.
type Log struct {
	Config
	segments   durable.Segments
	lock       *os.File // holds the lock of the directory while it is open
	maxSegment int64    // in bytes

	mu     sync.Mutex
	chain               // guarded by mu; size is that of file
	file   *durable.Log // the newest segment, or nil before the first; guarded by mu
	lost   int          // entries that could not be written since the last one that was; guarded by mu
	closed bool         // guarded by mu
	failed atomic.Int64 // entries that could not be written since Open
}

// Open opens the log of c to append to it. It removes an unfinished line at the end, as a killed writer leaves it, and
// records that in an entry. Like Append, it deletes segments that exceed the limit. It fails if another process has the
// log open, and with ErrTampered if the newest entries are not a chain. The caller closes the Log.
func Open(c Config) (*Log, error) {
	const advice = "make it writable for this user, or choose another directory"
	if err := os.MkdirAll(c.Dir, 0o700); err != nil { // private to the operator
		return nil, fmt.Errorf("create audit log %s: %w; %s", c.Dir, err, advice)
	}
	lock, err := durable.OpenFile(filepath.Join(c.Dir, "lock"), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, fmt.Errorf("open audit log %s: %w; %s", c.Dir, err, advice)
	}
	c.Log = cmp.Or(c.Log, slog.New(slog.DiscardHandler))
	if c.step == nil {
		c.step = func(string) {}
	}
	l := &Log{Config: c, segments: segmentsOf(c.Dir), lock: lock, maxSegment: segmentBytes}
	if c.MaxBytes > 0 {
		l.maxSegment = min(l.maxSegment, c.MaxBytes/segmentsPerLog)
	}
	if err := l.open(); err != nil {
		return nil, errors.Join(err, l.Close())
	}
	return l, nil
}

// open takes the lock and finds the end of the chain.
func (l *Log) open() error {
	if err := l.takeLock(); err != nil {
		return err
	}
	firsts, err := l.segments.List()
	if err != nil {
		return fmt.Errorf("open audit log: %w", err)
	}
	// A writer that was killed may have left an empty newest segment; then the previous one has the end of the chain.
	newest := firsts[max(0, len(firsts)-2):]
	if l.chain, err = follow(l.segments, newest, func(Record) error { return nil }); err != nil {
		return fmt.Errorf("%w; keep the log as evidence, and move %s aside to begin a new one", err, l.Dir)
	}
	if len(firsts) == 0 {
		return nil
	}
	path := l.segments.Path(firsts[len(firsts)-1])
	if l.head == "" {
		return fmt.Errorf("%w: %s has no entry, and the one before it was deleted: delete this file as well",
			ErrTampered, path)
	}
	if l.file, err = durable.Open(durable.Config{Path: path, Sync: l.Sync}); err != nil {
		return fmt.Errorf("open audit log: %w", err)
	}
	if torn := l.file.Torn(); torn > 0 { // the next write removes it
		note := fmt.Sprintf("removed an unfinished line of %d bytes, as a killed writer leaves it", torn)
		if err := l.append(note, &Entry{Time: time.Now()}); err != nil {
			return err
		}
	}
	if l.MaxBytes > 0 && l.size > l.maxSegment { // the limit was lowered
		return l.rotate()
	}
	l.dropExcess()
	return nil
}

// takeLock locks the directory and writes our process ID into the lock.
func (l *Log) takeLock() error {
	err := durable.TryLock(l.lock)
	if errors.Is(err, durable.ErrLocked) {
		return fmt.Errorf("audit log %s is in use by %s: stop it, or choose another directory", l.Dir, l.holder())
	}
	if err != nil {
		return fmt.Errorf("lock audit log %s: %w", l.Dir, err)
	}
	err = l.lock.Truncate(0)
	if err == nil {
		_, err = l.lock.WriteAt([]byte(strconv.Itoa(os.Getpid())+"\n"), 0)
	}
	if err != nil {
		return fmt.Errorf("write the lock of audit log %s: %w", l.Dir, err)
	}
	return nil
}

// holder returns a description of the process that has the lock.
func (l *Log) holder() string {
	b := make([]byte, 32)
	n, _ := l.lock.ReadAt(b, 0)
	if pid, err := strconv.Atoi(strings.TrimSpace(string(b[:n]))); err == nil {
		return "process " + strconv.Itoa(pid)
	}
	return "another process"
}

// Append appends an entry with one write. When it returns nil, the entry survives the end of this process. When it
// fails, the log is unchanged and a later Append may succeed; that entry's note counts those that were lost.
//
// A text is truncated to 4 KiB, and events are omitted if the line would exceed 1 MiB. The note reports this, and
// Unrecorded counts the omitted events.
func (l *Log) Append(e Entry) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	note := ""
	if l.lost > 0 {
		note = fmt.Sprintf("%d entries before this one could not be written", l.lost)
	}
	if err := l.append(note, &e); err != nil {
		l.lost++
		l.failed.Add(1)
		return fmt.Errorf("append to audit log %s: %w", l.Dir, err)
	}
	l.lost = 0
	return nil
}

// Lost returns the number of entries that Append could not write since Open.
func (l *Log) Lost() int64 { return l.failed.Load() }

// append writes an entry, in a new segment if necessary. l.mu is held, or l is not shared yet.
func (l *Log) append(note string, e *Entry) error {
	if l.closed {
		return os.ErrClosed
	}
	line, hash, err := encode(l.next, l.head, note, nil, e)
	if err != nil {
		return err
	}
	if l.file == nil || l.size > 0 && l.size+int64(len(line))+1 > l.maxSegment {
		head := l.head
		if err := l.rotate(); err != nil {
			return fmt.Errorf("begin a segment: %w", err)
		}
		if l.head != head { // the rotation has added an entry
			if line, hash, err = encode(l.next, l.head, note, nil, e); err != nil {
				return err
			}
		}
	}
	return l.write(line, hash)
}

// write appends a line with this hash to the newest segment.
func (l *Log) write(line []byte, hash string) error {
	if err := l.file.Append(line); err != nil {
		return err
	}
	l.next, l.head, l.size = l.next+1, hash, l.file.Size()
	return nil
}

// rotate begins a segment and deletes the oldest ones if they exceed the limit.
func (l *Log) rotate() error {
	// A power failure must not remove the end of this segment and keep the next one.
	if l.file != nil {
		if err := l.file.Flush(); err != nil {
			return err
		}
	}
	l.step("segment ended")
	f, err := l.segments.Create(l.next, l.Sync)
	if err != nil {
		return err
	}
	l.step("segment begun")
	old := l.file
	l.file, l.size = f, 0
	if old != nil {
		err = old.Close()
	}
	if l.Sync {
		err = errors.Join(err, durable.SyncDir(filepath.Dir(l.Dir)))
	}
	if err == nil {
		l.dropExcess()
	}
	return err
}

// dropExcess deletes the oldest segments if the log, with a full newest segment, exceeds its limit. If that fails, the
// log keeps growing until it tries again with the next segment, because new entries matter more than the limit.
func (l *Log) dropExcess() {
	if l.MaxBytes <= 0 {
		return
	}
	firsts, kept, err := l.segments.Excess(max(l.size, l.maxSegment)+dropBytes, l.MaxBytes, time.Time{})
	if err == nil && len(firsts) > 0 {
		err = l.drop(firsts, kept)
	}
	if err != nil {
		l.Log.Warn("the oldest entries of the audit log cannot be deleted: it exceeds its limit",
			"dir", l.Dir, "limit", l.MaxBytes, "err", err)
	}
}

// drop announces in an entry that segments are deleted, and then deletes them. The first one to keep is kept.
func (l *Log) drop(firsts []uint64, kept uint64) error {
	path := l.segments.Path
	d := &Drop{First: firsts[0], Last: kept - 1, Since: firstTime(path(firsts[0])), Until: firstTime(path(kept))}
	note := fmt.Sprintf("entries %d to %d are deleted to keep the log below %d bytes", d.First, d.Last, l.MaxBytes)
	line, hash, err := encode(l.next, l.head, note, d, &Entry{Time: time.Now()})
	if err != nil {
		return err
	}
	if err := l.write(line, hash); err != nil {
		return err
	}
	l.step("drop written")
	if err := errors.Join(l.file.Flush(), durable.SyncDir(l.Dir)); err != nil {
		return err
	}
	for _, first := range firsts { // oldest first, so that the rest is a chain at any time
		if err := os.Remove(path(first)); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		l.step("segment deleted")
	}
	l.Log.Info("deleted the oldest entries of the audit log: it reached its limit",
		"dir", l.Dir, "limit", l.MaxBytes, "first", d.First, "last", d.Last)
	return nil
}

// Close closes the log and unlocks its directory. It may be called repeatedly.
func (l *Log) Close() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		return nil
	}
	l.closed = true
	var err error
	if l.file != nil {
		err = l.file.Close()
	}
	return errors.Join(err, l.lock.Close())
}
