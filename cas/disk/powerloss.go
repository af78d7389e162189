// SPDX-License-Identifier: Apache-2.0

package disk

import (
	"context"
	"errors"
	"os"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/disk/internal/fault"
	"github.com/cloister-build/cloister/cas/disk/internal/index"
	"github.com/cloister-build/cloister/cas/disk/internal/segment"
	"github.com/cloister-build/cloister/cas/durable"
)

// thisBoot returns bootID. Tests replace it where there is none, such as in a sandbox.
var thisBoot = bootID

// detectPowerLoss checks whether the machine may have lost power since the last Open.
func (r *recovery) detectPowerLoss() error {
	before, err := durable.ReadFile(r.cache.bootPath())
	if err != nil && !vanished(err) {
		if !fault.Unreadable(err) {
			return err
		}
		r.cache.config.Log.Warn("the boot ID of the last start cannot be read; reading everything that was written since", "err", err)
	}
	now := thisBoot()
	r.powerLost = now == "" || string(before) != now+"\n"
	r.flushFailed = string(before) == flushFailedMark
	return nil
}

// checkDoubtful reads everything that a power failure may have damaged, and drops what it did.
func (r *recovery) checkDoubtful() error {
	if !r.powerLost {
		return nil
	}
	for n, from := range r.doubtful {
		if err := r.checkPuts(r.cache.segments.Segment(n), from); err != nil {
			return err
		}
	}
	if err := r.checkNewFiles(); err != nil {
		return err
	}
	if r.flushFailed { // it may have been read from the page cache; load distrusts it
		return nil
	}
	// Everything doubtful was read from the disk.
	return r.cache.markIntact()
}

// checkPuts verifies the puts in the log of g from a record on, including those with another copy, since they may be
// the only copy one day.
func (r *recovery) checkPuts(g *segment.Segment, from uint32) error {
	c := r.cache
	var failed error
	err := g.Puts(from, func(p *segment.Record) bool {
		e, ok := c.index.Get(p.Key)
		switch {
		case ok && e.Position == p.Position:
			failed = c.check(context.Background(), e)
		case !p.File:
			b := make([]byte, p.Length)
			if err := c.segments.Read(&p.Entry, b); err != nil || !c.sound(&p.Entry, b) {
				failed = g.Forget(&p.Entry)
			}
		}
		if isDropped(failed) {
			failed = nil // dropped
		}
		return failed == nil
	})
	return errors.Join(failed, err)
}

// checkNewFiles reads files that were named after the last time everything was durable: the record of an earlier,
// evicted file may stand for them.
func (r *recovery) checkNewFiles() error {
	c := r.cache
	var since uint32
	for _, g := range c.segments.Segments() {
		since = max(since, g.DurableSince())
	}
	var files []index.Entry
	c.index.Each(func(e *index.Entry) bool {
		if e.File && !e.Verified {
			files = append(files, *e)
		}
		return true
	})
	for _, e := range files {
		path, err := c.pathBelow("files", e.Key)
		if err != nil {
			return err
		}
		fi, err := os.Lstat(path)
		// Timestamps may have a precision of one second.
		if err == nil && fi.Size() == e.Size && changedAt(fi).Unix()+1 < int64(since) {
			continue
		}
		if err := c.check(context.Background(), e); err != nil && !isDropped(err) {
			return err
		}
	}
	return nil
}

// check reads and verifies e. It drops a damaged entry and returns cas.ErrCorrupt, or cas.ErrNotFound if the content is
// gone.
func (c *Cache) check(ctx context.Context, e index.Entry) error {
	if !e.File {
		b, err := c.read(e)
		if err == nil && !c.sound(&e, b) {
			err = c.damaged(e, b)
		}
		if err == nil {
			c.setVerified(e)
		}
		return err
	}
	path, err := c.pathBelow("files", e.Key)
	if err != nil {
		return err
	}
	err = readWhole(ctx, path, e.Key)
	switch {
	case errors.Is(err, cas.ErrCorrupt):
		return c.damaged(e, nil)
	case fault.Unreadable(err):
		return c.unreadable(e, err)
	case vanished(err):
		c.dropMissing(e)
		return cas.ErrNotFound
	case err == nil && !isReadable(path):
		return c.unreadable(e, os.ErrPermission)
	case err == nil:
		c.setVerified(e)
	}
	return err
}
