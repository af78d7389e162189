// SPDX-License-Identifier: Apache-2.0

package disk

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"path/filepath"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/disk/internal/index"
	"github.com/cloister-build/cloister/cas/disk/internal/segment"
	"github.com/cloister-build/cloister/cas/durable"
)

// After a failed flush the kernel may have dropped data that it could not write, and the next flush succeeds without
// that data. So the store refuses puts until it has read and verified everything written since the last successful
// flush, has rewritten it elsewhere, and has flushed that. It drops what can no longer be read. It tries this at once
// and then every half minute; reads continue. With Config.Sync, the sync of a put counts as a flush. A mark in DIR/boot
// makes the next process recover in the same way if this one ends before.

// flushFailedMark replaces the boot ID in DIR/boot.
const flushFailedMark = "flush failed\n"

var errEarlierFlush = errors.New("a flush failed before the last start")

const flushAdvice = "puts are refused until everything since the last successful flush is rewritten; see the kernel's log"

func (c *Cache) bootPath() string { return filepath.Join(c.dir, "boot") }

// markIntact records that all suspect data has been verified on the disk or rewritten.
func (c *Cache) markIntact() error { return replaceFile(c.bootPath(), thisBoot()+"\n") }

// flushFailed reports a failed flush.
func (c *Cache) flushFailed(err error) {
	c.config.Log.Error("the store could not be flushed to its disk; "+flushAdvice, "dir", c.dir, "err", err)
	if err := replaceFile(c.bootPath(), flushFailedMark); err != nil {
		c.config.Log.Error("cannot record the failed flush of the store: do not restart serve until the store is writable",
			"dir", c.dir, "err", err)
	}
	if !c.recovering.Load() {
		select {
		case c.unflushed <- struct{}{}:
		default: // maintain will see it
		}
	}
}

// checkFlushed returns cas.ErrUnwritable while a failed flush may have lost data that has not been rewritten.
func (c *Cache) checkFlushed() error {
	if err := c.segments.Failure(); err != nil {
		return fmt.Errorf("store %s: %w: flush: %w; %s", c.dir, cas.ErrUnwritable, err, flushAdvice)
	}
	return nil
}

// beginPut is beginWith for a put. After a failed flush it fails even if the blob is present: the disk may lack it.
func (c *Cache) beginPut(ctx context.Context) (end func(), err error) {
	if end, err = c.beginWith(ctx); err != nil {
		return nil, err
	}
	if err := c.checkFlushed(); err != nil {
		end()
		return nil, err
	}
	return end, nil
}

// flush syncs the file system of the store. Tests replace it.
var flush = syncFileSystem

// markDurable flushes, and marks the segments as durable on the wall clock, to be compared with the times of files.
func (c *Cache) markDurable() error {
	return c.segments.MarkDurable(seconds(wall()), func() error { return flush(c.lock) })
}

// makeDurable makes the segments durable and rewrites what a failed flush may have lost. It logs failed flushes, and
// returns other errors.
func (c *Cache) makeDurable() error {
	c.flushing.Lock()
	defer c.flushing.Unlock()
	c.recovering.Store(true)
	defer c.recovering.Store(false)
	err := c.markDurable()
	if c.segments.Failure() == nil {
		if c.unmarked {
			c.finishRecovery()
		}
		if errors.Is(err, errors.ErrUnsupported) {
			return nil
		}
		return err // the mark was not written; the next call retries
	}
	failures := c.segments.Failures()
	if err = c.rewriteLost(); err == nil {
		err = c.markDurable()
	}
	if err == nil {
		if c.unmarked = c.segments.Trust(failures); c.unmarked {
			c.finishRecovery()
		}
	} else {
		c.config.Log.Warn("the store cannot recover from a failed flush yet; retrying", "dir", c.dir, "err", err)
	}
	return nil
}

// finishRecovery records that the store has recovered from a failed flush. If that fails, the next makeDurable retries.
// The caller holds flushing.
func (c *Cache) finishRecovery() {
	if err := c.markIntact(); err != nil {
		c.config.Log.Warn("cannot record that the store has recovered from a failed flush; retrying", "dir", c.dir, "err", err)
		return
	}
	c.unmarked = false
	c.config.Log.Info("the store has recovered from a failed flush: everything readable is on the disk again", "dir", c.dir)
}

// rewriteLost rewrites what a failed flush may have lost. It may briefly exceed the budget by what was written since
// the last successful flush, because all moved data must be on the disk before the first segment is removed.
func (c *Cache) rewriteLost() error {
	failures, lost := c.segments.Failures(), c.segments.Lost()
	for _, g := range lost {
		if err := c.rewriteFiles(g); err != nil {
			return err
		}
	}
	c.room.Lock()
	defer c.room.Unlock()
	p := plan{held: c.maxHeld()} // selects nothing
	for _, g := range lost {
		if _, err := c.empty(context.Background(), &p, g, failures); err != nil {
			return err
		}
		if err := c.moveUnlogged(g, failures); err != nil {
			return c.writeError(err)
		}
		c.moved.Abandon(g)
	}
	c.copies.lose()
	idle, _ := c.copies.idle()
	for _, f := range idle {
		c.removeCopy(f.key, f.f) // made again when needed
	}
	for _, g := range lost {
		g.Revoke() // the kernel may drop what images show of it at any time
		if err := c.removeSegment(&p, g); err != nil {
			return err
		}
	}
	return nil
}

// moveUnlogged moves the blobs out of g whose records cannot be read any more. It drops results and chunk lists, which
// have an order that only their records hold.
func (c *Cache) moveUnlogged(g *segment.Segment, failures uint32) error {
	var rest []index.Entry
	if g.Live.Load() != 0 || g.Files.Load() != 0 {
		c.index.Each(func(e *index.Entry) bool {
			if e.Segment == g.N {
				rest = append(rest, *e)
			}
			return true
		})
	}
	m := mover{cache: c, failures: failures}
	for _, e := range rest {
		var err error
		switch {
		case isRecord(e.Key):
			_ = c.damaged(e, nil) // logs it
			continue
		case e.File:
			err = c.rewriteFile(e)
		}
		if err == nil {
			err = m.add(&segment.Record{Entry: e}, e)
		}
		if err != nil && !isDropped(err) {
			return err
		}
	}
	return m.flush()
}

// rewriteFiles rewrites the files whose puts in the log of g are not known to be durable.
func (c *Cache) rewriteFiles(g *segment.Segment) error {
	var files []index.Entry
	_, from := g.Length()
	err := g.Puts(from, func(r *segment.Record) bool {
		// After a restart, the entry may have the record of an earlier, evicted file.
		if e, ok := c.index.Get(r.Key); ok && e.File {
			files = append(files, e)
		}
		return true
	})
	for i := 0; i < len(files) && err == nil; i++ {
		if err = c.rewriteFile(files[i]); isDropped(err) {
			err = nil
		}
	}
	return err
}

// rewriteFile replaces the file of e by a verified copy. It drops a damaged entry.
func (c *Cache) rewriteFile(e index.Entry) error {
	path, err := c.pathBelow("files", e.Key)
	if err != nil {
		return err
	}
	// Beyond the budget: before everything is written again, little can be evicted.
	d := &draft{cache: c, size: e.Size, reserved: charge(e.Size), failures: c.segments.Failures()}
	c.budget.release(-d.reserved, -1)
	if d, err = d.create(); err != nil {
		return err
	}
	defer d.discard()
	old, err := durable.OpenFile(path, readFlags, 0)
	if err == nil {
		_, err = old.WriteTo(d)
		err = errors.Join(err, old.Close(), d.finish(fileMode))
	}
	if err == nil {
		err = readWhole(context.Background(), d.file.Name(), e.Key)
	}
	if err != nil {
		return cmp.Or(c.check(context.Background(), e), err)
	}
	mu := &c.files[e.Hash[0]]
	mu.Lock()
	defer mu.Unlock()
	if now, ok := c.index.Get(e.Key); !ok || !now.File {
		return nil // evicted
	}
	return d.rename(path)
}
