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

// block is the unit in which files are charged, in bytes.
const block = 4096

// charge returns what a file of size bytes counts against the budget: at least one block, since it takes an inode.
func charge(size int64) int64 {
	if size > math.MaxInt64-block {
		return math.MaxInt64
	}
	return max(block, (size+block-1)/block*block)
}

// packedCharge returns what n bytes in a segment and their record count at most.
func packedCharge(n int64) int64 { return segment.Padded(n) + recordBytes }

// recordBytes is the size of a record in a log.
const recordBytes = 64

// A budget counts what the segments do not count.
type budget struct {
	mu       sync.Mutex
	reserved int64     // guarded by mu; bytes about to be written
	drafts   int64     // guarded by mu; files about to be written
	bytes    int64     // guarded by mu; charges of files, copies and quarantine
	files    int64     // guarded by mu; their number
	blobs    int       // guarded by mu; entries that are blobs
	results  int       // guarded by mu; entries that are results
	full     time.Time // guarded by mu; until then there is nothing to evict
}

// count adds bytes and files.
func (b *budget) count(bytes, files int64) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.bytes += bytes
	b.files += files
}

// countEntry adds n entries of the type of k.
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

// release undoes a reservation of n bytes and files: they were not written, or are counted elsewhere now.
func (b *budget) release(n, files int64) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.reserved -= n
	b.drafts -= files
}

// used returns what counts against the two budgets.
func (c *Cache) used() (bytes, files int64) {
	b := &c.budget
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.bytes + b.reserved + c.packed(), b.files + b.drafts + 2*int64(c.segments.Len())
}

// spareFiles are the files of two segments, one for puts and one for moves.
const spareFiles = 4

// tryReserve reserves n bytes and files if they are free in addition to spareFiles.
func (c *Cache) tryReserve(n, files int64) bool {
	b := &c.budget
	b.mu.Lock()
	defer b.mu.Unlock()
	// Subtracted, because the sum may overflow.
	if b.bytes+b.reserved+c.packed() > c.maxPut()-n ||
		c.config.MaxFiles > 0 && b.files+b.drafts+2*int64(c.segments.Len())+files+spareFiles > c.config.MaxFiles {
		return false
	}
	b.reserved += n
	b.drafts += files
	return true
}

// packed returns the bytes of segments that count against the budget: those of the store, and up to maxHeld of the
// removed ones that cas.Locations keep on the disk. Only running actions keep more than that, and a Put cannot wait for
// their end.
func (c *Cache) packed() int64 { return c.segments.Bytes() + min(c.segments.Held(), c.maxHeld()) }

// maxHeld is the part of the budget for removed segments that mounted inputs keep on the disk.
func (c *Cache) maxHeld() int64 { return c.config.MaxBytes / 4 }

// SetHolder makes the Cache call release when Locations keep more of removed segments on the disk than is allowed.
// release releases some of them, and reports whether it could. It must not call
// methods of the Cache or its Stores.
func (c *Cache) SetHolder(release func() bool) { c.holder.Store(&release) }

// shrinkHeld asks the holder to release Locations until they keep at most most bytes of removed segments.
func (c *Cache) shrinkHeld(most int64) {
	release := c.holder.Load()
	for release != nil && c.segments.Held() > most && (*release)() {
	}
}

// maxPut is the part of the budget for puts. The rest, a segment and its log, is for moves.
func (c *Cache) maxPut() int64 { return c.config.MaxBytes - c.segments.Limit - c.segments.Limit/8 }

// reserve reserves n bytes and files, and evicts if necessary, or fails with cas.ErrFull. The caller releases them when
// it has written and counted the data, or failed to.
func (c *Cache) reserve(n, files int64) error {
	if c.tryReserve(n, files) {
		return nil
	}
	if n > c.maxPut() {
		return &cas.FullError{Limit: cas.LimitBytes, Err: fmt.Errorf(
			"store %s: %d bytes exceed its budget of %d bytes, of which %d are kept free: %w",
			c.dir, n, c.config.MaxBytes, c.config.MaxBytes-c.maxPut(), cas.ErrFull)}
	}
	c.room.Lock()
	defer c.room.Unlock()
	if c.tryReserve(n, files) {
		return nil
	}
	c.budget.mu.Lock()
	full := time.Now().Before(c.budget.full)
	c.budget.mu.Unlock()
	if full {
		return c.fullError(n, nil)
	}
	var err error
	for {
		held := c.segments.Held()
		err = c.evict(n, files)
		if c.tryReserve(n, files) {
			return nil
		}
		// Locations keep the data of removed segments, which counts up to maxHeld: until then, a removal frees nothing.
		if held >= c.maxHeld() || c.segments.Held() <= held {
			break
		}
	}
	if c.shrinkHeld(0); c.tryReserve(n, files) {
		return nil
	}
	// While everything is leased, retries should not scan all entries every time.
	c.budget.mu.Lock()
	c.budget.full = time.Now().Add(min(time.Second, max(c.config.Lease, 0)/4))
	c.budget.mu.Unlock()
	return c.fullError(n, err)
}

// fullError explains why there is no room for n bytes.
func (c *Cache) fullError(n int64, cause error) error {
	bytes, files := c.used()
	limit, what := cas.LimitBytes, fmt.Sprintf("%d of its %d bytes", bytes, c.config.MaxBytes)
	if c.config.MaxFiles > 0 && files+spareFiles >= c.config.MaxFiles {
		limit, what = cas.LimitFiles, fmt.Sprintf("%d of its %d files", files, c.config.MaxFiles)
	}
	why := "are in use"
	if c.lease > 0 {
		why = fmt.Sprintf("are in use or were used within the lease of %v", c.config.Lease)
	}
	err := fmt.Errorf("store %s: no room for %d bytes: %s %s: %w", c.dir, n, what, why, cas.ErrFull)
	if cause != nil {
		err = errors.Join(err, cause)
	}
	return &cas.FullError{Limit: limit, Err: err}
}
