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
	"time"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/disk/internal/index"
	"github.com/cloister-build/cloister/cas/disk/internal/segment"
)

// A Store is one instance of a Cache. It implements cas.Store, cas.Batcher, cas.Filer, cas.Locator, cas.Splicer and
// cas.ActionCache.
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

// find returns the key of d; ok is false if nothing was ever put into the instance.
func (s *Store) find(kind index.Kind, d cas.Digest) (k index.Key, ok bool) {
	n, ok := s.cache.instances.find(s.name)
	if !ok {
		return k, false
	}
	return keyOf(n, kind, d), true
}

// key returns the key of d, which is about to be put.
func (s *Store) key(kind index.Kind, d cas.Digest) (index.Key, error) {
	n, err := s.cache.instances.number(s.name)
	if err != nil {
		return index.Key{}, s.cache.writeError(err)
	}
	return keyOf(n, kind, d), nil
}

// use returns the entry of d, which from now on is leased anew.
func (s *Store) use(kind index.Kind, d cas.Digest) (index.Entry, bool) {
	k, ok := s.find(kind, d)
	if !ok {
		return index.Entry{}, false
	}
	return s.cache.use(k)
}

// Open implements cas.Store. A packed blob is read and verified before Open returns. A file that has not its size
// is cas.ErrCorrupt at once, and so is one whose bytes are not those of d, if it is opened from within and was not
// verified before.
func (s *Store) Open(ctx context.Context, d cas.Digest, off int64) (io.ReadCloser, error) {
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
	if !ok {
		return s.openMapped(ctx, d, off)
	}
	return s.openEntry(ctx, e, d, off)
}

// openEntry opens the blob d whose entry is e.
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

// read returns the bytes of a packed entry, wherever they are by now, or cas.ErrNotFound. One that is not padded with
// zeros is damaged: a file system image may show what follows it.
func (c *Cache) read(e index.Entry) ([]byte, error) {
	for {
		b := make([]byte, segment.Padded(int64(e.Length)))
		err := c.segments.Read(&e, b)
		if err == nil && !padded(b, e.Length) {
			return nil, c.damaged(e, b)
		} else if err == nil {
			return b[:e.Length], nil
		}
		if errors.Is(err, io.EOF) || unreadable(err) {
			return nil, c.damaged(e, nil) // somebody has cut off its end, or the disk has lost it
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
	end, err := s.cache.beginWith(ctx)
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
	if d.Size() >= s.cache.Pack {
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
	return s.cache.append([]segment.Item{item(k, b)})
}

// buffers hold what is read before it is written.
var buffers = sync.Pool{New: func() any { b := make([]byte, 128<<10); return &b }}

// readSmall appends the bytes of r to b, if they are those of d.
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

// PutAll implements cas.Batcher: all that is packed shares one commit.
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
	end, err := s.cache.beginWith(ctx)
	if err != nil {
		return fill(err)
	}
	defer end()
	items := make([]segment.Item, 0, len(blobs))
	var at []int // the blob of each item
	for i, b := range blobs {
		if got := b.Digest.Function().Sum(b.Data); got != b.Digest {
			errs[i] = cas.Mismatch(b.Digest, got)
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
		case b.Digest.Size() >= s.cache.Pack:
			errs[i] = s.putFile(ctx, b.Digest, bytes.NewReader(b.Data))
		default:
			items = append(items, item(k, b.Data))
			at = append(at, i)
		}
		if err := ctx.Err(); err != nil {
			return fill(err)
		}
	}
	if len(items) == 0 {
		return errs
	}
	if err := s.cache.append(items); err != nil {
		for _, i := range at {
			errs[i] = err
		}
	}
	return errs
}

// item returns what is to be appended for the packed blob k.
func item(k index.Key, b []byte) segment.Item {
	return segment.Item{
		Record: segment.Record{Entry: index.Entry{Key: k, Length: uint32(len(b)), Stamp: seconds(time.Now()), Verified: true}},
		Data:   b,
	}
}

// append puts packed entries next to each other, in as few commits as segments are large enough for. If it fails, those
// of later commits are not put.
func (c *Cache) append(items []segment.Item) error {
	for len(items) > 0 {
		var n int64
		some := 0
		for some < len(items) && (some == 0 || n+packedCharge(int64(len(items[some].Data))) <= c.segments.Limit) {
			n += packedCharge(int64(len(items[some].Data)))
			some++
		}
		if err := c.appendOnce(items[:some], n); err != nil {
			return err
		}
		items = items[some:]
	}
	return nil
}

// appendOnce puts packed entries, which take n bytes, in one commit.
func (c *Cache) appendOnce(items []segment.Item, n int64) error {
	if err := c.reserve(n, 0); err != nil {
		return err
	}
	defer c.budget.give(n, 0)
	if err := c.fresh.Append(items, c.committed); err != nil {
		return c.writeError(err)
	}
	return nil
}

// committed makes what an item is about present.
func (c *Cache) committed(it *segment.Item) {
	if isRecord(it.Key) {
		if old, replaced := c.index.Put(it.Entry); replaced {
			c.uncount(&old)
			c.forget(&old)
		}
		c.count(&it.Entry)
	} else if c.index.Add(&it.Entry) {
		c.count(&it.Entry)
	} // else somebody else has put it meanwhile: this copy goes with its segment
}

// forget notes that a result or a mapping was replaced: it must not come back when the later one is evicted. If that cannot be
// written, Open does it.
func (c *Cache) forget(old *index.Entry) {
	if g := c.segments.Segment(old.Segment); g != nil {
		_ = g.Forget(old)
	}
}

// count counts an entry that the index holds from now on.
func (c *Cache) count(e *index.Entry) {
	c.budget.countEntry(e.Key, 1)
	c.weigh(e, 1)
}

// uncount undoes count.
func (c *Cache) uncount(e *index.Entry) {
	c.budget.countEntry(e.Key, -1)
	c.weigh(e, -1)
}

// weigh adds an entry to what is wanted of its segment, n times.
func (c *Cache) weigh(e *index.Entry, n int64) {
	g := c.segments.Segment(e.Segment)
	switch {
	case g == nil:
	case e.File:
		g.Files.Add(n)
	default:
		g.Live.Add(n * segment.Padded(int64(e.Length)))
	}
}

// Missing implements cas.Store. It asks the index, not the disk, but for the lists of what is kept as chunks.
func (s *Store) Missing(ctx context.Context, ds []cas.Digest) ([]cas.Digest, error) {
	end, err := s.cache.beginWith(ctx)
	if err != nil {
		return nil, err
	}
	defer end()
	missing := s.absent(ds)
	kept := missing[:0]
	for _, d := range missing {
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		if _, _, ok := s.mapped(d); !ok {
			kept = append(kept, d)
		}
	}
	return kept, nil
}

// absent returns those of ds that are not there by themselves, in order and each once, and leases the others anew.
func (s *Store) absent(ds []cas.Digest) []cas.Digest {
	var missing []cas.Digest
	var old []index.Key // whose stamps are to be written anew
	var oldAt []cas.Digest
	asked := map[index.Key]bool{} // of old: a client may name one many times, and not each is to be noted
	now := seconds(time.Now())
	instance, known := s.cache.instances.find(s.name)
	for _, d := range ds {
		if d.IsEmpty() {
			continue
		}
		var e index.Entry
		present := false
		if known {
			e, present = s.cache.index.Get(keyOf(instance, blob, d))
		}
		switch {
		case !present:
			missing = append(missing, d)
		case s.cache.stale(&e, now) && !asked[e.Key]:
			asked[e.Key] = true
			old, oldAt = append(old, e.Key), append(oldAt, d)
		}
	}
	if len(old) > 0 {
		missing = append(missing, lost(s.cache.touch(old, now), old, oldAt)...)
		if len(missing) > 0 {
			missing = inOrder(ds, missing)
		}
	}
	return unique(missing)
}

// lost returns the digests of those keys that are absent.
func lost(absent, keys []index.Key, ds []cas.Digest) []cas.Digest {
	if len(absent) == 0 {
		return nil
	}
	gone := make(map[index.Key]bool, len(absent))
	for _, k := range absent {
		gone[k] = true
	}
	var lost []cas.Digest
	for i, k := range keys {
		if gone[k] {
			lost = append(lost, ds[i])
		}
	}
	return lost
}

// inOrder returns missing in the order of ds.
func inOrder(ds, missing []cas.Digest) []cas.Digest {
	is := make(map[cas.Digest]bool, len(missing))
	for _, d := range missing {
		is[d] = true
	}
	missing = missing[:0]
	for _, d := range ds {
		if is[d] {
			missing = append(missing, d)
		}
	}
	return missing
}

// unique returns ds with each digest once.
func unique(ds []cas.Digest) []cas.Digest {
	if len(ds) < 2 {
		return ds
	}
	seen := make(map[cas.Digest]bool, len(ds))
	kept := ds[:0]
	for _, d := range ds {
		if !seen[d] {
			seen[d] = true
			kept = append(kept, d)
		}
	}
	return kept
}

func notFound(d cas.Digest) error { return fmt.Errorf("blob %s: %w", d, cas.ErrNotFound) }

func rangeError(d cas.Digest, off int64) error {
	return fmt.Errorf("blob %s: offset %d: %w", d, off, cas.ErrRange)
}

// vanished reports whether err says that a file is not there.
func vanished(err error) bool { return errors.Is(err, os.ErrNotExist) }
