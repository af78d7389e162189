// SPDX-License-Identifier: Apache-2.0

package audit

import (
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"
)

// Config says where a Log is and how much it keeps.
type Config struct {
	// Dir is the log's directory, which is made if it is not there.
	Dir string
	// MaxBytes bounds the segments together: the oldest are deleted as the next one begins, and an entry of that one says so
	// before they are. 0 keeps everything. Below LeastBytes, one long entry may be more than the bound.
	MaxBytes int64
	// Log is told when entries are deleted, and when they cannot be; nil discards that.
	Log *slog.Logger
	// reached, if not nil, is called between the steps of a rotation, by name.
	reached func(step string)
}

// A Log is the one writer of a directory. Its methods are safe for concurrent use.
type Log struct {
	// Sync makes Append return only when the entry is on the disk. It is set before the first Append.
	// Without it, entries survive the death of the process, however it dies; a loss of power may cost
	// those of the last seconds (on Linux about thirty), and only a head that is remembered elsewhere
	// shows that they are gone.
	Sync bool

	Config
	lock    *os.File // holds the lock of the directory as long as it is open
	maximum int64    // size of a segment, in bytes

	mu    sync.Mutex
	chain          // guarded by mu; size is that of file
	file  *os.File // the newest segment, or nil before the first; guarded by mu
	err   error    // why nothing more can be appended; guarded by mu
	lost  int      // entries that could not be written since the last that was; guarded by mu
}

// Open opens the log of c, to go on behind its last entry. An unfinished line at the end, as a writer leaves
// it that is killed, is cut off, and an entry says so. What is more than the bound is deleted, as by Append. It
// fails if another process has the log open, and names it; and with ErrTampered if the newest entries do
// not fit. The caller closes the Log.
func Open(c Config) (*Log, error) {
	const advice = "make it writable for this user, or choose another directory"
	// What actions tried is nobody else's business.
	if err := os.MkdirAll(c.Dir, 0o700); err != nil {
		return nil, fmt.Errorf("audit log %s cannot be made: %w; %s", c.Dir, err, advice)
	}
	lock, err := os.OpenFile(filepath.Join(c.Dir, "lock"), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, fmt.Errorf("audit log %s cannot be written: %w; %s", c.Dir, err, advice)
	}
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	if c.reached == nil {
		c.reached = func(string) {}
	}
	l := &Log{Config: c, lock: lock, maximum: segmentBytes}
	if c.MaxBytes > 0 {
		l.maximum = min(l.maximum, c.MaxBytes/segmentsOf)
	}
	if err := l.open(); err != nil {
		return nil, errors.Join(err, l.Close())
	}
	return l, nil
}

// open takes the lock and finds the end of the chain. If it fails the caller closes l.
func (l *Log) open() error {
	if err := tryLock(l.lock); err != nil {
		return l.lockError(err)
	}
	if err := l.lock.Truncate(0); err != nil {
		return fmt.Errorf("audit log %s cannot be written: %w", l.Dir, err)
	}
	if _, err := l.lock.WriteAt([]byte(strconv.Itoa(os.Getpid())+"\n"), 0); err != nil {
		return fmt.Errorf("audit log %s cannot be written: %w", l.Dir, err)
	}
	firsts, err := segments(l.Dir)
	if err != nil {
		return fmt.Errorf("open audit log: %w", err)
	}
	// The newest segment is empty if its writer died as it began it. The one before then has the end.
	if l.chain, err = follow(l.Dir, firsts[max(0, len(firsts)-2):], func(Record) error { return nil }); err != nil {
		return fmt.Errorf("%w; nothing is appended to such a log: keep it, and move %s aside to begin another", err, l.Dir)
	}
	if len(firsts) == 0 {
		return nil
	}
	path := filepath.Join(l.Dir, segmentName(firsts[len(firsts)-1]))
	if l.head == "" {
		return fmt.Errorf("%w: %s holds no entry, and what it should go on from was deleted: delete it, too", ErrTampered, path)
	}
	if l.file, err = os.OpenFile(path, os.O_WRONLY|os.O_APPEND, 0); err != nil {
		return fmt.Errorf("open audit log: %w", err)
	}
	if torn := l.torn; torn > 0 {
		if err := l.file.Truncate(l.size); err != nil {
			return fmt.Errorf("open audit log: cut off an unfinished line: %w", err)
		}
		note := fmt.Sprintf("an unfinished line of %d bytes was cut off, as a writer leaves it that is killed", torn)
		if err := l.append(note, &Entry{Time: time.Now()}); err != nil {
			return err
		}
	}
	if l.MaxBytes > 0 && l.size > l.maximum { // it was begun with another bound
		return l.rotate()
	}
	l.drop()
	return nil
}

// lockError explains why the lock was not to be had.
func (l *Log) lockError(err error) error {
	if !errors.Is(err, errHeld) {
		return fmt.Errorf("audit log %s cannot be locked: %w", l.Dir, err)
	}
	holder := "a process that has not said its number"
	b := make([]byte, 32)
	n, _ := l.lock.ReadAt(b, 0) // at worst the holder has no number
	if pid, err := strconv.Atoi(strings.TrimSpace(string(b[:n]))); err == nil {
		holder = "process " + strconv.Itoa(pid)
	}
	return fmt.Errorf("audit log %s is written by %s: stop that, or choose another directory", l.Dir, holder)
}

// Append adds one entry at the end, as one line by one write. When it returns nil, the entry is there
// whatever becomes of this process. When it fails, for want of room or of anything else, nothing of the
// entry stays in the log, unless it is Sync that failed; a later Append may succeed, and its entry's note
// says how many before it did not.
//
// A text is cut to 4 KiB, and events are left out where the line would be longer than 1 MiB; the entry's
// note says so, and Unrecorded counts them.
func (l *Log) Append(e Entry) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	note := ""
	if l.lost > 0 {
		note = fmt.Sprintf("%d entries before this one could not be written", l.lost)
	}
	l.lost++ // until it is there
	return l.append(note, &e)
}

func (l *Log) append(note string, e *Entry) error {
	if l.err != nil {
		return l.err
	}
	line, hash, err := encode(l.next, l.head, note, nil, e)
	if err != nil {
		return fmt.Errorf("append to audit log %s: %w", l.Dir, err)
	}
	if l.file == nil || l.size > 0 && l.size+int64(len(line)) > l.maximum {
		head := l.head
		if err := l.rotate(); err != nil {
			return fmt.Errorf("append to audit log %s: begin a segment: %w", l.Dir, err)
		}
		if l.err != nil {
			return l.err
		}
		if l.head != head { // another entry has come before
			if line, hash, err = encode(l.next, l.head, note, nil, e); err != nil {
				return fmt.Errorf("append to audit log %s: %w", l.Dir, err)
			}
		}
	}
	next := l.next
	if err = l.write(line, hash); l.next != next { // it is there, perhaps not on the disk
		l.lost = 0
	}
	return err
}

// write adds the next line, of that hash, to the newest segment.
func (l *Log) write(line []byte, hash string) error {
	if _, err := l.file.Write(line); err != nil {
		err = fmt.Errorf("append to audit log %s: %w", l.Dir, err)
		// A part of the line may be there. The next one must not follow it.
		if cut := l.file.Truncate(l.size); cut != nil {
			l.err = fmt.Errorf("audit log %s ends in an unfinished line, which could not be cut off (%w): open it again", l.Dir, cut)
		}
		return err
	}
	l.next, l.head, l.size = l.next+1, hash, l.size+int64(len(line))
	if l.Sync {
		if err := l.file.Sync(); err != nil {
			return fmt.Errorf("append to audit log %s: entry %d may not be on the disk: %w", l.Dir, l.next-1, err)
		}
	}
	return nil
}

// rotate begins the next segment, and deletes the oldest as far as they are too much.
func (l *Log) rotate() error {
	// A loss of power must not take the end of this one and leave what follows it: that would be no chain.
	if l.file != nil {
		if err := l.file.Sync(); err != nil {
			return err
		}
	}
	l.reached("segment ended")
	f, err := os.OpenFile(filepath.Join(l.Dir, segmentName(l.next)), os.O_WRONLY|os.O_APPEND|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	l.reached("segment begun")
	old := l.file
	l.file, l.size = f, 0
	if old != nil {
		err = old.Close()
	}
	if l.Sync {
		err = errors.Join(err, syncDir(l.Dir), syncDir(filepath.Dir(l.Dir)))
	}
	if err == nil {
		l.drop()
	}
	return err
}

// drop deletes the oldest segments, as far as they are too much with a newest one that is full. An entry on the disk says
// so before. Where that cannot be written, or a segment cannot be deleted, the log is told of and grows until the next try,
// with the next segment: to lose what is yet to come would be worse.
func (l *Log) drop() {
	if l.MaxBytes <= 0 {
		return
	}
	firsts, kept, err := l.excess()
	if err == nil && len(firsts) > 0 {
		err = l.delete(firsts, kept)
	}
	if err != nil {
		l.Log.Warn("the oldest entries of the audit log cannot be deleted: it grows beyond its bound", "dir", l.Dir, "bound", l.MaxBytes, "err", err)
	}
}

// excess returns the segments that are too much, the oldest first, and the one that follows them.
func (l *Log) excess() (firsts []uint64, kept uint64, err error) {
	all, err := segments(l.Dir)
	if err != nil || len(all) == 0 {
		return nil, 0, err
	}
	newest := len(all) - 1
	total := max(l.size, l.maximum) + dropRoom
	for i := newest - 1; i >= 0; i-- {
		info, err := os.Stat(filepath.Join(l.Dir, segmentName(all[i])))
		if errors.Is(err, fs.ErrNotExist) {
			continue // somebody else makes room, too
		} else if err != nil {
			return nil, 0, err
		}
		if total += info.Size(); total > l.MaxBytes {
			return all[:i+1], all[i+1], nil
		}
	}
	return nil, 0, nil
}

// delete says in an entry that the segments firsts go, of which kept is the next, and then deletes them.
func (l *Log) delete(firsts []uint64, kept uint64) error {
	path := func(first uint64) string { return filepath.Join(l.Dir, segmentName(first)) }
	d := &Drop{First: firsts[0], Last: kept - 1, Since: firstTime(path(firsts[0])), Until: firstTime(path(kept))}
	note := fmt.Sprintf("entries %d to %d are deleted, so that the log stays below %d bytes", d.First, d.Last, l.MaxBytes)
	line, hash, err := encode(l.next, l.head, note, d, &Entry{Time: time.Now()})
	if err != nil {
		return err
	}
	if err := l.write(line, hash); err != nil {
		return err
	}
	l.reached("drop written")
	if err := errors.Join(l.file.Sync(), syncDir(l.Dir)); err != nil {
		return err
	}
	for _, first := range firsts { // the oldest first: what is left of them is a chain at any time
		if err := os.Remove(path(first)); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		l.reached("segment deleted")
	}
	l.Log.Info("the oldest entries of the audit log were deleted: it has reached its bound",
		"dir", l.Dir, "bound", l.MaxBytes, "first", d.First, "last", d.Last)
	return nil
}

func syncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}

// Close ends the log and gives the directory free. It may be called again.
func (l *Log) Close() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if errors.Is(l.err, os.ErrClosed) {
		return nil
	}
	l.err = fmt.Errorf("append to audit log %s: %w", l.Dir, os.ErrClosed)
	var err error
	if l.file != nil {
		err = l.file.Close()
	}
	return errors.Join(err, l.lock.Close())
}
