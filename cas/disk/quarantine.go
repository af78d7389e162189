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
	"github.com/cloister-build/cloister/cas/disk/internal/index"
)

// maxQuarantine is how many damaged blobs are kept, and quarantineShare of which part of the budget. Later ones are
// removed: one is enough to see what happens to them, and a disk that fails must not fill the budget.
const (
	maxQuarantine   = 100
	quarantineShare = 64
)

// damaged makes e absent, whose bytes are not what its key says, keeps them for a person to look at, and returns
// cas.ErrCorrupt. B is what was read of a packed entry. A packed entry that is elsewhere by now is left alone: it was
// verified when it was moved. So is a file that is sound when it is read once more: it was put again.
func (c *Cache) damaged(e index.Entry, b []byte) error {
	var removed bool
	where := c.where(e)
	if e.File {
		_, removed, _ = c.removeFile(e.Key, func(path string) error {
			if readWhole(context.Background(), path, e.Key) == nil {
				return errSound
			}
			return nil
		}, func(*index.Entry) bool { return true }, func(path string) error { return c.keepFile(path, e.Key) })
	} else {
		same := func(now *index.Entry) bool {
			return !now.File && now.Segment == e.Segment && now.Offset == e.Offset
		}
		g := c.segments.Segment(e.Segment)
		if g == nil {
			return cas.ErrCorrupt
		}
		// First in the log: if the process ends in between, it is found once more. If the log cannot be
		// written, that is so after the end of this process.
		_ = g.Drop(func() (uint32, bool) {
			now, ok := c.index.Get(e.Key)
			return now.Record, ok && same(&now)
		})
		commit.Point("dropped")
		var now index.Entry
		if now, removed = c.index.Remove(e.Key, same); removed {
			c.uncount(&now)
			c.keepBytes(b, e.Key)
		}
		g.Revoke()
	}
	if removed {
		c.corrupt.Add(1)
		c.tell(e.Key, where)
	}
	return cas.ErrCorrupt
}

// errSound says that a file is not damaged.
var errSound = errors.New("sound")

// tell tells Config.Corrupt.
func (c *Cache) tell(k index.Key, where string) {
	name, ok := c.instances.name(k.Instance)
	if c.Corrupt != nil && ok {
		c.Corrupt(name, digestOf(k), where)
	}
}

// where names the place of an entry, seen from the directory of the store.
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

// lose makes e absent, whose file is not there.
func (c *Cache) lose(e index.Entry) {
	_, removed, _ := c.removeFile(e.Key, func(path string) error {
		if _, err := os.Lstat(path); !vanished(err) {
			return errSound // it is there again
		}
		return nil
	}, func(*index.Entry) bool { return true }, unseen)
	if removed {
		c.corrupt.Add(1)
		c.tell(e.Key, c.where(e)+" (gone)")
	}
}

// quarantinePath returns where a damaged blob is kept, or "" if it is not.
func (c *Cache) quarantinePath(k index.Key, size int64) string {
	f, err := functionOf(k)
	if err != nil || c.quarantinedBytes.Load()+charge(size) > c.MaxBytes/quarantineShare || c.quarantined.Load() >= maxQuarantine ||
		c.MaxFiles > 0 && c.quarantined.Load() >= c.MaxFiles/quarantineShare {
		return ""
	}
	path := filepath.Join(c.dir, "quarantine", nameOf(f, k))
	if _, err := os.Lstat(path); err == nil {
		return "" // an earlier one is there
	}
	return path
}

// keepFile takes the file at path into quarantine, or removes it.
func (c *Cache) keepFile(path string, k index.Key) error {
	fi, err := os.Lstat(path)
	if err != nil {
		return err
	}
	to := c.quarantinePath(k, fi.Size())
	if to == "" || !fi.Mode().IsRegular() {
		return os.Remove(path)
	}
	if err := os.Rename(path, to); err != nil {
		return os.Remove(path)
	}
	c.quarantine(fi.Size())
	return nil
}

// quarantine counts a file in quarantine.
func (c *Cache) quarantine(size int64) {
	c.quarantined.Add(1)
	c.quarantinedBytes.Add(charge(size))
	c.budget.count(charge(size), 1)
}

// keepBytes writes a file into quarantine. If that fails there is one less to look at.
func (c *Cache) keepBytes(b []byte, k index.Key) {
	path := c.quarantinePath(k, int64(len(b)))
	if path == "" || b == nil {
		return
	}
	if err := os.WriteFile(path, b, 0o400); err != nil {
		_ = os.Remove(path)
		return
	}
	c.quarantine(int64(len(b)))
}
