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
	"slices"
	"sync"
	"time"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/disk/internal/fault"
	"github.com/cloister-build/cloister/cas/disk/internal/index"
	"github.com/cloister-build/cloister/cas/durable"
)

// pins counts for each blob how many callers of File use its file.
type pins struct {
	mu sync.Mutex
	n  map[index.Key]int // guarded by mu
}

func (p *pins) add(k index.Key) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.n == nil {
		p.n = map[index.Key]int{}
	}
	p.n[k]++
}

func (p *pins) remove(k index.Key) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.n[k]--; p.n[k] == 0 {
		delete(p.n, k)
	}
}

func (p *pins) has(k index.Key) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.n[k] > 0
}

// A copyKey identifies a copy.
type copyKey struct {
	key        index.Key
	executable bool
}

// copies are the files that File makes of blobs that are packed, spliced or executable. They can be recreated at any
// time.
type copies struct {
	making [256]sync.Mutex // by the first byte of a hash: held while a copy is made

	mu sync.Mutex
	m  map[copyKey]*cachedCopy // guarded by mu
}

// A cachedCopy is one copy. All fields are guarded by copies.mu.
type cachedCopy struct {
	path   string
	charge int64
	pins   int
	used   time.Time
	lost   bool // a failed flush may have lost it
}

// pin returns the copy of k and protects it from removal until unpin, or returns nil.
func (cs *copies) pin(k copyKey) *cachedCopy {
	cs.mu.Lock()
	defer cs.mu.Unlock()
	f := cs.m[k]
	if f == nil || f.lost {
		return nil
	}
	f.pins++
	f.used = time.Now()
	return f
}

// lose makes pin return none of the present copies.
func (cs *copies) lose() {
	cs.mu.Lock()
	defer cs.mu.Unlock()
	for _, f := range cs.m {
		f.lost = true
	}
}

func (cs *copies) unpin(f *cachedCopy) {
	cs.mu.Lock()
	defer cs.mu.Unlock()
	f.pins--
}

// add adds the copy f of k. It returns the charge of a copy that it replaces.
func (cs *copies) add(k copyKey, f *cachedCopy) (freed int64) {
	cs.mu.Lock()
	defer cs.mu.Unlock()
	if cs.m == nil {
		cs.m = map[copyKey]*cachedCopy{}
	}
	if old := cs.m[k]; old != nil {
		freed = old.charge // lost, or another process has removed the file
	}
	cs.m[k] = f
	return freed
}

// File implements cas.Filer. For a packed, spliced or executable blob it makes a verified copy, which counts against
// the budget. Otherwise it returns the file of the blob, and reads it first to verify it if an earlier process wrote
// it. A damaged blob is cas.ErrNotFound.
func (s *Store) File(ctx context.Context, d cas.Digest, executable bool) (path string, release func(), err error) {
	if err := cas.CheckDigests(d); err != nil {
		return "", nil, err
	}
	end, err := s.cache.beginWith(ctx)
	if err != nil {
		return "", nil, err
	}
	defer end()
	if d.IsEmpty() {
		// One copy for all instances, so that an unused instance costs nothing.
		return s.copy(ctx, copyKey{keyOf(0, blob, d), executable}, d, func(*draft) error { return nil })
	}
	e, ok := s.use(blob, d)
	switch {
	case !ok:
		return s.splicedFile(ctx, d, executable)
	case e.File && executable:
		return s.copy(ctx, copyKey{e.Key, true}, d, func(f *draft) error { return s.copyFile(ctx, f, e, d) })
	case e.File:
		return s.pinFile(ctx, e, d)
	}
	return s.copy(ctx, copyKey{e.Key, executable}, d, func(f *draft) error {
		b, err := s.cache.read(e)
		if err == nil && d.Function().Sum(b) != d {
			err = s.cache.damaged(e, b)
		}
		if err != nil {
			return err
		}
		_, err = io.Copy(f, bytes.NewReader(b))
		return err
	})
}

// pinFile returns the file of a blob that is not packed.
func (s *Store) pinFile(ctx context.Context, e index.Entry, d cas.Digest) (path string, release func(), err error) {
	c := s.cache
	c.pins.add(e.Key)
	release = sync.OnceFunc(func() { c.pins.remove(e.Key) })
	defer func() {
		if err != nil {
			release()
			release = nil
		}
	}()
	// The blob may have been evicted before it was pinned.
	if _, ok := c.index.Get(e.Key); !ok {
		return "", release, notFound(d)
	}
	if path, err = c.pathBelow("files", e.Key); err != nil {
		return "", release, err
	}
	fi, err := os.Lstat(path)
	switch {
	case err == nil && !fi.Mode().IsRegular():
		err = c.unreadable(e, durable.ErrNotRegular)
	case err == nil && fi.Mode()&0o400 == 0:
		err = c.unreadable(e, os.ErrPermission) // this process may be root, but the action is not
	case err == nil && fi.Size() != d.Size():
		err = c.damaged(e, nil)
	case fault.Unreadable(err):
		err = c.unreadable(e, err)
	case vanished(err):
		c.dropMissing(e)
	case err == nil:
		if fi.Mode().Perm() != fileMode {
			_ = os.Chmod(path, fileMode) // of an earlier version; if this fails, actions see that mode
		}
		err = c.verifyFile(ctx, e, path)
	}
	switch {
	case vanished(err), errors.Is(err, cas.ErrCorrupt):
		return "", release, notFound(d)
	case err != nil:
		return "", release, fmt.Errorf("blob %s: %w", d, err)
	}
	return path, release, nil
}

// copyFile fills f with the content of the file e and verifies it, even if it was verified before.
func (s *Store) copyFile(ctx context.Context, f *draft, e index.Entry, d cas.Digest) error {
	path, err := s.cache.pathBelow("files", e.Key)
	if err != nil {
		return err
	}
	src, err := durable.OpenFile(path, readFlags, 0)
	switch {
	case vanished(err):
		s.cache.dropMissing(e)
		return err
	case fault.Unreadable(err):
		return s.cache.unreadable(e, err)
	case err != nil:
		return err
	}
	defer src.Close()
	r := failingReader{Reader: src}
	err = s.cache.fill(ctx, f, d, &r)
	switch {
	case errors.Is(err, cas.ErrMismatch):
		return s.cache.damaged(e, nil)
	case fault.Unreadable(r.err):
		return s.cache.unreadable(e, r.err)
	case err == nil:
		s.cache.setVerified(e)
	}
	return err
}

// A failingReader remembers its last error, to distinguish it from errors of a writer.
type failingReader struct {
	io.Reader
	err error
}

func (r *failingReader) Read(p []byte) (n int, err error) {
	n, r.err = r.Reader.Read(p)
	return n, r.err
}

// copy returns the copy k. If there is none, it calls write to fill one.
func (s *Store) copy(
	ctx context.Context, k copyKey, d cas.Digest, write func(*draft) error,
) (path string, release func(), err error) {
	c := s.cache
	mu := &c.copies.making[k.key.Hash[0]]
	mu.Lock()
	defer mu.Unlock()
	f := c.copies.pin(k)
	if f != nil {
		if fi, err := os.Lstat(f.path); err != nil || !fi.Mode().IsRegular() || fi.Size() != d.Size() {
			c.copies.unpin(f)
			c.removeCopy(k, f)
			f = nil
		}
	}
	if f == nil {
		if err := ctx.Err(); err != nil {
			return "", nil, err
		}
		f, err = c.makeCopy(k, write)
		if isDropped(err) || vanished(err) {
			return "", nil, notFound(d)
		} else if err != nil {
			return "", nil, fmt.Errorf("blob %s: %w", d, err)
		}
	}
	return f.path, sync.OnceFunc(func() { c.copies.unpin(f) }), nil
}

// makeCopy makes and pins the copy k.
func (c *Cache) makeCopy(k copyKey, write func(*draft) error) (*cachedCopy, error) {
	path := filepath.Join(c.dir, "copies", "empty")
	if k.key.Size > 0 {
		var err error
		if path, err = c.pathBelow("copies", k.key); err != nil {
			return nil, err
		}
	}
	mode := os.FileMode(0o644)
	if k.executable {
		path, mode = path+".x", 0o755
	}
	d, err := c.draft(k.key.Size)
	if err != nil {
		return nil, err
	}
	defer d.discard()
	if err := write(d); err != nil {
		return nil, err
	}
	if err := d.finish(mode); err != nil {
		return nil, err
	}
	if err := d.rename(path); err != nil {
		_ = os.Remove(path) // otherwise the next copy replaces it, or Open removes it
		return nil, err
	}
	f := &cachedCopy{path: path, charge: charge(k.key.Size), pins: 1, used: time.Now()}
	c.budget.count(f.charge, 1)
	if freed := c.copies.add(k, f); freed > 0 {
		c.budget.count(-freed, -1)
	}
	return f, nil
}

// removeCopy removes the copy f of k unless it is pinned, and reports whether it did.
func (c *Cache) removeCopy(k copyKey, f *cachedCopy) bool {
	c.copies.mu.Lock()
	defer c.copies.mu.Unlock()
	if f.pins > 0 || c.copies.m[k] != f {
		return false
	}
	if err := os.Remove(f.path); err != nil && !vanished(err) {
		return false
	}
	delete(c.copies.m, k)
	c.budget.count(-f.charge, -1)
	return true
}

// An idleCopy is a copy that is not pinned.
type idleCopy struct {
	key  copyKey
	f    *cachedCopy
	used time.Time
}

// idle returns the copies that are not pinned, least recently used first, and the charge of the others.
func (cs *copies) idle() (idle []idleCopy, pinned int64) {
	cs.mu.Lock()
	defer cs.mu.Unlock()
	for k, f := range cs.m {
		if f.pins > 0 {
			pinned += f.charge
		} else {
			idle = append(idle, idleCopy{k, f, f.used})
		}
	}
	slices.SortFunc(idle, func(a, b idleCopy) int { return a.used.Compare(b.used) })
	return idle, pinned
}
