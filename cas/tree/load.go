// SPDX-License-Identifier: Apache-2.0

package tree

import (
	"cmp"
	"context"
	"errors"
	"slices"
	"sync/atomic"
	"time"

	"github.com/cloister-build/cloister/cas"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
)

// errNoStore is the error of a call without a store.
var errNoStore = errors.New("tree: the store is nil")

// Load is Cache.Load without a Cache: it reads each distinct Directory once and renews the leases of all files.
func Load(ctx context.Context, store cas.Store, root cas.Digest) (*Input, error) {
	return NewCache(0, 0).Load(ctx, &cas.Instance{Store: store}, root)
}

// Load returns the input root whose root Directory is root. Every file in it was in the store of in when its lease was
// last renewed.
//
// It fails with a *MissingError that lists every blob known to be absent, and with cas.ErrCorrupt for a damaged
// Directory. Both leave renewed leases on everything that is present and reachable. It fails with cas.ErrInvalid, which
// names the Directory and the entry, for a blob that is not a Directory, for a Directory that is not canonical, and for
// a tree that is too deep or too large when expanded.
func (c *Cache) Load(ctx context.Context, in *cas.Instance, root cas.Digest) (*Input, error) {
	if in == nil || in.Store == nil {
		return nil, errNoStore
	}
	if err := cas.CheckDigests(root); err != nil {
		return nil, err
	}
	l := &loader{
		cache: c, in: in, began: time.Now(),
		dirs: map[cas.Digest]*directory{}, listed: map[cas.Digest]bool{},
	}
	defer l.release()
	top := l.visit(root)
	for len(l.level) > 0 {
		if err := l.read(ctx); err != nil {
			return nil, err
		}
		level := l.level
		l.level, l.stale = nil, append(l.stale, level...)
		for _, d := range level {
			if ctx.Err() != nil {
				return nil, context.Cause(ctx)
			}
			if err := l.expand(top, d); err != nil {
				return nil, err
			}
		}
	}
	if err := top.measure(0); err != nil {
		return nil, err
	}
	if len(l.renew) > 0 {
		missing, err := in.Store.Missing(ctx, l.renew)
		if err != nil {
			return nil, err
		}
		l.absent = append(l.absent, missing...)
	}
	if l.damage != nil {
		return nil, l.damage
	}
	if len(l.absent) > 0 {
		return nil, &MissingError{Blobs: l.absent}
	}
	return &Input{root: l.keep(top)}, nil
}

// A loader is one call of Load. It reads the tree breadth first.
type loader struct {
	cache    *Cache
	in       *cas.Instance
	began    time.Time // before any lease was renewed
	retained []*item   // found in the cache

	dirs    map[cas.Digest]*directory // all visited
	level   []*directory              // to be read next: new, or with a lease to be renewed
	stale   []*directory              // the earlier levels
	entries atomic.Int64              // of new directories: a bound on what is decoded at any time
	listed  map[cas.Digest]bool       // the digests in renew
	renew   []cas.Digest              // blobs with a lease to be renewed
	absent  []cas.Digest              // absent Directories
	damage  error                     // of the first damaged Directory
}

// visit returns the directory whose digest is d, and adds it to the level unless the cache knows that everything below
// it is present.
func (l *loader) visit(d cas.Digest) *directory {
	if dir := l.dirs[d]; dir != nil {
		return dir
	}
	dir, fresh := l.cached(d)
	if dir == nil {
		dir = &directory{digest: d}
	}
	if !fresh {
		l.level = append(l.level, dir)
	}
	l.dirs[d] = dir
	return dir
}

// cached returns the directory from the cache, which retains it until the end of Load, or nil.
func (l *loader) cached(d cas.Digest) (dir *directory, fresh bool) {
	l.cache.mu.Lock()
	defer l.cache.mu.Unlock()
	it := l.item(d)
	if it == nil {
		return nil, false
	}
	l.cache.retain(it)
	l.retained = append(l.retained, it)
	return it.dir, l.cache.isFresh(it)
}

// item returns the cached item of a directory, or nil. The caller holds the cache's mu.
func (l *loader) item(d cas.Digest) *item { return l.cache.items[key{l.in.Name, d, ""}] }

// read reads and decodes the new directories of the level. An absent or damaged one stays without entries.
func (l *loader) read(ctx context.Context) error {
	var unknown []*directory
	var small []cas.Digest // without those that are too large to be read
	for _, d := range l.level {
		if d.measured {
			continue
		}
		unknown = append(unknown, d)
		if d.digest.Size() <= cas.MaxMessage {
			small = append(small, d.digest)
		}
	}
	if err := cas.Fetch(ctx, l.in.Store, small); err != nil {
		return err
	}
	lost := make([]error, len(unknown))
	err := each(ctx, len(unknown), func(ctx context.Context, i int) error {
		d := unknown[i]
		var m repb.Directory
		err := cas.ReadProto(ctx, l.in.Store, d.digest, &m)
		if errors.Is(err, cas.ErrNotFound) || errors.Is(err, cas.ErrCorrupt) {
			lost[i] = err
			return nil
		}
		if err != nil {
			return err
		}
		if err := d.decode(&m); err != nil {
			return err
		}
		if l.entries.Add(int64(len(d.entries))) > maxEntries {
			return d.tooLarge(maxEntries, "entries")
		}
		return nil
	})
	for i, d := range unknown {
		switch {
		case errors.Is(lost[i], cas.ErrNotFound):
			l.absent = append(l.absent, d.digest)
		case lost[i] != nil && l.damage == nil:
			l.damage = lost[i]
		}
	}
	return err
}

// expand lists the blobs of d with a lease to be renewed and visits its subdirectories.
func (l *loader) expand(top, d *directory) error {
	if d.measured {
		l.list(d.digest) // reading has renewed the others
	}
	for i := range d.entries {
		switch e := &d.entries[i]; e.kind {
		case File:
			l.list(e.digest)
		case Directory:
			if l.dirs[e.digest] == nil && len(l.dirs) == maxDirectories {
				return top.tooLarge(maxDirectories, "distinct directories")
			}
			if below := l.visit(e.digest); e.dir == nil { // a cached entry may be read by others meanwhile
				e.dir = below
			}
		}
	}
	return nil
}

func (l *loader) list(d cas.Digest) {
	if !l.listed[d] {
		l.listed[d] = true
		l.renew = append(l.renew, d)
	}
}

// keep caches the new directories and records the renewed leases; all blobs are present. It returns the cached value of
// top, since a concurrent Load of the same tree must not cache it twice.
func (l *loader) keep(top *directory) *directory {
	// Children come before their parents.
	slices.SortFunc(l.stale, func(a, b *directory) int { return cmp.Compare(a.height, b.height) })
	c := l.cache
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, d := range l.stale {
		it := l.item(d.digest)
		isNew := it == nil
		if isNew {
			it = c.add(key{l.in.Name, d.digest, ""}, d.memory())
			it.dir = d
		}
		renewed := l.began
		for i := range d.entries {
			e := &d.entries[i]
			if e.kind != Directory {
				continue
			}
			below := l.item(e.digest)
			if below.renewed.Before(renewed) {
				renewed = below.renewed
			}
			if isNew {
				e.dir = below.dir
				c.retain(below)
			}
		}
		if renewed.After(it.renewed) {
			it.renewed = renewed
		}
	}
	return l.item(top.digest).dir
}

// release releases the retained items.
func (l *loader) release() {
	c := l.cache
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, it := range slices.Backward(l.retained) { // the root becomes the most recently used
		c.release(it)
	}
	c.evict()
}
