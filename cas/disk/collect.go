// SPDX-License-Identifier: Apache-2.0

package disk

import (
	"cmp"
	"context"
	"fmt"
	"math"
	"os"
	"time"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/disk/internal/index"
)

// # Eviction
//
// A file is evicted alone. A packed entry is evicted with its segment: entries to keep are moved to another segment and
// synced, then the segment is removed. To move little data, eviction prefers segments of which at least half is old or
// dead, then those with less.
//
// "Old" means last used before a cutoff. The cutoff is as early as possible. It is found from a histogram of the ages
// of all entries that are not leased, in classes whose width is a quarter of the age.

// CollectOptions configures Collect. Collect never removes what is leased or in use through File.
type CollectOptions struct {
	// MaxBytes is the target size; 0 means no target.
	MaxBytes int64
	// OlderThan limits removal to entries not used for this time. If MaxBytes is 0, all of them are removed.
	OlderThan time.Duration
	// DryRun only reports what would be removed.
	DryRun bool
}

// A CollectReport reports what was or would be removed. Sizes are in bytes.
type CollectReport struct {
	Blobs    int   // packed blobs and results evicted
	Files    int   // blobs stored as files evicted
	Copies   int   // copies for File removed
	Segments int   // segments removed
	Freed    int64 // decrease of the size that counts against the budget
	Moved    int64 // data moved out of removed segments

	Bytes, MaxBytes int64 // size that counts against the budget now, and the budget
	Leased          int64 // size of what was used too recently to be removed, at the start
	Pinned          int64 // size of what is in use through File
	Ages            []AgeBucket
}

// An AgeBucket counts the blobs last used within a range of ages.
type AgeBucket struct {
	Label  string
	Leased bool
	Blobs  int64
	Bytes  int64
}

// Collect removes what o selects. It may run concurrently with other methods. It stops early if ctx ends.
func (c *Cache) Collect(ctx context.Context, o CollectOptions) (CollectReport, error) {
	end, err := c.beginWith(ctx)
	if err != nil {
		return CollectReport{}, err
	}
	defer end()
	if o.MaxBytes < 0 || o.OlderThan < 0 {
		return CollectReport{}, fmt.Errorf("%w collection: negative size or age", cas.ErrInvalid)
	}
	if o.MaxBytes == 0 && o.OlderThan == 0 {
		return CollectReport{}, fmt.Errorf("%w collection: no target size or age", cas.ErrInvalid)
	}
	c.room.Lock()
	defer c.room.Unlock()
	n := c.takeCensus(o.OlderThan)
	before, _ := c.used()
	if !o.DryRun {
		c.shrinkHeld(0)
	}
	used, _ := c.used()
	p := plan{census: n, dry: o.DryRun, cutoff: n.latest, bytes: math.MaxInt64, files: math.MaxInt64}
	if o.MaxBytes > 0 {
		p.bytes, p.files = max(used-o.MaxBytes, 0), 0
		p.choose(c, p.cutoff)
	}
	if p.bytes > 0 {
		err = c.execute(ctx, &p)
	}
	r := p.report
	r.Leased, r.Pinned, r.Ages, r.MaxBytes = n.leased, n.pinned, n.rows(), c.config.MaxBytes
	if r.Bytes, _ = c.used(); o.DryRun {
		r.Bytes -= r.Freed
	} else {
		r.Freed = before - r.Bytes
	}
	return r, err
}

// evict frees n bytes and files, and more so that not every Put must evict. The caller holds room.
func (c *Cache) evict(n, files int64) error {
	used, usedFiles := c.used()
	p := plan{census: c.takeCensus(0), held: c.maxHeld()}
	p.bytes = used - (c.maxPut() - n)
	if c.config.MaxFiles > 0 {
		p.files = usedFiles + files + spareFiles - c.config.MaxFiles
	}
	p.choose(c, p.latest)
	// Unless that requires moving nearly everything.
	if p.minOld > leastOld {
		p.addMargin(c)
	}
	return c.execute(context.Background(), &p)
}

// done reports whether enough is free.
func (p *plan) done(c *Cache, usedBefore, filesBefore int64) bool {
	if p.dry {
		return p.report.Freed >= p.bytes && int64(p.report.Files+p.report.Copies) >= p.files
	}
	used, files := c.used()
	return usedBefore-used >= p.bytes && filesBefore-files >= p.files
}

// execute removes what p selects. It skips what cannot be removed, and returns the first error.
func (c *Cache) execute(ctx context.Context, p *plan) error {
	used, files := c.used()
	var first error
	done := func() bool {
		first = cmp.Or(first, ctx.Err())
		return ctx.Err() != nil || c.closed.Load() || p.done(c, used, files)
	}
	for _, idle := range p.copies {
		if done() {
			return first
		}
		if c.clock.stamp(idle.used) <= p.cutoff && (p.dry || c.removeCopy(idle.key, idle.f)) {
			p.report.Copies++
			p.report.Freed += charge(idle.key.key.Size)
		}
	}
	for _, f := range p.census.files {
		if f.stamp > p.cutoff || done() {
			break
		}
		if removed, err := c.evictFile(p, f.key); err != nil {
			first = cmp.Or(first, err)
		} else if removed {
			p.report.Files++
			p.report.Freed += charge(f.key.Size)
		}
	}
	for _, s := range p.candidates(c) {
		if done() {
			break
		}
		if p.dry {
			p.report.Segments++
			p.report.Freed += s.old
			p.report.Moved += s.size - s.old
			continue
		}
		if err := c.evacuate(ctx, p, s.g); err != nil {
			first = cmp.Or(first, err)
		}
	}
	return first
}

// evictFile removes the file k if p still selects it.
func (c *Cache) evictFile(p *plan, k index.Key) (removed bool, err error) {
	if p.dry {
		return true, nil
	}
	permit := func(e *index.Entry) bool { return c.evictable(p, e) && !c.pins.has(k) }
	removed, err = c.removeFile(k, noop, permit, os.Remove)
	if removed {
		c.evictedBlobs.Add(1)
		c.evictedBytes.Add(charge(k.Size))
	}
	return removed, err
}

// evictable reports whether p selects e and e is not leased.
func (c *Cache) evictable(p *plan, e *index.Entry) bool {
	return e.Stamp <= p.cutoff && !c.leased(e, c.now())
}
