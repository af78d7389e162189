// SPDX-License-Identifier: Apache-2.0

package disk

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/disk/internal/commit"
	"github.com/cloister-build/cloister/cas/disk/internal/segment"
	"github.com/cloister-build/cloister/cas/durable"
)

// open takes the directory and fills the index from it. If it fails the caller closes c.lock and c.segments.
func (c *Cache) open() error {
	const advice = "make the directory writable for this user, or choose another"
	// Other users have no business with the sources and outputs in here.
	if err := os.MkdirAll(c.dir, 0o700); err != nil {
		return fmt.Errorf("store directory %s cannot be made: %w; %s", c.dir, err, advice)
	}
	// The directory is looked at before the first write into it, and again when nobody else can
	// change it.
	if _, err := c.recognise(); err != nil {
		return err
	}
	if err := makePrivate(c.dir); err != nil {
		return err
	}
	lock, err := os.OpenFile(filepath.Join(c.dir, "lock"), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return fmt.Errorf("store directory %s cannot be written: %w; %s", c.dir, err, advice)
	}
	c.lock = lock
	if err := tryLock(lock); err != nil {
		return c.lockError(err)
	}
	isNew, err := c.recognise()
	if err != nil {
		return err
	}
	if err := c.claim(isNew); err != nil {
		return fmt.Errorf("store directory %s cannot be written: %w; %s", c.dir, err, advice)
	}
	if c.MaxFiles == 0 {
		c.MaxFiles = fileSystemFiles(c.dir) / 10
	}
	if err := c.load(); err != nil {
		return fmt.Errorf("open store %s: %w", c.dir, err)
	}
	return c.shrink()
}

// shrink evicts down to the budget, which may have been larger before. What is leased stays, and then nothing can be
// put until enough of it is not.
func (c *Cache) shrink() error {
	if c.take(0, 0) {
		return nil
	}
	c.room.Lock()
	defer c.room.Unlock()
	_ = c.evict(0, 0) // whoever puts something will be told
	return nil
}

// recognise reports whether the directory may become a store. It is an error if it is none and holds
// anything that a store does not begin with.
func (c *Cache) recognise() (isNew bool, err error) {
	b, err := os.ReadFile(filepath.Join(c.dir, "version"))
	if err == nil {
		if string(b) != version {
			return false, fmt.Errorf("store %s is of version %.40q, this program knows %q: choose another directory, "+
				"or remove this one, which is a cache", c.dir, strings.TrimSpace(string(b)), strings.TrimSpace(version))
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
		case "lock", "version.new": // a first Open that was killed
		case "lost+found": // the root of a file system
		default:
			return false, fmt.Errorf("directory %s is not a store and not empty, it holds %q: "+
				"choose another directory, or an empty one", c.dir, f.Name())
		}
	}
	return true, nil
}

// lockError explains why the lock was not to be had.
func (c *Cache) lockError(err error) error {
	if !errors.Is(err, errHeld) {
		return fmt.Errorf("store %s cannot be locked: %w", c.dir, err)
	}
	holder := "a process that has not said its number"
	b := make([]byte, 32)
	if n, _ := c.lock.ReadAt(b, 0); n > 0 {
		if pid, err := strconv.Atoi(strings.TrimSpace(string(b[:n]))); err == nil {
			holder = "process " + strconv.Itoa(pid)
		}
	}
	return fmt.Errorf("another cloister, %s, uses %s: stop it, or choose another directory: %w",
		holder, c.dir, ErrLocked)
}

// claim writes who holds the directory and what it is.
func (c *Cache) claim(isNew bool) error {
	if err := c.lock.Truncate(0); err != nil {
		return err
	}
	if _, err := c.lock.WriteAt([]byte(strconv.Itoa(os.Getpid())+"\n"), 0); err != nil {
		return err
	}
	if isNew {
		// Commit point: from here on the directory is a store.
		if err := replaceFile(filepath.Join(c.dir, "version"), version); err != nil {
			return err
		}
		commit.Point("claimed")
	}
	for _, sub := range []string{"tmp", "segments", "files", "quarantine"} {
		if err := os.Mkdir(filepath.Join(c.dir, sub), 0o700); err != nil && !errors.Is(err, os.ErrExist) {
			return err
		}
	}
	return nil
}

// replaceFile atomically replaces the file at path. A crash leaves at most one temporary file, path+".new".
func replaceFile(path, content string) error {
	f, err := durable.Replace(path, func(f *os.File) error {
		_, err := f.WriteString(content)
		return err
	})
	if err != nil {
		return err
	}
	return errors.Join(f.Close(), durable.SyncDir(filepath.Dir(path)))
}

// load fills the index, and removes what belongs to nothing.
func (c *Cache) load() error {
	if err := c.sweep(); err != nil {
		return fmt.Errorf("remove unfinished files: %w", err)
	}
	if err := c.instances.open(c.dir); err != nil {
		return err
	}
	var err error
	if c.segments, err = segment.Open(segment.Config{
		Dir: filepath.Join(c.dir, "segments"), Limit: segmentLimit(c.MaxBytes), Sync: c.Sync,
	}); err != nil {
		return err
	}
	c.index.Reserve(c.segments.LogBytes() / recordBytes)
	r := recovery{cache: c, instances: len(c.instances.names), functions: cas.Functions()}
	if err := r.askPower(); err != nil {
		return err
	}
	if err := r.replay(); err != nil {
		return err
	}
	if err := r.matchFiles(); err != nil {
		return err
	}
	// What goes on growing is what was growing.
	var last *segment.Segment
	if all := c.segments.Segments(); len(all) > 0 {
		last = all[len(all)-1]
	}
	c.fresh, c.moved = c.segments.NewAppender(last), c.segments.NewAppender(nil)
	c.moved.Flushed = true
	if !c.Sync {
		for _, g := range c.segments.Segments() {
			c.moved.FlushToo(g)
		}
	}
	if err := r.checkDoubtful(); err != nil {
		return err
	}
	if c.Sync {
		// What an earlier process put without it is to be as safe as what this one puts, and moves.
		if err := c.segments.MarkDurable(seconds(time.Now()), c.flush); err != nil && !errors.Is(err, errors.ErrUnsupported) {
			return err
		}
	}
	return nil
}

// sweep removes the regular files directly in tmp, and all copies. Anything else in tmp is not ours.
func (c *Cache) sweep() error {
	tmp := filepath.Join(c.dir, "tmp")
	files, err := os.ReadDir(tmp)
	if err != nil {
		return err
	}
	for _, f := range files {
		if f.Type().IsRegular() {
			// A file that has gone meanwhile is as good as removed.
			if err := os.Remove(filepath.Join(tmp, f.Name())); err != nil && !errors.Is(err, os.ErrNotExist) {
				return err
			}
		}
	}
	// Plain files that this package made: no store has anything mounted in it.
	if err := os.RemoveAll(filepath.Join(c.dir, "copies")); err != nil {
		return err
	}
	if err := os.Mkdir(filepath.Join(c.dir, "copies"), 0o700); err != nil {
		return err
	}
	kept, err := os.ReadDir(filepath.Join(c.dir, "quarantine"))
	if err != nil {
		return err
	}
	for _, f := range kept {
		if fi, err := f.Info(); err == nil && fi.Mode().IsRegular() {
			c.quarantine(fi.Size())
		}
	}
	return nil
}
