// SPDX-License-Identifier: Apache-2.0

package audit

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"
)

// A Log is the one writer of a directory. Its methods are safe for concurrent use.
type Log struct {
	// Sync makes Append return only when the entry is on the disk. It is set before the first Append.
	// Without it, entries survive the death of the process, however it dies; a loss of power may cost
	// those of the last seconds (on Linux about thirty), and only a head that is remembered elsewhere
	// shows that they are gone.
	Sync bool

	dir     string
	lock    *os.File // holds the lock of the directory as long as it is open
	maximum int64    // size of a segment, in bytes

	mu    sync.Mutex
	chain          // guarded by mu; size is that of file
	file  *os.File // the newest segment, or nil before the first; guarded by mu
	err   error    // why nothing more can be appended; guarded by mu
	lost  int      // entries that could not be written since the last that was; guarded by mu
}

// Open opens the log in dir, which it makes if it is not there, to go on behind its last entry. An
// unfinished line at the end, as a writer leaves it that is killed, is cut off, and an entry says so. It
// fails if another process has the log open, and names it; and with ErrTampered if the newest entries do
// not fit. The caller closes the Log.
func Open(dir string) (*Log, error) {
	const advice = "make it writable for this user, or choose another directory"
	// What actions tried is nobody else's business.
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("audit log %s cannot be made: %w; %s", dir, err, advice)
	}
	lock, err := os.OpenFile(filepath.Join(dir, "lock"), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, fmt.Errorf("audit log %s cannot be written: %w; %s", dir, err, advice)
	}
	l := &Log{dir: dir, lock: lock, maximum: segmentBytes}
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
		return fmt.Errorf("audit log %s cannot be written: %w", l.dir, err)
	}
	if _, err := l.lock.WriteAt([]byte(strconv.Itoa(os.Getpid())+"\n"), 0); err != nil {
		return fmt.Errorf("audit log %s cannot be written: %w", l.dir, err)
	}
	firsts, err := segments(l.dir)
	if err != nil {
		return fmt.Errorf("open audit log: %w", err)
	}
	// The newest segment is empty if its writer died as it began it. The one before then has the end.
	if l.chain, err = follow(l.dir, firsts[max(0, len(firsts)-2):], func(Record) error { return nil }); err != nil {
		return fmt.Errorf("%w; nothing is appended to such a log: keep it, and move %s aside to begin another", err, l.dir)
	}
	if len(firsts) == 0 {
		return nil
	}
	path := filepath.Join(l.dir, segmentName(firsts[len(firsts)-1]))
	if l.head == "" {
		return fmt.Errorf("%w: %s holds no entry, and what it should go on from was deleted: delete it, too", ErrTampered, path)
	}
	if l.file, err = os.OpenFile(path, os.O_WRONLY|os.O_APPEND, 0); err != nil {
		return fmt.Errorf("open audit log: %w", err)
	}
	torn := l.torn
	if torn == 0 {
		return nil
	}
	if err := l.file.Truncate(l.size); err != nil {
		return fmt.Errorf("open audit log: cut off an unfinished line: %w", err)
	}
	note := fmt.Sprintf("an unfinished line of %d bytes was cut off, as a writer leaves it that is killed", torn)
	return l.append(note, &Entry{Time: time.Now()})
}

// lockError explains why the lock was not to be had.
func (l *Log) lockError(err error) error {
	if !errors.Is(err, errHeld) {
		return fmt.Errorf("audit log %s cannot be locked: %w", l.dir, err)
	}
	holder := "a process that has not said its number"
	b := make([]byte, 32)
	n, _ := l.lock.ReadAt(b, 0) // at worst the holder has no number
	if pid, err := strconv.Atoi(strings.TrimSpace(string(b[:n]))); err == nil {
		holder = "process " + strconv.Itoa(pid)
	}
	return fmt.Errorf("audit log %s is written by %s: stop that, or choose another directory", l.dir, holder)
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
	note, next := "", l.next
	if l.lost > 0 {
		note = fmt.Sprintf("%d entries before this one could not be written", l.lost)
	}
	err := l.append(note, &e)
	if l.lost++; l.next != next { // it is there, perhaps not on the disk
		l.lost = 0
	}
	return err
}

func (l *Log) append(note string, e *Entry) error {
	if l.err != nil {
		return l.err
	}
	line, hash, err := encode(l.next, l.head, note, e)
	if err != nil {
		return fmt.Errorf("append to audit log %s: %w", l.dir, err)
	}
	if l.file == nil || l.size > 0 && l.size+int64(len(line)) > l.maximum {
		if err := l.rotate(); err != nil {
			return fmt.Errorf("append to audit log %s: begin a segment: %w", l.dir, err)
		}
	}
	if _, err := l.file.Write(line); err != nil {
		err = fmt.Errorf("append to audit log %s: %w", l.dir, err)
		// A part of the line may be there. The next one must not follow it.
		if cut := l.file.Truncate(l.size); cut != nil {
			l.err = fmt.Errorf("audit log %s ends in an unfinished line, which could not be cut off (%w): open it again", l.dir, cut)
		}
		return err
	}
	l.next, l.head, l.size = l.next+1, hash, l.size+int64(len(line))
	if l.Sync {
		if err := l.file.Sync(); err != nil {
			return fmt.Errorf("append to audit log %s: entry %d may not be on the disk: %w", l.dir, l.next-1, err)
		}
	}
	return nil
}

// rotate begins the next segment.
func (l *Log) rotate() error {
	f, err := os.OpenFile(filepath.Join(l.dir, segmentName(l.next)), os.O_WRONLY|os.O_APPEND|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	old := l.file
	l.file, l.size = f, 0
	if old != nil {
		err = old.Close()
	}
	if l.Sync {
		err = errors.Join(err, syncDir(l.dir), syncDir(filepath.Dir(l.dir)))
	}
	return err
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
	l.err = fmt.Errorf("append to audit log %s: %w", l.dir, os.ErrClosed)
	var err error
	if l.file != nil {
		err = l.file.Close()
	}
	return errors.Join(err, l.lock.Close())
}
