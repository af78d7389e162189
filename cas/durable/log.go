// SPDX-License-Identifier: Apache-2.0

package durable

import (
	"bytes"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"io/fs"
	"iter"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"sync"
)

// ErrDamaged is returned by Config.Replay for a line that is not a record.
var ErrDamaged = errors.New("damaged record")

// DamagedSuffix ends the name of the copy that a Log keeps of a damaged file.
const DamagedSuffix = ".damaged"

// Config describes a Log.
type Config struct {
	// Path is the file; its directory must exist. The file is created by the first write.
	Path string
	// Replay receives each record that Open finds, in order, without its newline. It may not retain the slice. If it
	// returns ErrDamaged the line is dropped; any other error ends Open. If Replay is nil, Open reads no records.
	Replay func(record []byte) error
	// Checksum writes the CRC-32C of each record before it, in hexadecimal. Open drops lines that do not match theirs.
	Checksum bool
	// Sync makes Append and Rewrite return only when the data survives a power failure. Without it, the data survives
	// the end of the process.
	Sync bool
}

// A Log is an append-only file of records, a line each.
//
//   - Append writes all its records or none. A record without its newline, as a crash leaves it, is not a record, and
//     the next write cuts it off.
//   - Zeros before a record, as a power failure leaves them, are skipped.
//   - Damaged lines cost only themselves: the first write copies the damaged file to Path+DamagedSuffix, then drops
//     them.
//   - Open only reads, so that the records of a file that cannot be written are available.
//
// A Log is not safe for concurrent use.
type Log struct {
	Config
	file     *os.File // nil until the first write and after a replacement
	unsynced bool     // the name of the file may not survive a power failure
	size     int64    // of the whole lines
	torn     int64    // bytes that Open found after them
	dirty    bool     // something other than records may follow them
	damaged  int      // lines that Open dropped
	repair   []byte   // if not nil: the content of a file without its damaged lines, to be written first
	closed   bool
	buffer   []byte // of the lines of the last Append
}

// maxBuffer is the largest buffer that a Log keeps, in bytes.
const maxBuffer = 1 << 20

// Open opens the log at c.Path and replays its records. The caller closes the Log.
func Open(c Config) (*Log, error) {
	l := &Log{Config: c, unsynced: true} // the process that created the file may have been killed before it synced
	if err := l.open(); err != nil {
		return nil, fmt.Errorf("open log %s: %w", c.Path, err)
	}
	return l, nil
}

func (l *Log) open() error {
	f, err := OpenFile(l.Path, os.O_RDONLY, 0)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	defer f.Close()
	if l.Replay == nil {
		return l.findEnd(f)
	}
	data, err := io.ReadAll(f)
	if err != nil {
		return err
	}
	end := bytes.LastIndexByte(data, '\n') + 1
	l.size, l.torn, l.dirty = int64(end), int64(len(data)-end), end < len(data)
	intact, n := 0, 0 // bytes of intact lines, moved to the front of data; lines read
	for line := range bytes.Lines(data[:end]) {
		n++
		line = bytes.TrimLeft(line, "\x00")
		record, err := l.decode(line)
		if err == nil {
			err = l.Replay(record)
		}
		switch {
		case err == nil:
			intact += copy(data[intact:], line)
		case errors.Is(err, ErrDamaged):
			l.damaged++
		default:
			return fmt.Errorf("line %d: %w", n, err)
		}
	}
	if l.damaged > 0 {
		l.repair = data[:intact]
	}
	return nil
}

// findEnd sets size and torn without reading the records.
func (l *Log) findEnd(f *os.File) error {
	fi, err := f.Stat()
	if err != nil {
		return err
	}
	block := make([]byte, 64<<10)
	for end := fi.Size(); end > 0; {
		b := block[:min(end, int64(len(block)))]
		end -= int64(len(b))
		if _, err := f.ReadAt(b, end); err != nil {
			return err
		}
		if i := bytes.LastIndexByte(b, '\n'); i >= 0 {
			l.size = end + int64(i) + 1
			break
		}
	}
	l.torn, l.dirty = fi.Size()-l.size, l.size < fi.Size()
	return nil
}

// Damaged returns the number of lines that Open dropped.
func (l *Log) Damaged() int { return l.damaged }

// Torn returns the size in bytes of the unfinished record that Open found at the end.
func (l *Log) Torn() int64 { return l.torn }

// Size returns the size of the records in the file, in bytes.
func (l *Log) Size() int64 { return l.size }

// Append adds records with one write, or fails and adds none of them. A later Append may succeed.
func (l *Log) Append(records ...[]byte) error {
	size := 0
	for _, r := range records {
		size += len(r) + lineBytes
	}
	lines, err := l.encode(slices.Values(records), slices.Grow(l.buffer[:0], size))
	if err == nil && len(lines) > 0 {
		err = l.append(lines)
	}
	if l.buffer = lines; cap(lines) > maxBuffer {
		l.buffer = nil
	}
	if err != nil {
		return fmt.Errorf("append to %s: %w", l.Path, err)
	}
	return nil
}

func (l *Log) append(lines []byte) error {
	if err := l.prepare(); err != nil {
		return err
	}
	_, err := l.file.WriteAt(lines, l.size)
	if err == nil && l.Sync {
		err = l.file.Sync()
	}
	if err != nil {
		l.dirty = true // a reader could take what was written for records
		return errors.Join(err, l.cut())
	}
	l.size += int64(len(lines))
	return nil
}

// prepare makes the file end with a whole record.
func (l *Log) prepare() error {
	if l.closed {
		return os.ErrClosed
	}
	if l.repair != nil {
		if err := l.replace(l.repair); err != nil {
			return err
		}
	}
	if l.file == nil {
		f, err := OpenFile(l.Path, os.O_RDWR|os.O_CREATE, 0o600)
		if err != nil {
			return err
		}
		l.file = f
	}
	return errors.Join(l.syncName(), l.cut())
}

// syncName makes the name of the file survive a power failure.
func (l *Log) syncName() error {
	if l.unsynced && l.Sync {
		if err := SyncDir(filepath.Dir(l.Path)); err != nil {
			return err
		}
	}
	l.unsynced = false
	return nil
}

// cut removes what follows the last record.
func (l *Log) cut() error {
	if !l.dirty {
		return nil
	}
	if err := l.file.Truncate(l.size); err != nil {
		return err
	}
	l.dirty = false
	return nil
}

// Rewrite atomically replaces all records. If it fails before the replacement, the old records stay.
func (l *Log) Rewrite(records iter.Seq[[]byte]) error {
	lines, err := l.encode(records, nil)
	if err == nil && l.closed {
		err = os.ErrClosed
	}
	if err == nil {
		err = l.replace(lines)
	}
	if err != nil {
		return fmt.Errorf("rewrite %s: %w", l.Path, err)
	}
	return nil
}

// Compact is Rewrite for a Log that mu guards, so that others can append meanwhile. The caller holds mu, which Compact
// releases while it writes and syncs the new file. It keeps records that are appended in that time. Only one call of
// Compact or Rewrite may run at a time.
func (l *Log) Compact(mu sync.Locker, records iter.Seq[[]byte]) error {
	lines, err := l.encode(records, nil)
	if err == nil {
		err = l.prepare()
	}
	if err == nil {
		err = l.compact(mu, lines)
	}
	if err != nil {
		return fmt.Errorf("compact %s: %w", l.Path, err)
	}
	return nil
}

func (l *Log) compact(mu sync.Locker, lines []byte) error {
	from := l.size
	mu.Unlock()
	f, err := OpenFile(l.Path+newSuffix, os.O_RDWR|os.O_CREATE|os.O_TRUNC, 0o600)
	if err == nil {
		if _, err = f.Write(lines); err == nil {
			err = f.Sync()
		}
	}
	mu.Lock()
	if f == nil {
		return err
	}
	if err == nil && l.closed {
		err = os.ErrClosed
	}
	if err == nil {
		_, err = io.Copy(f, io.NewSectionReader(l.file, from, l.size-from))
	}
	if err == nil && l.Sync && l.size > from {
		err = f.Sync()
	}
	if err != nil {
		return errors.Join(err, f.Close(), os.Remove(f.Name()))
	}
	appended := l.size - from
	_ = l.file.Close() // Windows does not replace open files
	l.file = nil
	if err := errors.Join(f.Close(), os.Rename(f.Name(), l.Path)); err != nil {
		return err
	}
	l.size, l.dirty, l.unsynced = int64(len(lines))+appended, false, true
	return l.syncName()
}

func (l *Log) replace(lines []byte) error {
	if l.repair != nil {
		data, err := ReadFile(l.Path)
		if err == nil {
			err = WriteFile(l.Path+DamagedSuffix, data, 0o600)
		}
		if err != nil {
			return fmt.Errorf("keep a copy of the damaged file: %w", err)
		}
	}
	if l.file != nil {
		_ = l.file.Close() // Windows does not replace open files
		l.file = nil
	}
	err := Replace(l.Path, func(f *os.File) error {
		_, err := f.Write(lines)
		return err
	})
	if err != nil {
		return err
	}
	l.size, l.dirty, l.repair, l.unsynced = int64(len(lines)), false, nil, true
	return l.syncName()
}

// Flush makes the file consist of the records, also those of earlier processes, and makes them survive a power failure.
func (l *Log) Flush() error {
	if l.file == nil && l.size == 0 && !l.dirty && l.repair == nil {
		return nil
	}
	err := l.prepare()
	if err == nil {
		err = l.file.Sync()
	}
	if err != nil {
		return fmt.Errorf("flush %s: %w", l.Path, err)
	}
	return nil
}

// Close closes the file. It may be called repeatedly.
func (l *Log) Close() error {
	l.closed = true
	if l.file == nil {
		return nil
	}
	f := l.file
	l.file = nil
	return f.Close()
}

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// lineBytes is the maximum number of bytes that encode adds to a record.
const lineBytes = len("01234567 \n")

// encode appends records to lines.
func (l *Log) encode(records iter.Seq[[]byte], lines []byte) ([]byte, error) {
	for r := range records {
		if bytes.IndexByte(r, '\n') >= 0 {
			return nil, errors.New("a record holds a newline")
		}
		if l.Checksum {
			lines = fmt.Appendf(lines, "%08x ", crc32.Checksum(r, castagnoli))
		}
		lines = append(append(lines, r...), '\n')
	}
	return lines, nil
}

// decode returns the record of a line.
func (l *Log) decode(line []byte) ([]byte, error) {
	record := bytes.TrimSuffix(line, []byte("\n"))
	if !l.Checksum {
		return record, nil
	}
	sum, record, _ := bytes.Cut(record, []byte(" "))
	want, err := strconv.ParseUint(string(sum), 16, 32)
	if err != nil || uint32(want) != crc32.Checksum(record, castagnoli) {
		return nil, ErrDamaged
	}
	return record, nil
}
