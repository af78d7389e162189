// SPDX-License-Identifier: Apache-2.0

package disk

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"sync"

	"github.com/cloister-build/cloister/cas"
)

// A Store is one instance of a Cache. It implements cas.Store, cas.Filer and cas.ActionCache.
type Store struct {
	cache    *Cache
	instance string // escaped
}

func (s *Store) key(k kind, d cas.Digest) key { return key{s.instance, k, d} }

// begin begins a call, which ends with end, or returns why it cannot begin.
func (s *Store) begin(ctx context.Context) (end func(), err error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	return s.cache.begin()
}

// Open implements cas.Store. A blob whose file has not its size is cas.ErrCorrupt at once, and so is one
// whose bytes are not those of d, if it is opened from within and was not verified before.
func (s *Store) Open(ctx context.Context, d cas.Digest, off int64) (io.ReadCloser, error) {
	end, err := s.begin(ctx)
	if err != nil {
		return nil, err
	}
	defer end()
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
	r := &reader{store: s, entry: e, file: f, src: f, left: d.Size() - off}
	if err := r.start(ctx, off); err != nil {
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
	store *Store
	entry *entry
	file  *os.File
	src   io.Reader
	left  int64 // bytes that must still come
	whole bool  // it reads the whole blob, and so verifies it
}

func (r *reader) start(ctx context.Context, off int64) error {
	d := r.entry.key.digest
	fi, err := r.file.Stat()
	if err != nil {
		return fmt.Errorf("open blob %s: %w", d, err)
	}
	if fi.Size() != d.Size() {
		r.store.lose(r.entry)
		return fmt.Errorf("blob %s: its file has %d bytes: %w", d, fi.Size(), cas.ErrCorrupt)
	}
	if off == 0 {
		r.src, r.whole = cas.Verify(d, r.file), true
		return nil
	}
	if err := r.store.cache.verify(ctx, r.entry); errors.Is(err, os.ErrNotExist) {
		return notFound(d) // evicted since its file was opened
	} else if err != nil {
		if errors.Is(err, cas.ErrCorrupt) {
			r.store.lose(r.entry)
		}
		return fmt.Errorf("open blob %s: %w", d, err)
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
	switch {
	case err == io.EOF && r.whole:
		r.store.cache.index.setVerified(r.entry, true)
	case errors.Is(err, cas.ErrCorrupt):
		// After Close the store is left as it is.
		if end, closed := r.store.cache.begin(); closed == nil {
			r.store.lose(r.entry)
			end()
		}
	}
	return n, err
}

func (r *reader) Close() error { return r.file.Close() }

// Put implements cas.Store. It does not read r if d is present.
func (s *Store) Put(ctx context.Context, d cas.Digest, r io.Reader) error {
	end, err := s.begin(ctx)
	if err != nil {
		return err
	}
	defer end()
	if d.IsEmpty() || s.cache.use(s.key(blob, d), false) != nil {
		return nil
	}
	_, err = s.cache.put(s.key(blob, d), d.Size(), false, func(f *draft) error {
		if err := s.fill(ctx, f, d, r); err != nil {
			return err
		}
		return f.file.Chmod(0o444)
	})
	return err
}

var buffers = sync.Pool{New: func() any { return new([128 << 10]byte) }}

// fill writes the bytes of r to f, if they are those of d. It stops as soon as there are too many, ctx
// has ended, or the store is being closed.
func (s *Store) fill(ctx context.Context, f *draft, d cas.Digest, r io.Reader) error {
	buf := buffers.Get().(*[128 << 10]byte)
	defer buffers.Put(buf)
	h := d.Function().New()
	for n := int64(0); ; {
		m, readErr := r.Read(buf[:])
		if err := ctx.Err(); err != nil {
			return err
		}
		if s.cache.closed.Load() {
			return s.cache.closedError()
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

// Missing implements cas.Store. It asks the index, not the disk.
func (s *Store) Missing(ctx context.Context, ds []cas.Digest) ([]cas.Digest, error) {
	end, err := s.begin(ctx)
	if err != nil {
		return nil, err
	}
	defer end()
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
// is first asked for; on file systems that can, it shares its blocks with the blob. The first File of a
// blob that an earlier process wrote reads it whole, to verify it; a damaged one is cas.ErrNotFound.
func (s *Store) File(ctx context.Context, d cas.Digest, exec bool) (path string, release func(), err error) {
	end, err := s.begin(ctx)
	if err != nil {
		return "", nil, err
	}
	defer end()
	e, err := s.pin(ctx, blob, d)
	if errors.Is(err, cas.ErrNotFound) && d.IsEmpty() {
		e, err = s.cache.put(s.key(blob, d), 0, true, func(f *draft) error { return f.file.Chmod(0o444) })
	}
	if err == nil && exec {
		plain := e
		e, err = s.pin(ctx, executable, d)
		if errors.Is(err, cas.ErrNotFound) {
			e, err = s.cache.put(s.key(executable, d), d.Size(), true, func(f *draft) error { return s.copy(f, plain) })
		}
		s.cache.release(plain)
	}
	if err != nil {
		return "", nil, err
	}
	return s.cache.path(e.key), sync.OnceFunc(func() {
		// After Close the file stays: the directory may be another's.
		if end, closed := s.cache.begin(); closed == nil {
			s.cache.release(e)
			end()
		}
	}), nil
}

// pin returns the pinned entry of a blob whose file is there, has its size and was verified.
func (s *Store) pin(ctx context.Context, k kind, d cas.Digest) (*entry, error) {
	e := s.cache.use(s.key(k, d), true)
	if e == nil {
		return nil, notFound(d)
	}
	fi, err := os.Lstat(s.cache.path(e.key))
	if err == nil && (!fi.Mode().IsRegular() || fi.Size() != d.Size()) {
		err = cas.ErrCorrupt
	}
	if err == nil {
		err = s.cache.verify(ctx, e)
	}
	if err == nil {
		return e, nil
	}
	if errors.Is(err, cas.ErrCorrupt) || errors.Is(err, os.ErrNotExist) {
		err = notFound(d)
		s.cache.lose(e)
	} else {
		err = fmt.Errorf("blob %s: %w", d, err)
	}
	s.cache.release(e)
	return nil, err
}

// copy makes f the executable copy of the blob e.
func (s *Store) copy(f *draft, e *entry) error {
	src, err := openQuietly(s.cache.path(e.key))
	if err != nil {
		return err
	}
	defer src.Close()
	d := e.key.digest
	if err := f.reserve(d.Size()); err != nil {
		return err
	}
	// On Linux this is copy_file_range, which shares blocks where the file system can.
	n, err := io.Copy(f.file, src)
	if err != nil {
		return s.cache.writeError(err)
	}
	if n != d.Size() {
		return fmt.Errorf("blob %s: its file has %d bytes: %w", d, n, cas.ErrCorrupt)
	}
	return f.file.Chmod(0o555)
}

func notFound(d cas.Digest) error { return fmt.Errorf("blob %s: %w", d, cas.ErrNotFound) }

func rangeError(d cas.Digest, off int64) error {
	return fmt.Errorf("blob %s: offset %d: %w", d, off, cas.ErrRange)
}
