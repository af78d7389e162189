// SPDX-License-Identifier: Apache-2.0

package disk

import (
	"errors"
	"fmt"
	"math"
	"sync"
	"time"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/disk/internal/index"
	"github.com/cloister-build/cloister/cas/disk/internal/segment"
)

// block is the unit in which files are counted, in bytes.
const block = 4096

// charge returns what a file of size bytes counts against the budget. No file is free: each takes an
// inode.
func charge(size int64) int64 {
	if size > math.MaxInt64-block {
		return math.MaxInt64
	}
	return max(block, (size+block-1)/block*block)
}

// packedCharge returns what n bytes in a segment and their record count at most.
func packedCharge(n int64) int64 { return segment.Padded(n) + recordBytes }

// recordBytes is what a record takes in a log.
const recordBytes = 64

// A budget counts what the segments do not count themselves.
type budget struct {
	mu       sync.Mutex
	reserved int64     // guarded by mu; bytes that are about to be written
	drafts   int64     // guarded by mu; files that are
	bytes    int64     // guarded by mu; charges of files, copies and quarantine
	files    int64     // guarded by mu; their number
	blobs    int       // guarded by mu; entries that are blobs
	results  int       // guarded by mu; entries that are results
	full     time.Time // guarded by mu; until when there is nothing to evict
}

// count adds to what is counted.
func (b *budget) count(bytes, files int64) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.bytes += bytes
	b.files += files
}

// countEntry adds n entries like k.
func (b *budget) countEntry(k index.Key, n int) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if isResult(k) {
		b.results += n
	} else {
		b.blobs += n
	}
}

func (b *budget) counts() (blobs, results int) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.blobs, b.results
}

// give returns n reserved bytes, and files: they were not used, or count elsewhere by now.
func (b *budget) give(n, files int64) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.reserved -= n
	b.drafts -= files
}

// used returns what counts against the budgets.
func (c *Cache) used() (bytes, files int64) {
	c.budget.mu.Lock()
	defer c.budget.mu.Unlock()
	return c.budget.bytes + c.budget.reserved + c.segments.Bytes(), c.budget.files + c.budget.drafts + 2*int64(c.segments.Len())
}

// spareFiles are those of a segment for what is put and of one for what is moved.
const spareFiles = 4

// take reserves n bytes and files, if they are free beside the room for one segment, and the files of two.
func (c *Cache) take(n, files int64) bool {
	b := &c.budget
	b.mu.Lock()
	defer b.mu.Unlock()
	// Not a sum, which may overflow.
	if b.bytes+b.reserved+c.segments.Bytes() > c.most()-n ||
		c.MaxFiles > 0 && b.files+b.drafts+2*int64(c.segments.Len())+files+spareFiles > c.MaxFiles {
		return false
	}
	b.reserved += n
	b.drafts += files
	return true
}

// most is how much of the budget what is put may take: the rest is for what is moved, a segment and its log.
func (c *Cache) most() int64 { return c.MaxBytes - c.segments.Limit - c.segments.Limit/8 }

// reserve makes room for n bytes and files, evicting as need be, or fails with cas.ErrFull. The caller gives the room
// back when what it wrote is counted, or not written.
func (c *Cache) reserve(n, files int64) error {
	if c.take(n, files) {
		return nil
	}
	if n > c.most() {
		return fmt.Errorf("store %s: %d bytes are more than its whole budget of %d, of which %d are kept free: %w",
			c.dir, n, c.MaxBytes, c.MaxBytes-c.most(), cas.ErrFull)
	}
	c.room.Lock()
	defer c.room.Unlock()
	if c.take(n, files) {
		return nil
	}
	c.budget.mu.Lock()
	full := time.Now().Before(c.budget.full)
	c.budget.mu.Unlock()
	if full {
		return c.fullError(n, nil)
	}
	err := c.evict(n, files)
	if c.take(n, files) {
		return nil
	}
	// A store in which all is leased is asked again and again: not each time is all of it looked at.
	c.budget.mu.Lock()
	c.budget.full = time.Now().Add(min(time.Second, max(c.Lease, 0)/4))
	c.budget.mu.Unlock()
	return c.fullError(n, err)
}

// fullError says why there is no room for n bytes.
func (c *Cache) fullError(n int64, cause error) error {
	bytes, files := c.used()
	what := fmt.Sprintf("%d of its %d bytes", bytes, c.MaxBytes)
	if c.MaxFiles > 0 && files+spareFiles >= c.MaxFiles {
		what = fmt.Sprintf("%d of its %d files", files, c.MaxFiles)
	}
	why := "are in use"
	if c.lease > 0 {
		why = fmt.Sprintf("are leased or in use: what was used in the last %v stays", c.Lease)
	}
	err := fmt.Errorf("store %s: no room for %d bytes: %s %s: %w", c.dir, n, what, why, cas.ErrFull)
	if cause != nil {
		err = errors.Join(err, cause)
	}
	return err
}
