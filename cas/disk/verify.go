// SPDX-License-Identifier: Apache-2.0

package disk

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/disk/internal/index"
	"github.com/cloister-build/cloister/cas/disk/internal/segment"
)

// VerifyOptions says how Verify goes about it.
type VerifyOptions struct {
	// BytesPerSecond is how fast it reads at most; 0 is as fast as it can.
	BytesPerSecond int64
	// Restart begins anew, and not where an earlier Verify was stopped.
	Restart bool
	// Progress, if not nil, is told about once a second how far it has come.
	Progress func(VerifyReport)
}

// A VerifyReport says what Verify has found.
type VerifyReport struct {
	Blobs, Bytes int64 // that were read, results included
	TotalBytes   int64 // that there were to read at the beginning, about
	Damaged      []Damage
	Resumed      bool // it went on where an earlier one was stopped
}

// A Damage is a blob that was not what its digest says. It is absent now.
type Damage struct {
	Instance string
	Digest   cas.Digest // of an action, if its result was damaged; zero as for Config.Corrupt
	Where    string     // seen from Config.Dir
}

// maxDamages is how many a report names.
const maxDamages = 1000

// A position is how far a Verify has come: what comes before it was read.
type position struct{ segment, record uint32 }

// Verify reads all that was there when it began, but for a file that this process wrote and whose record moves
// meanwhile, and makes absent what is damaged. If ctx ends it notes how far it has come, and the next one goes on
// there. One runs at a time: another waits. It may run beside all else.
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
	err = v.run(ctx)
	if err == nil {
		err = os.Remove(v.file)
		if vanished(err) {
			err = nil
		}
	} else if ctx.Err() != nil || errors.Is(err, os.ErrClosed) {
		if v.rewinds != c.rewinds.Load() {
			v.at.record = 0 // it may be another one now
		}
		err = errors.Join(err, v.at.write(v.file))
	}
	return v.report, err
}

type verification struct {
	cache   *Cache
	o       VerifyOptions
	file    string
	began   time.Time
	told    time.Time
	at      position
	rewinds int64 // Cache.rewinds when it began with the segment
	report  VerifyReport
}

// total returns the bytes of all that comes after the position.
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

// run reads the segments in order, and of those that are made meanwhile what this process has never read: the record of
// a file may have moved there. All else in them was verified when it was put, or moved.
func (v *verification) run(ctx context.Context) error {
	var last uint32 // of what there was when it began
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
			// A log that was written anew has it earlier; later is what has replaced it.
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
		if err != nil && !errors.Is(err, segment.ErrGone) {
			return err
		}
		v.at = position{g.N + 1, 0}
	}
	return nil
}

// next returns the first segment that was not read to its end, or nil.
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
	case errors.Is(err, cas.ErrNotFound): // evicted meanwhile
	case err != nil:
		return err
	}
	v.report.Blobs++
	v.report.Bytes += int64(e.Length)
	if e.File {
		v.report.Bytes += e.Size
	}
	return nil
}

// wait waits until it may read on.
func (v *verification) wait(ctx context.Context) error {
	if v.cache.closed.Load() {
		return v.cache.closedError()
	}
	now := time.Now()
	if v.o.Progress != nil && now.Sub(v.told) >= time.Second {
		v.told = now
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

// readPosition reads where a Verify was stopped. A file that is not understood is none.
func readPosition(path string) (at position, ok bool) {
	b, err := os.ReadFile(path)
	if err != nil {
		return at, false
	}
	n, err := fmt.Sscanf(string(b), "segment %d record %d\n", &at.segment, &at.record)
	return at, err == nil && n == 2
}

func (at position) write(path string) error {
	return replaceFile(path, fmt.Sprintf("segment %d record %d\n", at.segment, at.record))
}

// rewindVerify lets a Verify that was stopped within segment n begin there again: its records are about to move.
func (c *Cache) rewindVerify(n uint32) error {
	c.rewinds.Add(1) // for the one that runs
	path := filepath.Join(c.dir, "verify")
	if at, ok := readPosition(path); ok && at.segment == n {
		return position{n, 0}.write(path)
	}
	return nil
}
