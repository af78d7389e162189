// SPDX-License-Identifier: Apache-2.0

package disk

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"syscall"
	"time"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/disk/internal/commit"
	"github.com/cloister-build/cloister/cas/disk/internal/index"
	"github.com/cloister-build/cloister/cas/disk/internal/segment"
	"github.com/cloister-build/cloister/cas/durable"
)

// leastRoom is the room of a draft, in bytes, before anything has arrived. From there it grows to twice of
// what has: what a client only states costs nobody else an entry.
const leastRoom = 64 << 10

// contentTime is when every file was used and changed last, as its inode has it: an action that finds a blob mounted as
// an input must not learn from it when the blob came here. It is the one that small inputs have, too.
var contentTime = time.Unix(1_000_000_000, 0)

// A draft is a file in tmp on its way into the store, and the room that it takes in the budget.
type draft struct {
	cache *Cache
	file  *os.File
	size  int64 // bytes that it is to have
	n     int64 // bytes that Write has written
	room  int64 // bytes reserved
}

// draft makes a draft of a file of size bytes. The caller calls discard.
func (c *Cache) draft(size int64) (*draft, error) {
	if charge(size) > c.most() {
		return nil, c.reserve(charge(size), 1) // says why there is no room
	}
	d := &draft{cache: c, size: size}
	if err := d.reserve(0); err != nil {
		return nil, err
	}
	var err error
	if d.file, err = os.CreateTemp(filepath.Join(c.dir, "tmp"), ""); err != nil {
		c.budget.give(d.room, 1)
		return nil, c.writeError(err)
	}
	return d, nil
}

// reserve makes room for the first n bytes, and for as many more.
func (d *draft) reserve(n int64) error {
	room := min(charge(d.size), max(leastRoom, charge(2*n)))
	if room <= d.room {
		return nil
	}
	files := int64(0)
	if d.room == 0 {
		files = 1
	}
	if err := d.cache.reserve(room-d.room, files); err != nil {
		return err
	}
	d.room = room
	return nil
}

// Write implements io.Writer. The caller writes no more than size bytes.
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

// finish closes the file, of the given mode.
func (d *draft) finish(mode os.FileMode) error {
	err := d.file.Chmod(mode)
	if err == nil && d.cache.Sync {
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

// discard gives the room back, and removes the file unless it has got a name.
func (d *draft) discard() {
	_ = d.file.Close() // closed already, unless something failed
	_ = os.Remove(d.file.Name())
	d.cache.budget.give(d.room, 1)
}

// rename gives the file the name path.
func (d *draft) rename(path string) error {
	err := os.Rename(d.file.Name(), path)
	if vanished(err) {
		if err = os.MkdirAll(filepath.Dir(path), 0o700); err == nil {
			err = os.Rename(d.file.Name(), path)
		}
	}
	if err == nil && d.cache.Sync {
		if err = d.cache.syncPath(filepath.Dir(path)); err != nil {
			err = errors.Join(err, os.Remove(path))
		}
	}
	if err != nil {
		return d.cache.writeError(err)
	}
	commit.Point("file renamed")
	return nil
}

// syncPath makes the names in dir, and those of it and its parents, outlive a loss of power.
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

// putFile stores a blob as a file of its own.
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
	if err := f.finish(0o444); err != nil {
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
		return nil // somebody else has put it meanwhile
	}
	if err := f.rename(path); err != nil {
		return err
	}
	it := segment.Item{Record: segment.Record{Entry: index.Entry{Key: k, Stamp: seconds(time.Now()), File: true, Verified: true}}}
	err = c.fresh.Append([]segment.Item{it}, func(it *segment.Item) {
		c.budget.count(charge(k.Size), 1)
		c.committed(it)
	})
	if err != nil {
		return errors.Join(c.writeError(err), os.Remove(path))
	}
	return nil
}

// fill writes the bytes of r to f, if they are those of d. It stops as soon as there are too many, ctx
// has ended, or the store is being closed.
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

// openFile opens the file of a blob.
func (s *Store) openFile(ctx context.Context, e index.Entry, d cas.Digest, off int64) (io.ReadCloser, error) {
	c := s.cache
	path, err := c.pathBelow("files", e.Key)
	if err != nil {
		return nil, err
	}
	f, err := openQuietly(path)
	if vanished(err) {
		c.lose(e)
		return nil, notFound(d)
	}
	if err != nil {
		return nil, fmt.Errorf("open blob %s: %w", d, err)
	}
	r := &reader{cache: c, entry: e, digest: d, file: f, src: f, left: d.Size() - off}
	if err := r.start(ctx, path, off); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return r, nil
}

// A reader reads a blob from its file and loses the blob if it turns out to be damaged.
type reader struct {
	cache  *Cache
	entry  index.Entry
	digest cas.Digest
	file   *os.File
	src    io.Reader
	left   int64 // bytes that must still come
	whole  bool  // it reads the whole blob, and so verifies it
}

func (r *reader) start(ctx context.Context, path string, off int64) error {
	fi, err := r.file.Stat()
	if err != nil {
		return fmt.Errorf("open blob %s: %w", r.digest, err)
	}
	if fi.Size() != r.digest.Size() {
		err := r.cache.damaged(r.entry, nil)
		return fmt.Errorf("blob %s: its file has %d bytes: %w", r.digest, fi.Size(), err)
	}
	if off == 0 {
		r.src, r.whole = cas.Verify(r.digest, r.file), true
		return nil
	}
	if err := r.cache.verifyFile(ctx, r.entry, r.digest, path); vanished(err) {
		return notFound(r.digest) // evicted since its file was opened
	} else if err != nil {
		return fmt.Errorf("open blob %s: %w", r.digest, err)
	}
	if _, err := r.file.Seek(off, io.SeekStart); err != nil {
		return fmt.Errorf("open blob %s: %w", r.digest, err)
	}
	return nil
}

func (r *reader) Read(p []byte) (int, error) {
	n, err := r.src.Read(p)
	r.left -= int64(n)
	if err == io.EOF && r.left > 0 || r.left < 0 {
		err = cas.ErrCorrupt // the file changed its size while it was read
	}
	switch {
	case err == io.EOF && r.whole:
		r.cache.setVerified(r.entry)
	case errors.Is(err, cas.ErrCorrupt), unreadable(err):
		// After Close the store is left as it is.
		if end, closed := r.cache.begin(); closed == nil {
			_ = r.cache.damaged(r.entry, nil)
			end()
		}
	}
	return n, err
}

func (r *reader) Close() error { return r.file.Close() }

// verifyFile returns nil if the file of e was verified, and else reads it whole: if it is damaged it is lost, and
// cas.ErrCorrupt. Of several callers at once one reads.
func (c *Cache) verifyFile(ctx context.Context, e index.Entry, d cas.Digest, path string) error {
	mu := &c.reading[e.Hash[0]]
	mu.Lock()
	defer mu.Unlock()
	if now, ok := c.index.Get(e.Key); ok && now.Position == e.Position && now.Verified {
		return nil
	}
	err := readWhole(ctx, path, e.Key)
	if errors.Is(err, cas.ErrCorrupt) {
		return c.damaged(e, nil)
	} else if err != nil {
		return err
	}
	c.setVerified(e)
	return nil
}

// setVerified notes that the bytes of e are what they should be.
func (c *Cache) setVerified(e index.Entry) {
	c.index.Update(e.Key, func(now *index.Entry) {
		// A file stays the same when its record moves.
		if now.Position == e.Position || now.File && e.File {
			now.Verified = true
		}
	})
}

// readWhole reads a file to its end and returns cas.ErrCorrupt if its content is not what k is the key of.
func readWhole(ctx context.Context, path string, k index.Key) error {
	function, err := functionOf(k)
	if err != nil {
		return err
	}
	f, err := openQuietly(path)
	if err != nil {
		return err
	}
	defer f.Close()
	p := buffers.Get().(*[]byte)
	defer buffers.Put(p)
	h := function.New(k.Size)
	for n := int64(0); ; {
		if err := ctx.Err(); err != nil {
			return err
		}
		m, err := f.Read((*p)[:cap(*p)])
		h.Write((*p)[:m])
		n += int64(m)
		if n > k.Size || err == io.EOF && !is(k, function.Digest(h, n)) {
			return cas.ErrCorrupt
		} else if err == io.EOF {
			return nil
		} else if unreadable(err) {
			return fmt.Errorf("%w: %w", cas.ErrCorrupt, err)
		} else if err != nil {
			return err
		}
	}
}

// unreadable reports whether err says that the disk no longer has what was written.
func unreadable(err error) bool { return errors.Is(err, syscall.EIO) }

// unseen looks at nothing.
func unseen(string) error { return nil }

// removeFile makes the file of k absent if look does not fail and permit says so of its entry, and returns that.
func (c *Cache) removeFile(k index.Key, look func(path string) error, permit func(*index.Entry) bool, remove func(path string) error) (e index.Entry, removed bool, err error) {
	path, err := c.pathBelow("files", k)
	if err != nil {
		return e, false, err
	}
	mu := &c.files[k.Hash[0]]
	mu.Lock()
	defer mu.Unlock()
	if err := look(path); err != nil {
		return e, false, err
	}
	e, removed = c.index.Remove(k, func(e *index.Entry) bool { return e.File && permit(e) })
	if !removed {
		return e, false, nil
	}
	if err := remove(path); err != nil && !vanished(err) {
		// Its log may have been written anew in between, without it.
		c.uncount(&e)
		again := c.fresh.Append([]segment.Item{{Record: segment.Record{Entry: e}}}, c.committed)
		if again != nil {
			c.budget.count(-charge(k.Size), -1) // removed by the next Open
		}
		return e, false, errors.Join(err, again)
	}
	// Without its file the record says nothing: Open passes it over.
	commit.Point("file removed")
	c.uncount(&e)
	c.budget.count(-charge(k.Size), -1)
	return e, true, nil
}
