// SPDX-License-Identifier: Apache-2.0

package disk

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/disk/internal/fault"
	"github.com/cloister-build/cloister/cas/disk/internal/index"
	"github.com/cloister-build/cloister/cas/durable"
)

// openFile opens the file of a blob.
func (s *Store) openFile(ctx context.Context, e index.Entry, d cas.Digest, off int64) (io.ReadCloser, error) {
	c := s.cache
	path, err := c.pathBelow("files", e.Key)
	if err != nil {
		return nil, err
	}
	f, err := os.OpenFile(path, readFlags, 0)
	switch {
	case vanished(err):
		c.dropMissing(e)
		return nil, notFound(d)
	case fault.Unreadable(err):
		return nil, fmt.Errorf("open blob %s: %w", d, c.unreadable(e, err))
	case err != nil:
		return nil, fmt.Errorf("open blob %s: %w", d, err)
	}
	r := &reader{cache: c, entry: e, digest: d, file: f, src: f, left: d.Size() - off}
	if err := r.start(ctx, path, off); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return r, nil
}

// A reader reads a blob from its file, and drops the blob if it is damaged.
type reader struct {
	cache  *Cache
	entry  index.Entry
	digest cas.Digest
	file   *os.File
	src    io.Reader
	left   int64 // bytes to read
	whole  bool  // reads the whole blob, which verifies it
}

func (r *reader) start(ctx context.Context, path string, off int64) error {
	fi, err := r.file.Stat()
	if err == nil && !fi.Mode().IsRegular() {
		err = durable.ErrNotRegular
	}
	if fault.Unreadable(err) {
		err = r.cache.unreadable(r.entry, err)
	}
	if err != nil {
		return fmt.Errorf("open blob %s: %w", r.digest, err)
	}
	if fi.Size() != r.digest.Size() {
		err := r.cache.damaged(r.entry, nil)
		return fmt.Errorf("blob %s: file has %d bytes: %w", r.digest, fi.Size(), err)
	}
	if off == 0 {
		r.src, r.whole = cas.Verify(r.digest, r.file), true
		return nil
	}
	if err := r.cache.verifyFile(ctx, r.entry, path); vanished(err) {
		return notFound(r.digest) // evicted since the file was opened
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
		err = cas.ErrCorrupt // the file was truncated or extended meanwhile
	}
	switch {
	case err == io.EOF && r.whole:
		r.cache.setVerified(r.entry)
	case errors.Is(err, cas.ErrCorrupt):
		r.drop(nil)
	case fault.Unreadable(err):
		r.drop(err)
		err = fmt.Errorf("read blob %s: %w: %s", r.digest, cas.ErrCorrupt, fault.Reason(err))
	}
	return n, err
}

// drop drops the blob, unless the store is closed: then it must not change.
func (r *reader) drop(cause error) {
	if end, closed := r.cache.begin(); closed == nil {
		_ = r.cache.drop(r.entry, nil, cause)
		end()
	}
}

func (r *reader) Close() error { return r.file.Close() }

// verifyFile reads and verifies the file of e unless that was done before. It drops a damaged file and returns
// cas.ErrCorrupt. Concurrent callers wait for one of them to read.
func (c *Cache) verifyFile(ctx context.Context, e index.Entry, path string) error {
	mu := &c.reading[e.Hash[0]]
	mu.Lock()
	defer mu.Unlock()
	if now, ok := c.index.Get(e.Key); ok && now.Position == e.Position && now.Verified {
		return nil
	}
	err := readWhole(ctx, path, e.Key)
	switch {
	case errors.Is(err, cas.ErrCorrupt):
		return c.damaged(e, nil)
	case fault.Unreadable(err):
		return c.unreadable(e, err)
	case err != nil:
		return err
	}
	c.setVerified(e)
	return nil
}

// setVerified marks e as verified.
func (c *Cache) setVerified(e index.Entry) {
	c.index.Update(e.Key, func(now *index.Entry) {
		// The record of a file may have moved.
		if now.Position == e.Position || now.File && e.File {
			now.Verified = true
		}
	})
}

// readWhole reads a file and returns cas.ErrCorrupt if its content does not match k.
func readWhole(ctx context.Context, path string, k index.Key) error {
	function, err := functionOf(k)
	if err != nil {
		return err
	}
	f, err := durable.OpenFile(path, readFlags, 0)
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
		} else if err != nil {
			return err
		}
	}
}
