// SPDX-License-Identifier: Apache-2.0

package disk

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/disk/internal/fault"
	"github.com/cloister-build/cloister/cas/disk/internal/index"
	"github.com/cloister-build/cloister/cas/disk/internal/segment"
	"github.com/cloister-build/cloister/cas/durable"
)

// VerifyOptions configures Verify.
type VerifyOptions struct {
	// BytesPerSecond limits the read rate; 0 means no limit.
	BytesPerSecond int64
	// Restart starts at the beginning instead of where an earlier Verify stopped.
	Restart bool
	// Progress, if not nil, is called about once a second.
	Progress func(VerifyReport)
}

// A VerifyReport is the result of Verify.
type VerifyReport struct {
	Blobs, Bytes int64 // read, including results
	TotalBytes   int64 // to read, estimated at the start
	Damaged      []Damage
	Resumed      bool // started where an earlier Verify stopped
}

// A Damage is a blob that did not match its digest and was dropped.
type Damage struct {
	Instance string
	Digest   cas.Digest // of the action if a result was damaged; may be zero, see Config.Corrupt
	Where    string     // relative to Config.Dir
}

// maxDamages limits VerifyReport.Damaged.
const maxDamages = 1000

// A position is the next record that Verify reads.
type position struct{ segment, record uint32 }

// Verify reads everything that exists when it starts, and drops what is damaged. It may skip a file that this process
// wrote and whose record moves meanwhile. If ctx ends, or this process has no memory or descriptors left, it saves its
// position, and the next Verify resumes there. Other errors concern one blob: Verify skips it, reads the rest, and
// returns the first of them. It treats a segment whose log it cannot read the same way. Only one runs at a time; a
// second one waits. Other methods may run concurrently.
func (c *Cache) Verify(ctx context.Context, o VerifyOptions) (VerifyReport, error) {
	end, err := c.beginWith(ctx)
	if err != nil {
		return VerifyReport{}, err
	}
	defer end()
	select {
	case c.verifying <- struct{}{}:
		defer func() { <-c.verifying }()
	case <-ctx.Done():
		return VerifyReport{}, ctx.Err()
	case <-c.stop:
		return VerifyReport{}, c.closedError()
	}
	v := verification{cache: c, o: o, file: filepath.Join(c.dir, "verify"), began: time.Now()}
	if !o.Restart {
		v.at, v.report.Resumed = readPosition(v.file)
	}
	v.report.TotalBytes = v.total()
	if err = v.run(ctx); err != nil {
		if v.rewinds != c.rewinds.Load() {
			v.at.record = 0 // records have moved
		}
		return v.report, errors.Join(err, v.at.write(v.file))
	}
	if err = os.Remove(v.file); vanished(err) {
		err = nil
	}
	return v.report, errors.Join(v.skipped, err)
}

type verification struct {
	cache    *Cache
	o        VerifyOptions
	file     string
	began    time.Time
	reported time.Time // last call of Progress
	at       position
	rewinds  int64 // Cache.rewinds at the start of the segment
	report   VerifyReport
	skipped  error // the first error of a blob or segment that was skipped
}

// total returns the size of everything from the position on.
func (v *verification) total() (n int64) {
	v.cache.index.Each(func(e *index.Entry) bool {
		if e.Segment < v.at.segment || e.Segment == v.at.segment && e.Record < v.at.record {
			return true
		}
		if e.File {
			n += e.Size
		} else {
			n += int64(e.Length)
		}
		return true
	})
	return n
}

// run reads the segments in order. In segments created meanwhile, it reads only unverified files, whose records may
// have moved there; everything else was verified when it was put or moved.
func (v *verification) run(ctx context.Context) error {
	var last uint32 // when Verify started
	for _, g := range v.cache.segments.Segments() {
		last = g.N
	}
	for g := v.next(); g != nil; g = v.next() {
		v.rewinds = v.cache.rewinds.Load()
		if g.N > v.at.segment {
			v.at = position{g.N, 0}
		}
		var failed error
		err := g.Puts(v.at.record, func(r *segment.Record) bool {
			e, ok := v.cache.index.Get(r.Key)
			// Compaction moves a record down. A higher record is a replacement.
			if !ok || e.Segment != g.N || e.Record > r.Position.Record || g.N > last && (!e.File || e.Verified) {
				return true
			}
			v.at.record = e.Record
			failed = v.one(ctx, e)
			return failed == nil
		})
		if failed != nil {
			return failed
		}
		switch {
		case err == nil, errors.Is(err, segment.ErrGone):
		case ofProcess(ctx, err):
			return err
		default: // otherwise, every later Verify would stop here
			v.skipped = cmp.Or(v.skipped, err)
		}
		v.at = position{g.N + 1, 0}
	}
	return nil
}

// next returns the first segment that is not done, or nil.
func (v *verification) next() *segment.Segment {
	for _, g := range v.cache.segments.Segments() {
		if g.N >= v.at.segment {
			return g
		}
	}
	return nil
}

// one reads one entry.
func (v *verification) one(ctx context.Context, e index.Entry) error {
	if err := v.wait(ctx); err != nil {
		return err
	}
	before := v.cache.corrupt.Load()
	err := v.cache.check(ctx, e)
	switch {
	case errors.Is(err, cas.ErrCorrupt), errors.Is(err, cas.ErrNotFound) && v.cache.corrupt.Load() > before:
		name, ok := v.cache.instances.name(e.Instance)
		if ok && len(v.report.Damaged) < maxDamages {
			v.report.Damaged = append(v.report.Damaged, Damage{name, digestOf(e.Key), v.cache.where(e)})
		}
	case errors.Is(err, cas.ErrNotFound): // evicted
	case err != nil && ofProcess(ctx, err):
		return err
	case err != nil:
		v.skipped = cmp.Or(v.skipped, err)
		return nil
	}
	v.report.Blobs++
	v.report.Bytes += int64(e.Length)
	if e.File {
		v.report.Bytes += e.Size
	}
	return nil
}

// ofProcess reports whether err concerns this process and not the file that was read: Verify must end, or the process
// lacks memory or descriptors.
func ofProcess(ctx context.Context, err error) bool {
	return ctx.Err() != nil || errors.Is(err, os.ErrClosed) || fault.Ours(err)
}

// wait delays the next read to keep the rate, and reports progress.
func (v *verification) wait(ctx context.Context) error {
	if v.cache.closed.Load() {
		return v.cache.closedError()
	}
	now := time.Now()
	if v.o.Progress != nil && now.Sub(v.reported) >= time.Second {
		v.reported = now
		v.o.Progress(v.report)
	}
	if v.o.BytesPerSecond <= 0 {
		return ctx.Err()
	}
	due := v.began.Add(time.Duration(float64(v.report.Bytes) / float64(v.o.BytesPerSecond) * float64(time.Second)))
	if !due.After(now) {
		return ctx.Err()
	}
	timer := time.NewTimer(due.Sub(now))
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	case <-v.cache.stop:
		return v.cache.closedError()
	}
}

// readPosition reads the saved position. It ignores a malformed file.
func readPosition(path string) (at position, ok bool) {
	b, err := durable.ReadFile(path)
	if err != nil {
		return at, false
	}
	n, err := fmt.Sscanf(string(b), "segment %d record %d\n", &at.segment, &at.record)
	return at, err == nil && n == 2
}

func (at position) write(path string) error {
	return replaceFile(path, fmt.Sprintf("segment %d record %d\n", at.segment, at.record))
}

// rewindVerify resets a position within segment n, whose records are about to move, to the start of the segment.
func (c *Cache) rewindVerify(n uint32) error {
	c.rewinds.Add(1) // for a running Verify
	path := filepath.Join(c.dir, "verify")
	if at, ok := readPosition(path); ok && at.segment == n {
		return position{n, 0}.write(path)
	}
	return nil
}
