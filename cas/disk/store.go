// SPDX-License-Identifier: Apache-2.0

package disk

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"sync"

	"github.com/cloister-build/cloister/cas"
)

// A Store is one instance of a Cache. It implements cas.Store, cas.Filer and cas.ActionCache.
type Store struct {
	cache    *Cache
	instance string // escaped
}

func (s *Store) key(k kind, d cas.Digest) key { return key{s.instance, k, d} }

// ready returns why a call cannot begin.
func (s *Store) ready(ctx context.Context) error {
	if s.cache.closed.Load() {
		return fmt.Errorf("store %s: %w", s.cache.dir, os.ErrClosed)
	}
	return ctx.Err()
}

// Open implements cas.Store. A blob whose file has not its size is cas.ErrCorrupt at once.
func (s *Store) Open(ctx context.Context, d cas.Digest, off int64) (io.ReadCloser, error) {
	if err := s.ready(ctx); err != nil {
		return nil, err
	}
	if d.IsEmpty() {
		if off != 0 {
			return nil, rangeError(d, off)
		}
		return io.NopCloser(bytes.NewReader(nil)), nil
	}
	e := s.cache.use(s.key(blob, d), false)
	switch {
	case e == nil:
		return nil, notFound(d)
	case off < 0 || off > d.Size():
		return nil, rangeError(d, off)
	}
	f, err := openQuietly(s.cache.path(e.key))
	if errors.Is(err, os.ErrNotExist) {
		s.cache.lose(e)
		return nil, notFound(d)
	}
	if err != nil {
		return nil, fmt.Errorf("open blob %s: %w", d, err)
	}
	r := &reader{file: f, src: f, left: d.Size() - off, lose: func() { s.lose(e) }}
	if err := r.start(d, off); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return r, nil
}

// lose makes a blob absent, and its executable copy, which may be a copy of the damage.
func (s *Store) lose(e *entry) {
	s.cache.lose(e)
	if x := s.cache.use(s.key(executable, e.key.digest), false); x != nil {
		s.cache.lose(x)
	}
}

// A reader reads a blob from its file and loses the blob if it turns out to be damaged.
type reader struct {
	file *os.File
	src  io.Reader
	left int64 // bytes that must still come
	lose func()
}

func (r *reader) start(d cas.Digest, off int64) error {
	fi, err := r.file.Stat()
	if err != nil {
		return fmt.Errorf("open blob %s: %w", d, err)
	}
	if fi.Size() != d.Size() {
		r.lose()
		return fmt.Errorf("blob %s: its file has %d bytes: %w", d, fi.Size(), cas.ErrCorrupt)
	}
	if off == 0 {
		r.src = cas.Verify(d, r.file)
		return nil
	}
	if _, err := r.file.Seek(off, io.SeekStart); err != nil {
		return fmt.Errorf("open blob %s: %w", d, err)
	}
	return nil
}

func (r *reader) Read(p []byte) (int, error) {
	n, err := r.src.Read(p)
	r.left -= int64(n)
	if err == io.EOF && r.left > 0 || r.left < 0 {
		err = cas.ErrCorrupt // the file changed its size while it was read
	}
	if errors.Is(err, cas.ErrCorrupt) {
		r.lose()
	}
	return n, err
}

func (r *reader) Close() error { return r.file.Close() }

// Put implements cas.Store. It does not read r if d is present.
func (s *Store) Put(ctx context.Context, d cas.Digest, r io.Reader) error {
	if err := s.ready(ctx); err != nil {
		return err
	}
	if d.IsEmpty() || s.cache.use(s.key(blob, d), false) != nil {
		return nil
	}
	_, err := s.put(blob, d, d.Size(), false, func(f *os.File) error {
		if err := s.fill(ctx, f, d, r); err != nil {
			return err
		}
		return f.Chmod(0o444)
	})
	return err
}

// put makes the file of kind k and d, which write fills with size bytes, and returns its entry, pinned
// if pin.
func (s *Store) put(
	k kind, d cas.Digest, size int64, pin bool, write func(*os.File) error,
) (e *entry, err error) {
	c := s.cache
	n := charge(size)
	if err := c.reserve(n); err != nil {
		return nil, err
	}
	kept := false
	defer func() {
		if !kept {
			c.index.give(n)
		}
	}()
	f, err := os.CreateTemp(filepath.Join(c.dir, "tmp"), "")
	if err != nil {
		return nil, c.writeError(err)
	}
	defer func() {
		if !kept {
			err = errors.Join(err, os.Remove(f.Name()))
		}
	}()
	err = write(f)
	if closeErr := f.Close(); err == nil && closeErr != nil {
		err = c.writeError(closeErr)
	}
	if err != nil {
		return nil, err
	}
	e, kept, err = c.commit(f.Name(), s.key(k, d), n, pin)
	return e, err
}

var buffers = sync.Pool{New: func() any { return new([128 << 10]byte) }}

// fill writes the bytes of r to f, if they are those of d. It stops as soon as there are too many, or
// ctx has ended.
func (s *Store) fill(ctx context.Context, f *os.File, d cas.Digest, r io.Reader) error {
	buf := buffers.Get().(*[128 << 10]byte)
	defer buffers.Put(buf)
	h := d.Function().New()
	for n := int64(0); ; {
		m, readErr := r.Read(buf[:])
		if err := ctx.Err(); err != nil {
			return err
		}
		n += int64(m)
		if n > d.Size() {
			return cas.Mismatch(d, cas.Digest{})
		}
		h.Write(buf[:m])
		if _, err := f.Write(buf[:m]); err != nil {
			return s.cache.writeError(err)
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

// Missing implements cas.Store. It asks the index, not the disk.
func (s *Store) Missing(ctx context.Context, ds []cas.Digest) ([]cas.Digest, error) {
	if err := s.ready(ctx); err != nil {
		return nil, err
	}
	var missing []cas.Digest
	seen := make(map[cas.Digest]bool, len(ds))
	for _, d := range ds {
		if seen[d] || d.IsEmpty() {
			continue
		}
		seen[d] = true
		if s.cache.use(s.key(blob, d), false) == nil {
			missing = append(missing, d)
		}
	}
	return missing, nil
}

// File implements cas.Filer. The executable file is a copy that counts against the budget, made when it
// is first asked for; on file systems that can, it shares its blocks with the blob. File checks the
// size of a blob but does not read it: that its bytes are still those of d is found out by Open, and by
// Cache.Check.
func (s *Store) File(ctx context.Context, d cas.Digest, exec bool) (path string, release func(), err error) {
	if err := s.ready(ctx); err != nil {
		return "", nil, err
	}
	e, err := s.pin(blob, d)
	if errors.Is(err, cas.ErrNotFound) && d.IsEmpty() {
		e, err = s.put(blob, d, 0, true, func(f *os.File) error { return f.Chmod(0o444) })
	}
	if err == nil && exec {
		plain := e
		e, err = s.pin(executable, d)
		if errors.Is(err, cas.ErrNotFound) {
			e, err = s.put(executable, d, d.Size(), true, func(f *os.File) error { return s.copy(f, plain) })
		}
		s.cache.release(plain)
	}
	if err != nil {
		return "", nil, err
	}
	return s.cache.path(e.key), sync.OnceFunc(func() { s.cache.release(e) }), nil
}

// pin returns the pinned entry of a blob whose file is there and has its size.
func (s *Store) pin(k kind, d cas.Digest) (*entry, error) {
	e := s.cache.use(s.key(k, d), true)
	if e == nil {
		return nil, notFound(d)
	}
	fi, err := os.Lstat(s.cache.path(e.key))
	switch {
	case err == nil && fi.Mode().IsRegular() && fi.Size() == d.Size():
		return e, nil
	case err == nil || errors.Is(err, os.ErrNotExist):
		err = notFound(d)
		s.cache.lose(e)
	default:
		err = fmt.Errorf("blob %s: %w", d, err)
	}
	s.cache.release(e)
	return nil, err
}

// copy makes f the executable copy of the blob e.
func (s *Store) copy(f *os.File, e *entry) error {
	src, err := openQuietly(s.cache.path(e.key))
	if err != nil {
		return err
	}
	defer src.Close()
	// On Linux this is copy_file_range, which shares blocks where the file system can.
	n, err := io.Copy(f, src)
	if err != nil {
		return s.cache.writeError(err)
	}
	if d := e.key.digest; n != d.Size() {
		return fmt.Errorf("blob %s: its file has %d bytes: %w", d, n, cas.ErrCorrupt)
	}
	return f.Chmod(0o555)
}

func notFound(d cas.Digest) error { return fmt.Errorf("blob %s: %w", d, cas.ErrNotFound) }

func rangeError(d cas.Digest, off int64) error {
	return fmt.Errorf("blob %s: offset %d: %w", d, off, cas.ErrRange)
}
