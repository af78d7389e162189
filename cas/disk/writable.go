// SPDX-License-Identifier: Apache-2.0

package disk

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"syscall"
	"time"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/disk/internal/fault"
)

// A file system may refuse every write while the store is open: it becomes read-only after a disk error, or its device
// disappears. Reads of blobs may still succeed. The store notices this when CheckWritable is called or a write fails,
// at the latest that of a checkpoint. Then it probes at most once a second whether writes succeed again. After a failed
// flush it also refuses puts; see flush.go.

// probeInterval is the minimum time between two attempts to write.
const probeInterval = time.Second

// refusal is the reason why the file system refuses writes.
type refusal struct {
	mu     sync.Mutex
	err    error     // guarded by mu; nil while writes succeed
	probed time.Time // guarded by mu
}

// CheckWritable returns nil if the store can be written, as far as it knows, or else cas.ErrUnwritable with the reason.
// It costs a system call; while the store cannot be written, also an attempt to write per second. The store logs when
// writes start to fail and when they succeed again.
func (c *Cache) CheckWritable() error {
	if err := c.checkFlushed(); err != nil {
		return err
	}
	r := &c.refusal
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.err == nil {
		err := accessForWriting(filepath.Join(c.dir, "tmp"))
		if !fault.ReadOnly(err) {
			return nil
		}
		c.refuse(err)
	} else if time.Since(r.probed) >= probeInterval {
		if err := c.probe(); err == nil {
			c.config.Log.Info("the store can be written again", "dir", c.dir)
			r.err = nil
		} else {
			r.err = err
		}
	}
	if r.err == nil {
		return nil
	}
	return c.unwritableError(r.err)
}

// noteFailure finds out whether a write failed with err because all writes fail, and returns the reason, or nil.
func (c *Cache) noteFailure(err error) error {
	if _, ok := errors.AsType[syscall.Errno](err); !ok || fault.Ours(err) {
		return nil
	}
	r := &c.refusal
	r.mu.Lock()
	defer r.mu.Unlock()
	switch {
	case r.err != nil:
	case fault.ReadOnly(err):
		c.refuse(err)
	case time.Since(r.probed) >= probeInterval:
		if err := c.probe(); err != nil && !fault.Ours(err) {
			c.refuse(err)
		}
	}
	return r.err
}

// noted calls noteFailure for a failed write whose loss the caller can tolerate, such as a record in a log.
func (c *Cache) noted(err error) { _ = c.noteFailure(err) }

// refuse logs that writes fail with err. The caller holds refusal.mu.
func (c *Cache) refuse(err error) {
	c.refusal.err = err
	c.refusal.probed = time.Now()
	c.config.Log.Error("the store cannot be written; "+unwritableAdvice, "dir", c.dir, "err", err)
}

const unwritableAdvice = "see the kernel's log, repair its file system and mount it again"

func (c *Cache) unwritableError(err error) error {
	return fmt.Errorf("store %s: %w: %w; %s", c.dir, cas.ErrUnwritable, err, unwritableAdvice)
}

// probePrefix begins the names of files that probe writes.
const probePrefix = "probe-"

// probe writes and removes a file. A full file system is no failure. The caller holds refusal.mu.
func (c *Cache) probe() error {
	c.refusal.probed = time.Now()
	f, err := os.CreateTemp(filepath.Join(c.dir, "tmp"), probePrefix)
	if err == nil {
		_, err = f.WriteString("probe\n")
		if err == nil && c.config.Sync {
			err = f.Sync()
		}
		err = errors.Join(err, f.Close(), os.Remove(f.Name()))
	}
	if isFull(err) {
		return nil
	}
	return err
}
