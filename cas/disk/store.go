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
	"github.com/cloister-build/cloister/cas/disk/internal/fault"
	"github.com/cloister-build/cloister/cas/disk/internal/index"
	"github.com/cloister-build/cloister/cas/disk/internal/segment"
)

// A Store is an instance of a Cache. It implements cas.Store, cas.Batcher, cas.Filer, cas.Locator, cas.Splicer and
// cas.ActionCache. Use Cache.Instance; the zero Store is not usable.
type Store struct {
	cache *Cache
	name  string
}

var (
	_ cas.Store       = (*Store)(nil)
	_ cas.Batcher     = (*Store)(nil)
	_ cas.Filer       = (*Store)(nil)
	_ cas.Locator     = (*Store)(nil)
	_ cas.Splicer     = (*Store)(nil)
	_ cas.ActionCache = (*Store)(nil)
)

// find returns the key of d. It fails if nothing was ever put into the instance.
func (s *Store) find(kind index.Kind, d cas.Digest) (k index.Key, ok bool) {
	n, ok := s.cache.instances.find(s.name)
	if !ok {
		return k, false
	}
	return keyOf(n, kind, d), true
}

// key returns the key of d for a put. It assigns a number to a new instance.
func (s *Store) key(kind index.Kind, d cas.Digest) (index.Key, error) {
	n, err := s.cache.instances.number(s.name)
	if err != nil {
		return index.Key{}, s.cache.writeError(err)
	}
	return keyOf(n, kind, d), nil
}

// use returns the entry of d and renews its lease.
func (s *Store) use(kind index.Kind, d cas.Digest) (index.Entry, bool) {
	k, ok := s.find(kind, d)
	if !ok {
		return index.Entry{}, false
	}
	return s.cache.use(k)
}

// Open implements cas.Store. It reads and verifies a packed blob at once. For a file it returns cas.ErrCorrupt if the
// size is wrong, or if off is not 0 and the content, unless verified before, does not match.
func (s *Store) Open(ctx context.Context, d cas.Digest, off int64) (io.ReadCloser, error) {
	if err := cas.CheckDigests(d); err != nil {
		return nil, err
	}
	end, err := s.cache.beginWith(ctx)
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
	e, ok := s.use(blob, d)
	if k, known := s.find(blob, d); !ok && known {
		if s.cache.orphans.has(k) {
			s.cache.adopt(ctx, k)
		}
		e, ok = s.use(blob, d) // this call or another may have adopted the blob
	}
	if !ok {
		return s.openSpliced(ctx, d, off)
	}
	return s.openEntry(ctx, e, d, off)
}

// openEntry opens the blob d with entry e.
func (s *Store) openEntry(ctx context.Context, e index.Entry, d cas.Digest, off int64) (io.ReadCloser, error) {
	switch {
	case off < 0 || off > d.Size():
		return nil, rangeError(d, off)
	case e.File:
		return s.openFile(ctx, e, d, off)
	}
	b, err := s.cache.read(e)
	if err == nil && d.Function().Sum(b) != d {
		err = s.cache.damaged(e, b)
	}
	if errors.Is(err, cas.ErrNotFound) {
		return nil, notFound(d)
	} else if err != nil {
		return nil, fmt.Errorf("blob %s: %w", d, err)
	}
	return io.NopCloser(bytes.NewReader(b[off:])), nil
}

// read returns the content of a packed entry, even if it moves meanwhile, or cas.ErrNotFound. An entry without zero
// padding is damaged: a file system image would expose what follows it.
func (c *Cache) read(e index.Entry) ([]byte, error) {
	for {
		b := make([]byte, segment.Padded(int64(e.Length)))
		err := c.segments.Read(&e, b)
		if err == nil && !padded(b, e.Length) {
			return nil, c.damaged(e, b)
		} else if err == nil {
			return b[:e.Length], nil
		}
		if errors.Is(err, io.EOF) {
			return nil, c.damaged(e, nil) // truncated by another process
		} else if fault.Unreadable(err) {
			return nil, c.unreadable(e, err)
		}
		now, ok := c.index.Get(e.Key)
		if !ok || now.File {
			return nil, cas.ErrNotFound
		}
		if !errors.Is(err, segment.ErrGone) || now.Position == e.Position {
			return nil, err
		}
		e = now
	}
}

// Put implements cas.Store. It does not read r if d is present.
func (s *Store) Put(ctx context.Context, d cas.Digest, r io.Reader) error {
	if err := cas.CheckDigests(d); err != nil {
		return err
	}
	end, err := s.cache.beginPut(ctx)
	if err != nil {
		return err
	}
	defer end()
	if d.IsEmpty() {
		return nil
	}
	if s.present(d) {
		return nil
	}
	if d.Size() >= s.cache.config.Pack {
		return s.putFile(ctx, d, r)
	}
	buf := buffers.Get().(*[]byte)
	defer buffers.Put(buf)
	b, err := s.readSmall(ctx, d, r, (*buf)[:0])
	if err != nil {
		return err
	}
	k, err := s.key(blob, d)
	if err != nil {
		return err
	}
	return s.cache.append([]segment.Item{s.cache.newItem(k, b)})
}

// buffers holds buffers for content on its way to the disk.
var buffers = sync.Pool{New: func() any { b := make([]byte, 128<<10); return &b }}

// readSmall appends the content of r to b and verifies that it matches d.
func (s *Store) readSmall(ctx context.Context, d cas.Digest, r io.Reader, b []byte) ([]byte, error) {
	for {
		if len(b) == cap(b) {
			b = append(b, 0)[:len(b)]
		}
		n, err := r.Read(b[len(b):cap(b)])
		b = b[:len(b)+n]
		switch {
		case ctx.Err() != nil:
			return nil, ctx.Err()
		case s.cache.closed.Load():
			return nil, s.cache.closedError()
		case int64(len(b)) > d.Size():
			return nil, cas.Mismatch(d, cas.Digest{})
		case err == io.EOF:
			if got := d.Function().Sum(b); got != d {
				return nil, cas.Mismatch(d, got)
			}
			return b, nil
		case err != nil:
			return nil, err
		}
	}
}

// PutAll implements cas.Batcher: all packed blobs share one commit.
func (s *Store) PutAll(ctx context.Context, blobs []cas.Blob) []error {
	errs := make([]error, len(blobs))
	fill := func(err error) []error {
		for i := range errs {
			if errs[i] == nil {
				errs[i] = err
			}
		}
		return errs
	}
	end, err := s.cache.beginPut(ctx)
	if err != nil {
		return fill(err)
	}
	defer end()
	items := make([]segment.Item, 0, len(blobs))
	var blobOf []int // index of each item's blob
	for i, b := range blobs {
		if errs[i] = b.Check(); errs[i] != nil {
			continue
		}
		if b.Digest.IsEmpty() {
			continue
		}
		if s.present(b.Digest) {
			continue
		}
		k, err := s.key(blob, b.Digest)
		switch {
		case err != nil:
			errs[i] = err
		case b.Digest.Size() >= s.cache.config.Pack:
			errs[i] = s.putFile(ctx, b.Digest, bytes.NewReader(b.Data))
		default:
			items = append(items, s.cache.newItem(k, b.Data))
			blobOf = append(blobOf, i)
		}
		if err := ctx.Err(); err != nil {
			return fill(err)
		}
	}
	if len(items) == 0 {
		return errs
	}
	if err := s.cache.append(items); err != nil {
		for _, i := range blobOf {
			errs[i] = err
		}
	}
	return errs
}

// newItem returns the item to append for the packed blob k.
func (c *Cache) newItem(k index.Key, b []byte) segment.Item {
	it := segment.Item{Data: b}
	it.Entry = index.Entry{Key: k, Length: uint32(len(b)), Stamp: c.now(), Verified: true}
	return it
}

// append appends packed entries next to each other, in as few commits as segments have room for. If a commit fails, the
// later ones are not made.
func (c *Cache) append(items []segment.Item) error {
	for len(items) > 0 {
		var n int64
		count := 0
		for count < len(items) && (count == 0 || n+packedCharge(int64(len(items[count].Data))) <= c.segments.Limit) {
			n += packedCharge(int64(len(items[count].Data)))
			count++
		}
		if err := c.appendOnce(items[:count], n); err != nil {
			return err
		}
		items = items[count:]
	}
	return nil
}

// appendOnce appends packed entries, which take n bytes, in one commit.
func (c *Cache) appendOnce(items []segment.Item, n int64) error {
	if err := c.reserve(n, 0); err != nil {
		return err
	}
	defer c.budget.release(n, 0)
	if err := c.fresh.Append(items, c.committed); err != nil {
		return c.writeError(err)
	}
	return nil
}

// committed adds a committed item to the index.
func (c *Cache) committed(it *segment.Item) {
	if isRecord(it.Key) {
		if old, replaced := c.index.Put(it.Entry); replaced {
			c.uncount(&old)
			c.forget(&old)
		}
		c.count(&it.Entry)
	} else if c.index.Add(&it.Entry) {
		c.count(&it.Entry)
	} // else a concurrent put won: this copy goes with its segment
}

// forget records that a result or a chunk list was replaced, so that it does not reappear when its successor is
// evicted. If the log cannot be written, the next Open does that.
func (c *Cache) forget(old *index.Entry) {
	if g := c.segments.Segment(old.Segment); g != nil {
		c.noted(g.Forget(old))
	}
}

// count counts a new entry of the index.
func (c *Cache) count(e *index.Entry) {
	c.budget.countEntry(e.Key, 1)
	c.addLive(e, 1)
}

// uncount undoes count.
func (c *Cache) uncount(e *index.Entry) {
	c.budget.countEntry(e.Key, -1)
	c.addLive(e, -1)
}

// addLive adds n times the entry to the live data of its segment.
func (c *Cache) addLive(e *index.Entry, n int64) {
	g := c.segments.Segment(e.Segment)
	switch {
	case g == nil:
	case e.File:
		g.Files.Add(n)
	default:
		g.Live.Add(n * segment.Padded(int64(e.Length)))
	}
}

func notFound(d cas.Digest) error { return fmt.Errorf("blob %s: %w", d, cas.ErrNotFound) }

func rangeError(d cas.Digest, off int64) error {
	return fmt.Errorf("blob %s: offset %d: %w", d, off, cas.ErrRange)
}

// isDropped reports whether err means that a blob is absent, or was damaged and is absent now.
func isDropped(err error) bool {
	return errors.Is(err, cas.ErrNotFound) || errors.Is(err, cas.ErrCorrupt)
}

// vanished reports whether err means that a file does not exist.
func vanished(err error) bool { return errors.Is(err, os.ErrNotExist) }
