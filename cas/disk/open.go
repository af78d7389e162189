// SPDX-License-Identifier: Apache-2.0

package disk

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

// open takes the directory and fills the index from it. If it fails the caller closes c.lock.
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
	if err := c.sweep(); err != nil {
		return fmt.Errorf("open store %s: remove unfinished files: %w", c.dir, err)
	}
	if err := c.scan(); err != nil {
		return fmt.Errorf("open store %s: %w", c.dir, err)
	}
	return c.reserve(0)
}

// recognise reports whether the directory may become a store. It is an error if it is none and holds
// anything that a store does not begin with.
func (c *Cache) recognise() (isNew bool, err error) {
	b, err := os.ReadFile(filepath.Join(c.dir, "version"))
	if err == nil {
		if string(b) != version {
			return false, fmt.Errorf("store %s is of version %.40q, this program knows %q: choose another directory",
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
		unfinished := filepath.Join(c.dir, "version.new")
		if err := os.WriteFile(unfinished, []byte(version), 0o600); err != nil {
			return err
		}
		// Commit point: from here on the directory is a store.
		if err := os.Rename(unfinished, filepath.Join(c.dir, "version")); err != nil {
			return err
		}
	}
	for _, sub := range []string{"tmp", "instances"} {
		if err := os.Mkdir(filepath.Join(c.dir, sub), 0o700); err != nil && !errors.Is(err, os.ErrExist) {
			return err
		}
	}
	return nil
}

// sweep removes the regular files directly in tmp. Anything else there is not ours.
func (c *Cache) sweep() error {
	files, err := os.ReadDir(filepath.Join(c.dir, "tmp"))
	if err != nil {
		return err
	}
	for _, f := range files {
		if f.Type().IsRegular() {
			// A file that has gone meanwhile is as good as removed.
			err := os.Remove(filepath.Join(c.dir, "tmp", f.Name()))
			if err != nil && !errors.Is(err, os.ErrNotExist) {
				return err
			}
		}
	}
	return nil
}
