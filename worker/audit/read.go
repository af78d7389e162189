// SPDX-License-Identifier: Apache-2.0

package audit

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"slices"
	"time"

	"github.com/cloister-build/cloister/cas/durable"
)

// segmentsOf returns the segments of a log. The version in the suffix changes with the format.
func segmentsOf(dir string) durable.Segments { return durable.Segments{Dir: dir, Suffix: ".v1.jsonl"} }

// A chain is the state of a log up to some line.
type chain struct {
	// next is the number of the next entry.
	next uint64
	// head is the hash of the previous line, or "" if that was deleted.
	head string
	// size is the size of the whole lines of the last segment, and torn that of an unfinished line after them.
	size, torn int64
}

// firstTime returns the time of the first entry of a segment, or zero if it cannot be read.
func firstTime(path string) time.Time {
	f, err := durable.OpenFile(path, os.O_RDONLY, 0)
	if err != nil {
		return time.Time{}
	}
	defer f.Close()
	line, err := bufio.NewReaderSize(f, maxLine).ReadSlice('\n')
	if err != nil {
		return time.Time{}
	}
	r, err := decode(line)
	if err != nil {
		return time.Time{}
	}
	return r.Time
}

// follow reads consecutive segments and calls visit for each entry. It ends with ErrTampered at the first line that
// does not belong to the chain, and at the first error of visit. It ignores an unfinished line at the end, which a
// writer is about to complete or left behind when it was killed.
func follow(s durable.Segments, firsts []uint64, visit func(Record) error) (chain, error) {
	c := chain{next: 1, head: genesis}
	if len(firsts) > 0 && firsts[0] != 1 {
		c = chain{next: firsts[0]}
	}
	for i, first := range firsts {
		if err := c.segment(s.Path(first), first, i == len(firsts)-1, visit); err != nil {
			return c, err
		}
	}
	return c, nil
}

// segment follows one segment.
func (c *chain) segment(path string, first uint64, last bool, visit func(Record) error) error {
	n := 1
	tampered := func(format string, args ...any) error {
		return fmt.Errorf("%w: %s:%d: %s", ErrTampered, path, n, fmt.Sprintf(format, args...))
	}
	f, err := durable.OpenFile(path, os.O_RDONLY, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	if first != c.next {
		return tampered("the file name says entry %d, expected entry %d: entries are missing", first, c.next)
	}
	c.size, c.torn = 0, 0
	for in := bufio.NewReaderSize(f, maxLine); ; n++ {
		line, err := in.ReadSlice('\n')
		switch {
		case err == io.EOF && (last || len(line) == 0):
			c.torn = int64(len(line))
			return nil
		case err == io.EOF:
			return tampered("the line is truncated, although another segment follows")
		case errors.Is(err, bufio.ErrBufferFull):
			return tampered("the line is longer than the maximum of %d bytes", maxLine)
		case err != nil:
			return fmt.Errorf("read %s: %w", path, err)
		}
		r, err := decode(line)
		if err != nil {
			return tampered("%v", err)
		}
		if r.Seq != c.next {
			return tampered("this is entry %d, expected entry %d: entries are missing or out of order", r.Seq, c.next)
		}
		if c.head != "" && r.Prev != c.head {
			return tampered("the line names the previous hash %.*q, but that line has %s: one of them was replaced",
				hashDigits, r.Prev, c.head)
		}
		c.next, c.head, c.size = r.Seq+1, r.Hash, c.size+int64(len(line))
		if err := visit(r); err != nil {
			return err
		}
	}
}

// readSegments calls read with the segments of dir, and again if one of them was deleted before it was read: the writer
// may delete the oldest at any time.
func readSegments(dir string, read func(s durable.Segments, firsts []uint64) error) error {
	s := segmentsOf(dir)
	var before []uint64
	for {
		firsts, err := s.List()
		if err != nil {
			return fmt.Errorf("read audit log: %w", err)
		}
		err = read(s, firsts)
		if !errors.Is(err, fs.ErrNotExist) || slices.Equal(firsts, before) {
			return err
		}
		before = firsts
	}
}

// Read calls visit for each entry of the log in dir, in order, even while a writer appends to it. It returns the first
// error of visit. At a line that does not belong to the chain it ends with ErrTampered, so that nothing after it is
// taken for evidence. Without a log the error is fs.ErrNotExist.
func Read(dir string, visit func(Record) error) error {
	return readSegments(dir, func(s durable.Segments, firsts []uint64) error {
		_, err := follow(s, firsts, visit)
		return err
	})
}

// A File is an open file of a log, whose first entry has the number First.
type File struct {
	*os.File
	First uint64
}

// Files opens the files of the log in dir, in order, except those whose entries are all older than since. A writer may
// append meanwhile. Copies with the same names in another directory are a log, too. Without a log the error is
// fs.ErrNotExist. The caller closes the files.
func Files(dir string, since time.Time) (files []File, err error) {
	err = readSegments(dir, func(s durable.Segments, firsts []uint64) error {
		for i, first := range firsts {
			if i+1 < len(firsts) {
				// The next file may be new and still empty.
				if next := firstTime(s.Path(firsts[i+1])); !next.IsZero() && next.Before(since) {
					continue
				}
			}
			f, err := durable.OpenFile(s.Path(first), os.O_RDONLY, 0)
			if err != nil {
				for _, f := range files {
					f.Close()
				}
				files = nil
				return err
			}
			files = append(files, File{f, first})
		}
		return nil
	})
	return files, err
}

// CreateFile creates the file of a log in dir whose first entry has the number first. The caller closes it.
func CreateFile(dir string, first uint64) (*os.File, error) {
	return os.OpenFile(segmentsOf(dir).Path(first), os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
}

// A Report describes a verified log.
type Report struct {
	// Entries is the number of entries, and First the number of the first one, which is not 1 if the oldest segments
	// were deleted. Both are 0 for an empty log.
	Entries, First uint64
	// Begins is the time of the first entry.
	Begins time.Time
	// Dropped is the newest entry that announces a deletion, or nil.
	Dropped *Record
	// Head is the hash of the last line. If it is kept elsewhere, it proves later that nothing up to this line was
	// changed or removed. It is 64 zeros for an empty log.
	Head string
	// Unfinished is the size of an unfinished line at the end, which is being written or was left by a writer that was
	// killed. The next writer removes it and records that in an entry.
	Unfinished int64
}

// Announced reports whether the log announced the deletion of all entries before First. If not, the writer did not
// delete them.
func (r *Report) Announced() bool {
	return r.First <= 1 || r.Dropped != nil && r.Dropped.Dropped.Last >= r.First-1
}

// Verify reads the whole log in dir, even while a writer appends to it. It fails with ErrTampered at the first line
// that does not belong to the chain, and also if head is not "" and is neither the hash of an entry nor that of the
// line before the first one. Without a log the error is fs.ErrNotExist.
func Verify(dir, head string) (*Report, error) {
	var report *Report
	err := readSegments(dir, func(s durable.Segments, firsts []uint64) (err error) {
		report, err = verify(s, firsts, head)
		return err
	})
	return report, err
}

func verify(s durable.Segments, firsts []uint64, head string) (*Report, error) {
	var report Report
	found := head == "" || head == genesis && (len(firsts) == 0 || firsts[0] == 1)
	c, err := follow(s, firsts, func(r Record) error {
		if report.Entries == 0 {
			report.First, report.Begins = r.Seq, r.Time
		}
		if r.Dropped != nil {
			report.Dropped = &r
		}
		report.Entries++
		found = found || head == r.Hash || head == r.Prev
		return nil
	})
	if err != nil {
		return nil, err
	}
	report.Head, report.Unfinished = c.head, c.torn
	if !found {
		why := "entries were removed from its end, or it was rewritten"
		if report.First > 1 {
			why += fmt.Sprintf(", or the head is from before entry %d and was deleted", report.First)
		}
		return nil, fmt.Errorf("%w: %s: no line has the hash %.*q; the log ends with entry %d and the hash %s: %s",
			ErrTampered, s.Dir, hashDigits, head, c.next-1, c.head, why)
	}
	return &report, nil
}
