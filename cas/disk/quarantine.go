// SPDX-License-Identifier: Apache-2.0

package disk

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/disk/internal/commit"
	"github.com/cloister-build/cloister/cas/disk/internal/fault"
	"github.com/cloister-build/cloister/cas/disk/internal/index"
)

// At most maxQuarantine damaged blobs and 1/quarantineFraction of the budget are kept; later ones are deleted. A few
// suffice for diagnosis, and a failing disk must not fill the budget.
const (
	maxQuarantine      = 100
	quarantineFraction = 64
)

// damaged drops e, whose content does not match its key, quarantines the content for inspection, and returns
// cas.ErrCorrupt. B is the content of a packed entry as read, or nil.
func (c *Cache) damaged(e index.Entry, b []byte) error { return c.drop(e, b, nil) }

// unreadable is damaged for an entry that cannot be read because of cause.
func (c *Cache) unreadable(e index.Entry, cause error) error { return c.drop(e, nil, cause) }

// drop implements damaged and unreadable. A packed entry that has moved stays, because moving verified it. A file that
// is sound when read again stays, too, because it was put again.
func (c *Cache) drop(e index.Entry, b []byte, cause error) error {
	var removed bool
	where := c.where(e)
	if cause != nil {
		where += " (" + fault.Reason(cause) + ")"
	}
	if e.File {
		removed = c.dropFile(e)
	} else {
		same := func(now *index.Entry) bool {
			return !now.File && now.Segment == e.Segment && now.Offset == e.Offset
		}
		g := c.segments.Segment(e.Segment)
		if g == nil {
			return cas.ErrCorrupt
		}
		// The log goes first: if the process ends in between, the damage is found again. If the log cannot be written,
		// that happens after the end of this process.
		c.noted(g.Drop(func() (uint32, bool) {
			now, ok := c.index.Get(e.Key)
			return now.Record, ok && same(&now)
		}))
		commit.Point("dropped")
		var now index.Entry
		if now, removed = c.index.Remove(e.Key, same); removed {
			c.uncount(&now)
			c.quarantineBytes(b, e.Key)
		}
		g.Revoke()
	}
	if removed {
		c.corrupt.Add(1)
		c.reportCorrupt(e.Key, where)
	}
	return cas.ErrCorrupt
}

// dropFile removes the entry and the file of a damaged blob. If the file cannot be removed, the blob is absent
// nevertheless, and putting it fails until the file can be removed.
func (c *Cache) dropFile(e index.Entry) (removed bool) {
	var stuck error
	removed, _ = c.removeFile(e.Key, func(path string) error {
		if err := readWhole(context.Background(), path, e.Key); err == nil && isReadable(path) {
			return errSound
		}
		return nil
	}, func(*index.Entry) bool { return true }, func(path string) error {
		if stuck = c.quarantineFile(path, e.Key); vanished(stuck) {
			stuck = nil
		}
		return nil
	})
	if stuck != nil {
		c.forget(&e) // the next Open must not find it present
		c.config.Log.Warn("a damaged blob cannot be removed; remove its file", "err", stuck)
	}
	return removed
}

// isReadable reports whether the owner of a file may read it. Root may read any.
func isReadable(path string) bool {
	fi, err := os.Lstat(path)
	return err == nil && fi.Mode()&0o400 != 0
}

// errSound means that a file is not damaged.
var errSound = errors.New("sound")

// reportCorrupt calls Config.Corrupt.
func (c *Cache) reportCorrupt(k index.Key, where string) {
	name, ok := c.instances.name(k.Instance)
	if c.config.Corrupt != nil && ok {
		c.config.Corrupt(name, digestOf(k), where)
	}
}

// where returns the location of an entry, relative to the directory of the store.
func (c *Cache) where(e index.Entry) string {
	if e.File {
		path, _ := c.pathBelow("files", e.Key)
		return strings.TrimPrefix(path, c.dir+string(filepath.Separator))
	}
	if g := c.segments.Segment(e.Segment); g != nil {
		return filepath.Join("segments", g.Describe(&e))
	}
	return fmt.Sprintf("segment %d", e.Segment)
}

// dropMissing drops e, whose file does not exist.
func (c *Cache) dropMissing(e index.Entry) {
	removed, _ := c.removeFile(e.Key, func(path string) error {
		if _, err := os.Lstat(path); !vanished(err) {
			return errSound // put again
		}
		return nil
	}, func(*index.Entry) bool { return true }, noop)
	if removed {
		c.corrupt.Add(1)
		c.reportCorrupt(e.Key, c.where(e)+" (gone)")
	}
}

// quarantinePath returns where to quarantine a damaged blob, or "" if there is no room.
func (c *Cache) quarantinePath(k index.Key, size int64) string {
	f, err := functionOf(k)
	n, bytes := c.quarantined.Load(), c.quarantinedBytes.Load()+charge(size)
	if err != nil || n >= maxQuarantine || bytes > c.config.MaxBytes/quarantineFraction ||
		c.config.MaxFiles > 0 && n >= c.config.MaxFiles/quarantineFraction {
		return ""
	}
	path := filepath.Join(c.dir, "quarantine", nameOf(f, k))
	if _, err := os.Lstat(path); err == nil {
		return "" // already there
	}
	return path
}

// quarantineFile moves the file at path into quarantine, or deletes it. It also moves a non-empty directory in the
// place of the file.
func (c *Cache) quarantineFile(path string, k index.Key) error {
	fi, err := os.Lstat(path)
	if err != nil || !fi.Mode().IsRegular() {
		err = os.Remove(path)
		if to := c.quarantinePath(k, 0); err != nil && fi != nil && fi.IsDir() && to != "" {
			err = os.Rename(path, to)
		}
		return err
	}
	to := c.quarantinePath(k, fi.Size())
	if to == "" {
		return os.Remove(path)
	}
	if err := os.Rename(path, to); err != nil {
		return os.Remove(path)
	}
	c.countQuarantined(fi.Size())
	return nil
}

// countQuarantined counts a file in quarantine.
func (c *Cache) countQuarantined(size int64) {
	c.quarantined.Add(1)
	c.quarantinedBytes.Add(charge(size))
	c.budget.count(charge(size), 1)
}

// quarantineBytes writes b to quarantine, if it can.
func (c *Cache) quarantineBytes(b []byte, k index.Key) {
	path := c.quarantinePath(k, int64(len(b)))
	if path == "" || b == nil {
		return
	}
	if err := os.WriteFile(path, b, 0o400); err != nil {
		_ = os.Remove(path)
		return
	}
	c.countQuarantined(int64(len(b)))
}
