// SPDX-License-Identifier: Apache-2.0

package disk

import (
	"context"
	"errors"
	"io"
	"os"
	"path/filepath"
	"time"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/disk/internal/commit"
	"github.com/cloister-build/cloister/cas/disk/internal/index"
	"github.com/cloister-build/cloister/cas/disk/internal/segment"
	"github.com/cloister-build/cloister/cas/durable"
)

// minReservation is the initial reservation of a draft in bytes. It grows to twice the size written: a size that a
// client merely claims evicts nothing.
const minReservation = 64 << 10

// contentTime is the access and modification time of every file. An action that sees a file as an input must not learn
// when the blob was stored. Small inputs have the same time.
var contentTime = time.Unix(1_000_000_000, 0)

// A draft is a file in tmp that is being written, and its reservation in the budget.
type draft struct {
	cache    *Cache
	file     *os.File
	size     int64 // final size
	n        int64 // bytes written
	reserved int64
	failures uint32 // failed flushes before
}

// draft creates a draft of size bytes. The caller calls discard.
func (c *Cache) draft(size int64) (*draft, error) {
	if charge(size) > c.maxPut() {
		return nil, c.reserve(charge(size), 1) // returns the reason
	}
	d := &draft{cache: c, size: size, failures: c.segments.Failures()}
	if err := d.reserve(0); err != nil {
		return nil, err
	}
	return d.create()
}

// create creates the file of a draft that has a reservation.
func (d *draft) create() (_ *draft, err error) {
	c := d.cache
	if d.file, err = os.CreateTemp(filepath.Join(c.dir, "tmp"), ""); err != nil {
		c.budget.release(d.reserved, 1)
		return nil, c.writeError(err)
	}
	return d, nil
}

// reserve reserves space for the first n bytes, and the same again.
func (d *draft) reserve(n int64) error {
	want := min(charge(d.size), max(minReservation, charge(2*n)))
	if want <= d.reserved {
		return nil
	}
	files := int64(0)
	if d.reserved == 0 {
		files = 1
	}
	if err := d.cache.reserve(want-d.reserved, files); err != nil {
		return err
	}
	d.reserved = want
	return nil
}

// Write implements io.Writer. The caller writes at most size bytes.
func (d *draft) Write(p []byte) (int, error) {
	if err := d.reserve(d.n + int64(len(p))); err != nil {
		return 0, err
	}
	n, err := d.file.Write(p)
	d.n += int64(n)
	if err != nil {
		err = d.cache.writeError(err)
	}
	return n, err
}

// finish sets the mode and closes the file.
func (d *draft) finish(mode os.FileMode) error {
	err := d.file.Chmod(mode)
	if err == nil && d.cache.config.Sync {
		err = d.file.Sync()
	}
	err = errors.Join(err, d.file.Close())
	commit.Point("file written")
	if err == nil {
		err = os.Chtimes(d.file.Name(), contentTime, contentTime)
	}
	if err != nil {
		return d.cache.writeError(err)
	}
	return nil
}

// discard releases the reservation, and removes the file unless it was renamed.
func (d *draft) discard() {
	_ = d.file.Close() // already closed unless something failed
	_ = os.Remove(d.file.Name())
	d.cache.budget.release(d.reserved, 1)
}

// rename renames the file to path. Even if it fails, a file may exist at path.
func (d *draft) rename(path string) error {
	err := os.Rename(d.file.Name(), path)
	if vanished(err) {
		if err = os.MkdirAll(filepath.Dir(path), 0o700); err == nil {
			err = os.Rename(d.file.Name(), path)
		}
	}
	if err == nil && d.cache.config.Sync {
		err = d.cache.syncPath(filepath.Dir(path))
	}
	if err != nil {
		return d.cache.writeError(err)
	}
	commit.Point("file renamed")
	return nil
}

// syncPath syncs dir and its parents up to the directory of the store.
func (c *Cache) syncPath(dir string) error {
	for {
		if err := durable.SyncDir(dir); err != nil {
			return err
		}
		if dir == c.dir {
			return nil
		}
		dir = filepath.Dir(dir)
	}
}

// fileMode is the mode of files, which actions see if they read the file itself. Earlier versions used 0444.
const fileMode = 0o644

// putFile stores a blob as a file.
func (s *Store) putFile(ctx context.Context, d cas.Digest, r io.Reader) error {
	c := s.cache
	f, err := c.draft(d.Size())
	if err != nil {
		return err
	}
	defer f.discard()
	if err := c.fill(ctx, f, d, r); err != nil {
		return err
	}
	if err := f.finish(fileMode); err != nil {
		return err
	}
	k, err := s.key(blob, d)
	if err != nil {
		return err
	}
	path, err := c.pathBelow("files", k)
	if err != nil {
		return err
	}
	mu := &c.files[k.Hash[0]]
	mu.Lock()
	defer mu.Unlock()
	if _, ok := c.use(k); ok {
		return nil // a concurrent put won
	}
	if err := f.rename(path); err != nil {
		_ = os.Remove(path) // otherwise it is adopted or replaced
		return err
	}
	it := segment.Item{Failures: f.failures}
	it.Entry = index.Entry{Key: k, Stamp: c.now(), File: true, Verified: true}
	err = c.fresh.Append([]segment.Item{it}, func(it *segment.Item) {
		c.budget.count(charge(k.Size), 1)
		c.committed(it)
	})
	if err != nil {
		return errors.Join(c.writeError(err), os.Remove(path))
	}
	return nil
}

// fill copies the content of r to f and verifies that it matches d. It stops early if there is too much content, ctx
// ends or the store is closed.
func (c *Cache) fill(ctx context.Context, f io.Writer, d cas.Digest, r io.Reader) error {
	p := buffers.Get().(*[]byte)
	defer buffers.Put(p)
	buf := (*p)[:cap(*p)]
	h := d.Function().New(d.Size())
	for n := int64(0); ; {
		m, readErr := r.Read(buf)
		if err := ctx.Err(); err != nil {
			return err
		}
		if c.closed.Load() {
			return c.closedError()
		}
		n += int64(m)
		if n > d.Size() {
			return cas.Mismatch(d, cas.Digest{})
		}
		h.Write(buf[:m])
		if _, err := f.Write(buf[:m]); err != nil {
			return err
		}
		if readErr == io.EOF {
			if got := d.Function().Digest(h, n); got != d {
				return cas.Mismatch(d, got)
			}
			return nil
		}
		if readErr != nil {
			return readErr
		}
	}
}

// noop does nothing with a file.
func noop(string) error { return nil }

// removeFile removes the entry of the file k, and calls remove with the path of the file, unless precheck fails for the
// path or permit returns false for the entry.
func (c *Cache) removeFile(
	k index.Key, precheck func(path string) error, permit func(*index.Entry) bool, remove func(path string) error,
) (removed bool, err error) {
	path, err := c.pathBelow("files", k)
	if err != nil {
		return false, err
	}
	mu := &c.files[k.Hash[0]]
	mu.Lock()
	defer mu.Unlock()
	if err := precheck(path); err != nil {
		return false, err
	}
	e, removed := c.index.Remove(k, func(e *index.Entry) bool { return e.File && permit(e) })
	if !removed {
		return false, nil
	}
	if err := remove(path); err != nil && !vanished(err) {
		// Compaction may have removed the record meanwhile.
		c.uncount(&e)
		it := segment.Item{Record: segment.Record{Entry: e}, Failures: c.segments.Trusted()}
		again := c.fresh.Append([]segment.Item{it}, c.committed)
		if again != nil {
			c.budget.count(-charge(k.Size), -1) // the next Open removes the file
		}
		return false, errors.Join(err, again)
	}
	// Open ignores a record without its file.
	commit.Point("file removed")
	c.uncount(&e)
	c.budget.count(-charge(k.Size), -1)
	return true, nil
}
