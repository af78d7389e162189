// SPDX-License-Identifier: Apache-2.0

package audit

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"
)

// suffix ends the name of a segment. A change of the format changes it.
const suffix = ".v1.jsonl"

func segmentName(first uint64) string { return fmt.Sprintf("%020d%s", first, suffix) }

// segments returns the numbers with which the segments of dir begin, in order. Files of other names are
// not ours.
func segments(dir string) ([]uint64, error) {
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

// A chain is how far a log has been followed.
type chain struct {
	// next is the number that the next entry must have.
	next uint64
	// head is the hash of the line before it, or "" where the chain begins with a line that follows one
	// which was deleted.
	head string
	// size and torn are the bytes of the segment followed last: those of whole lines, and those of an
	// unfinished one behind them.
	size, torn int64
}

// firstTime returns the time of the first entry of a segment, zero if there is none that can be read.
func firstTime(path string) time.Time {
	f, err := os.Open(path)
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

// follow reads these segments of dir, in order, as a chain that begins with the first of them, and calls
// visit for each entry. It ends at the first line that does not fit, with ErrTampered, and at the first
// error of visit. An unfinished line is none yet, if it is the last: a writer is about to finish it, or
// died.
func follow(dir string, firsts []uint64, visit func(Record) error) (chain, error) {
	c := chain{next: 1, head: genesis}
	if len(firsts) > 0 && firsts[0] != 1 {
		c = chain{next: firsts[0]}
	}
	for i, first := range firsts {
		if err := c.segment(filepath.Join(dir, segmentName(first)), first, i == len(firsts)-1, visit); err != nil {
			return c, err
		}
	}
	return c, nil
}

func (c *chain) segment(path string, first uint64, last bool, visit func(Record) error) error {
	n := 1
	tampered := func(format string, args ...any) error {
		return fmt.Errorf("%w: %s:%d: %s", ErrTampered, path, n, fmt.Sprintf(format, args...))
	}
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	if first != c.next {
		return tampered("this file begins with entry %d by its name, and entry %d is expected: entries are missing", first, c.next)
	}
	c.size, c.torn = 0, 0
	for in := bufio.NewReaderSize(f, maxLine); ; n++ {
		line, err := in.ReadSlice('\n')
		switch {
		case err == io.EOF && (last || len(line) == 0):
			c.torn = int64(len(line))
			return nil
		case err == io.EOF:
			return tampered("this line is cut off, and another segment follows")
		case errors.Is(err, bufio.ErrBufferFull):
			return tampered("this line is longer than %d bytes, as no entry is", maxLine)
		case err != nil:
			return fmt.Errorf("read %s: %w", path, err)
		}
		r, err := decode(line)
		if err != nil {
			return tampered("%v", err)
		}
		if r.Seq != c.next {
			return tampered("this is entry %d, and entry %d is expected: entries are missing, or not in their order", r.Seq, c.next)
		}
		if c.head != "" && r.Prev != c.head {
			return tampered("this line follows one of the hash %.*q, and the one before it has %s: one of the two was replaced",
				hashDigits, r.Prev, c.head)
		}
		c.next, c.head, c.size = r.Seq+1, r.Hash, c.size+int64(len(line))
		if err := visit(r); err != nil {
			return err
		}
	}
}

// reread calls read with the segments of dir, and again with those that are left as long as one of them
// was deleted before it was read: the oldest may be at any time. What was read by then was older still, and
// is gone with it.
func reread(dir string, read func(firsts []uint64) error) error {
	var before []uint64
	for {
		firsts, err := segments(dir)
		if err != nil {
			return fmt.Errorf("read audit log: %w", err)
		}
		err = read(firsts)
		if !errors.Is(err, fs.ErrNotExist) || slices.Equal(firsts, before) {
			return err
		}
		before = firsts
	}
}

// Read calls visit for each entry of the log in dir, in order, also while a writer appends to it. An error
// of visit ends it and is returned. So does the first line that does not fit, with ErrTampered: what
// follows such a line is not shown as if it were evidence. It is fs.ErrNotExist if there is no log.
func Read(dir string, visit func(Record) error) error {
	return reread(dir, func(firsts []uint64) error {
		_, err := follow(dir, firsts, visit)
		return err
	})
}

// A Report is what Verify found in a log of which every line fits.
type Report struct {
	// Entries is how many there are, and First the number of the first: not 1 if the oldest segments
	// were deleted. Both are 0 if there are none.
	Entries, First uint64
	// Begins is the time of the first entry.
	Begins time.Time
	// Dropped is the newest entry in which the log says that it deletes its oldest, nil if there is none.
	Dropped *Record
	// Head is the hash of the last line: remembered elsewhere, it shows later that nothing up to this
	// line was changed or cut off. It is 64 zeros if there are no entries.
	Head string
	// Unfinished is the bytes behind the last line, of one that is being written or that a writer left
	// that died. The next writer cuts them off, and says so in an entry.
	Unfinished int64
}

// Announced reports whether the log said of all entries before First that it deletes them. Others somebody else has deleted.
func (r *Report) Announced() bool {
	return r.First <= 1 || r.Dropped != nil && r.Dropped.Dropped.Last >= r.First-1
}

// Verify reads the whole log in dir, also while a writer appends to it. It fails with ErrTampered, naming
// the first line that does not fit and what is expected there; and also if head is not "" and is the hash
// neither of an entry nor of the line before the first one. It is fs.ErrNotExist if there is no log.
func Verify(dir, head string) (*Report, error) {
	var report *Report
	err := reread(dir, func(firsts []uint64) (err error) {
		report, err = verify(dir, firsts, head)
		return err
	})
	return report, err
}

func verify(dir string, firsts []uint64, head string) (*Report, error) {
	var report Report
	found := head == "" || head == genesis && (len(firsts) == 0 || firsts[0] == 1)
	c, err := follow(dir, firsts, func(r Record) error {
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
		why := "entries were cut off its end, or it was written anew"
		if report.First > 1 {
			why += fmt.Sprintf(", or the head is of a line before entry %d, which was deleted", report.First)
		}
		return nil, fmt.Errorf("%w: %s: no line has the hash %.*q; the log ends with entry %d, of the hash %s: %s",
			ErrTampered, dir, hashDigits, head, c.next-1, c.head, why)
	}
	return &report, nil
}
