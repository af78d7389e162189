// SPDX-License-Identifier: Apache-2.0

package disk

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/disk/internal/commit"
	"github.com/cloister-build/cloister/cas/disk/internal/fault"
	"github.com/cloister-build/cloister/cas/disk/internal/index"
	"github.com/cloister-build/cloister/cas/disk/internal/segment"
	"github.com/cloister-build/cloister/cas/durable"
)

// open locks the directory and loads the index. It returns the files that are to be adopted later. If it fails, the
// caller closes c.lock, c.instances and c.segments.
func (c *Cache) open() (rest []index.Key, err error) {
	const advice = "make the directory writable for this user, or choose another"
	// The store holds sources and outputs, which other users must not read.
	if err := os.MkdirAll(c.dir, 0o700); err != nil {
		return nil, fmt.Errorf("create store directory %s: %w; %s", c.dir, err, advice)
	}
	// Inspect the directory before the first write, and again while no other process can change it.
	if _, err := c.inspect(); err != nil {
		return nil, err
	}
	if err := makePrivate(c.dir); err != nil {
		return nil, err
	}
	lock, err := durable.OpenFile(filepath.Join(c.dir, "lock"), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, fmt.Errorf("store directory %s is not writable: %w; %s", c.dir, err, advice)
	}
	c.lock = lock
	if err := durable.TryLock(lock); err != nil {
		return nil, c.lockError(err)
	}
	isNew, err := c.inspect()
	if err != nil {
		return nil, err
	}
	if err := c.claim(isNew); err != nil {
		return nil, fmt.Errorf("store directory %s is not writable: %w; %s", c.dir, err, advice)
	}
	if c.config.MaxFiles == 0 {
		c.config.MaxFiles = fileSystemFiles(c.dir) / 10
	}
	if rest, err = c.load(); err != nil {
		return nil, fmt.Errorf("open store %s: %w%s", c.dir, err, loadAdvice(err))
	}
	return rest, nil
}

// loadAdvice returns what to do if load failed with err, or "".
func loadAdvice(err error) string {
	if fault.Unreadable(err) {
		return "; make it readable for this user, or delete the store, which is only a cache"
	}
	return ""
}

// shrink evicts down to the budget, which may have been larger before the store was opened. Leased entries stay; until
// enough leases expire, puts fail.
func (c *Cache) shrink() {
	if c.tryReserve(0, 0) {
		return
	}
	c.room.Lock()
	defer c.room.Unlock()
	c.noted(c.evict(0, 0)) // puts return the error
}

// inspect reports whether the directory can become a store. It fails if the directory has other content or is a store
// of another version.
func (c *Cache) inspect() (isNew bool, err error) {
	b, err := durable.ReadFile(filepath.Join(c.dir, "version"))
	if err == nil {
		if string(b) != version {
			return false, fmt.Errorf("store %s has version %.40q, this program supports %q: choose another directory, "+
				"or delete this one, which is only a cache",
				c.dir, strings.TrimSpace(string(b)), strings.TrimSpace(version))
		}
		return false, nil
	}
	if !errors.Is(err, os.ErrNotExist) {
		return false, fmt.Errorf("open store %s: %w", c.dir, err)
	}
	files, err := os.ReadDir(c.dir)
	if err != nil {
		return false, fmt.Errorf("open store %s: %w", c.dir, err)
	}
	for _, f := range files {
		switch f.Name() {
		case "lock", "version.new": // from an interrupted first Open
		case "lost+found": // the root of a file system
		default:
			return false, fmt.Errorf("directory %s is not a store and not empty: it holds %q; "+
				"choose an empty directory", c.dir, f.Name())
		}
	}
	return true, nil
}

// lockError explains why the directory could not be locked.
func (c *Cache) lockError(err error) error {
	if !errors.Is(err, durable.ErrLocked) {
		return fmt.Errorf("lock store %s: %w", c.dir, err)
	}
	holder := ""
	b := make([]byte, 32)
	if n, _ := c.lock.ReadAt(b, 0); n > 0 {
		if pid, err := strconv.Atoi(strings.TrimSpace(string(b[:n]))); err == nil {
			holder = fmt.Sprintf(" (pid %d)", pid)
		}
	}
	return lockedError(fmt.Sprintf("%s is in use by cloister%s; stop it or pass another --dir", c.dir, holder))
}

// A lockedError is ErrLocked in words that name the directory and its holder.
type lockedError string

func (e lockedError) Error() string        { return string(e) }
func (e lockedError) Is(target error) bool { return target == ErrLocked }

// claim writes the process ID and, in a new store, the version.
func (c *Cache) claim(isNew bool) error {
	if err := c.lock.Truncate(0); err != nil {
		return err
	}
	if _, err := c.lock.WriteAt([]byte(strconv.Itoa(os.Getpid())+"\n"), 0); err != nil {
		return err
	}
	if isNew {
		// Commit point: the directory is a store.
		if err := replaceFile(filepath.Join(c.dir, "version"), version); err != nil {
			return err
		}
		commit.Point("claimed")
	}
	for _, sub := range []string{"tmp", "segments", "files", "quarantine"} {
		// Unlike Mkdir, it fails for a pipe, which would block the listing until a writer opens it.
		if err := os.MkdirAll(filepath.Join(c.dir, sub), 0o700); err != nil {
			return err
		}
	}
	return nil
}

// replaceFile atomically replaces the file at path. A crash leaves at most one temporary file, path+".new".
func replaceFile(path, content string) error {
	err := durable.Replace(path, func(f *os.File) error {
		_, err := f.WriteString(content)
		return err
	})
	if err != nil {
		return err
	}
	return durable.SyncDir(filepath.Dir(path))
}

// load fills the index and removes unfinished files. It returns the files that are to be adopted later.
func (c *Cache) load() (rest []index.Key, err error) {
	if err := c.sweep(); err != nil {
		return nil, fmt.Errorf("remove unfinished files: %w", err)
	}
	if err := c.instances.open(c.dir); err != nil {
		return nil, err
	}
	if c.segments, err = segment.Open(segment.Config{
		Dir: filepath.Join(c.dir, "segments"), Limit: segmentLimit(c.config.MaxBytes), Sync: c.config.Sync,
		Distrusted: c.flushFailed,
	}); err != nil {
		return nil, err
	}
	for _, err := range c.segments.Unusable {
		c.loseSegment(err)
	}
	c.index.Reserve(c.segments.LogBytes() / recordBytes)
	r := recovery{cache: c, instances: len(c.instances.names), functions: cas.Functions(), now: c.now()}
	if err := r.recover(); err != nil {
		return nil, err
	}
	rest = c.adoptAll(context.Background(), r.orphans, adoptAtOpen)
	if r.flushFailed { // now that the adopted files have records, which are not durable
		c.segments.Distrust(errEarlierFlush)
	}
	if c.config.Sync {
		// Earlier puts without Sync become as durable as those of this process.
		err := c.markDurable()
		if err != nil && !errors.Is(err, errors.ErrUnsupported) {
			return nil, err
		}
	}
	return rest, c.beginCheckpoint()
}

// recover fills the index and prepares the cache for puts.
func (r *recovery) recover() (err error) {
	c := r.cache
	if err := r.detectPowerLoss(); err != nil {
		return err
	}
	if r.earlier, err = c.readCheckpoint(); err != nil {
		return err
	}
	if err := r.replay(); err != nil {
		return err
	}
	if err := r.matchFiles(); err != nil {
		return err
	}
	// Continue the last segment.
	var last *segment.Segment
	if all := c.segments.Segments(); len(all) > 0 {
		last = all[len(all)-1]
	}
	c.fresh, c.moved = c.segments.NewAppender(last), c.segments.NewAppender(nil)
	c.moved.Flushed = true
	if !c.config.Sync {
		for _, g := range c.segments.Segments() {
			c.moved.FlushToo(g)
		}
	}
	return r.checkDoubtful()
}

// sweep removes the regular files in tmp, and all copies, and counts the files in quarantine.
func (c *Cache) sweep() error {
	tmp := filepath.Join(c.dir, "tmp")
	files, err := os.ReadDir(tmp)
	if err != nil {
		return err
	}
	for _, f := range files {
		if f.Type().IsRegular() {
			if err := os.Remove(filepath.Join(tmp, f.Name())); err != nil && !errors.Is(err, os.ErrNotExist) {
				return err
			}
		}
	}
	// RemoveAll is safe: the directory holds only files created by this package.
	if err := os.RemoveAll(filepath.Join(c.dir, "copies")); err != nil {
		return err
	}
	if err := os.Mkdir(filepath.Join(c.dir, "copies"), 0o700); err != nil {
		return err
	}
	quarantined, err := os.ReadDir(filepath.Join(c.dir, "quarantine"))
	if err != nil {
		return err
	}
	for _, f := range quarantined {
		if fi, err := f.Info(); err == nil && fi.Mode().IsRegular() {
			c.countQuarantined(fi.Size())
		}
	}
	return nil
}
