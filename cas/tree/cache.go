// SPDX-License-Identifier: Apache-2.0

package tree

import (
	"cmp"
	linked "container/list"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/cloister-build/cloister/cas"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
)

// A Cache holds decoded Directories and other messages of the API, so that what many input roots have in
// common is read, decoded and asked for once. It knows what was read from a store and compared with its
// digest, and nothing else, and each instance, by its name, has its own: that a blob is in one says nothing to
// the clients of another. Its methods are safe for concurrent use; make it with NewCache.
//
// What it holds is marked in the store when it is read, and again when it is met and the last mark is older
// than a bound. In between, a blob that the store has lost all the same is not noticed here: whoever stages
// the tree notices, and says so by Doubt.
type Cache struct {
	max   int64
	fresh time.Duration

	mu    sync.Mutex
	items map[key]*item // guarded by mu
	// idle are the items that nothing holds, the least recently used last. A Directory holds those below it,
	// so that what is evicted frees what is counted for it.
	idle   linked.List          // guarded by mu; of *item
	bytes  int64                // guarded by mu; of items
	doubts map[string]time.Time // guarded by mu; by instance, from when on a mark counts
}

// A key names what is in a Cache: the same bytes may be messages of many types.
type key struct {
	instance string
	digest   cas.Digest
	message  protoreflect.FullName // "" of a directory, which is decoded further
}

// An item is one thing in a Cache.
type item struct {
	key     key
	dir     *directory    // of a Directory, complete
	message proto.Message // of anything else
	bytes   int64
	marked  time.Time // since when it is marked as used, and all below it
	holders int
	place   *linked.Element // in idle, while there is no holder
}

// What is taken as the memory of an item, in bytes, beside its names and targets: on a 64-bit machine, with
// its share of the map.
const (
	itemBytes  = 512
	entryBytes = 160 // an entry with a hash
	ownBytes   = 48  // properties
)

// NewCache returns an empty Cache that takes about bytes of memory, besides what its users hold. What it
// holds is asked for again in the store when its last mark is older than fresh, which must lie well within
// the time for which the store keeps what was used.
func NewCache(bytes int64, fresh time.Duration) *Cache {
	return &Cache{max: bytes, fresh: fresh, items: map[key]*item{}, doubts: map[string]time.Time{}}
}

// Bytes returns how much memory is taken, as estimated.
func (c *Cache) Bytes() int64 {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.bytes
}

// Invalidate has all that is held of an instance asked for again when it is met next: its store has lost a blob
// that it had.
func (c *Cache) Invalidate(instance string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.doubts[instance] = time.Now()
}

// Read returns the blob d as a message, as cas.ReadProto does, into m if the Cache has none. The message
// may be shared and must not be changed.
func Read[M proto.Message](ctx context.Context, c *Cache, in *cas.Instance, d cas.Digest, m M) (M, error) {
	k := key{in.Name, d, m.ProtoReflect().Descriptor().FullName()}
	c.mu.Lock()
	if it := c.items[k]; it != nil && c.isFresh(it) {
		c.idle.MoveToFront(it.place) // which it has: nothing holds a message
		c.mu.Unlock()
		return it.message.(M), nil
	}
	c.mu.Unlock()
	began := time.Now()
	cost, err := cas.ReadSized(ctx, in.Store, d, m)
	if err != nil {
		return m, err
	}
	return remember(c, k, m, cost, began), nil
}

// Add has Read return the blob b, which is of d and of the type of m, without a question to the store of in: for whoever
// got it from somebody who has just read it there. It decodes into m, and fails as Read does.
func Add[M proto.Message](c *Cache, in *cas.Instance, d cas.Digest, b []byte, m M) error {
	if d.Function().Sum(b) != d {
		return fmt.Errorf("%w: these %d bytes are not blob %s", cas.ErrInvalid, len(b), d)
	}
	cost, err := cas.DecodeSized(b, d, m)
	if err != nil {
		return err
	}
	remember(c, key{in.Name, d, m.ProtoReflect().Descriptor().FullName()}, m, cost, time.Now())
	return nil
}

// remember has the Cache hold m, or what it holds in its place already, which is returned, as marked.
func remember[M proto.Message](c *Cache, k key, m M, cost int64, marked time.Time) M {
	c.mu.Lock()
	defer c.mu.Unlock()
	it := c.items[k]
	if it == nil {
		it = c.add(k, itemBytes+cost)
		it.message = m
	}
	it.marked = marked
	c.evict()
	return it.message.(M)
}

// isFresh reports whether it need not be asked for. The caller holds mu.
func (c *Cache) isFresh(it *item) bool {
	return time.Since(it.marked) < c.fresh && it.marked.After(c.doubts[it.key.instance])
}

// add adds an item that nothing holds. The caller holds mu.
func (c *Cache) add(k key, bytes int64) *item {
	it := &item{key: k, bytes: bytes}
	it.place = c.idle.PushFront(it)
	c.items[k] = it
	c.bytes += bytes
	return it
}

// hold keeps it from being evicted until letGo is called as often. The caller holds mu.
func (c *Cache) hold(it *item) {
	if it.holders++; it.place != nil {
		c.idle.Remove(it.place)
		it.place = nil
	}
}

// letGo undoes hold. The caller holds mu.
func (c *Cache) letGo(it *item) {
	if it.holders--; it.holders == 0 {
		it.place = c.idle.PushFront(it)
	}
}

// evict drops what was used least recently, until the rest is small enough. The caller holds mu.
func (c *Cache) evict() {
	for c.bytes > c.max && c.idle.Len() > 0 {
		it := c.idle.Remove(c.idle.Back()).(*item)
		delete(c.items, it.key)
		c.bytes -= it.bytes
		if it.dir == nil {
			continue
		}
		for _, e := range it.dir.entries {
			if e.kind != Directory {
				continue
			}
			below := c.items[key{it.key.instance, e.digest, ""}]
			if c.letGo(below); below.place != nil {
				c.idle.MoveToBack(below.place) // it was used through what is gone
			}
		}
	}
}

// Load returns the input root of the Directory root and all below it, and has checked that every file they
// name was in the store of in when it was marked last.
//
// It fails with a *MissingError that lists every absent blob that can be known to be missing, with
// cas.ErrCorrupt for a damaged Directory, and in both cases has marked all that is there and can be found. Or it
// fails with cas.ErrInvalid, saying which Directory is wrong and where: a blob that is no Directory, one that is
// not canonical, or a tree that is too deep or too large when written out.
func (c *Cache) Load(ctx context.Context, in *cas.Instance, root cas.Digest) (*Input, error) {
	l := &loading{cache: c, in: in, began: time.Now(), dirs: map[cas.Digest]*directory{}, listed: map[cas.Digest]bool{}}
	defer l.end()
	top := l.meet(root)
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
			if err := l.list(top, d); err != nil {
				return nil, err
			}
		}
	}
	if err := top.measure(0); err != nil {
		return nil, err
	}
	if len(l.ask) > 0 {
		missing, err := in.Store.Missing(ctx, l.ask)
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

// A loading is one call of Load.
type loading struct {
	cache *Cache
	in    *cas.Instance
	began time.Time // before anything was marked
	held  []*item   // found in the cache

	dirs    map[cas.Digest]*directory // all met
	level   []*directory              // of them those to be looked at next
	stale   []*directory              // and those that were: new, or to be marked again
	entries atomic.Int64              // of the new ones: a bound on what is decoded at any time
	listed  map[cas.Digest]bool       // what is in ask
	ask     []cas.Digest              // to be marked
	absent  []cas.Digest              // Directories
	damage  error                     // of the first Directory that is damaged
}

// meet returns the directory called d, and leaves it to be looked at unless all below it is known to be there.
func (l *loading) meet(d cas.Digest) *directory {
	if dir := l.dirs[d]; dir != nil {
		return dir
	}
	dir, fresh := l.find(d)
	if dir == nil {
		dir = &directory{digest: d}
	}
	if !fresh {
		l.level = append(l.level, dir)
	}
	l.dirs[d] = dir
	return dir
}

// find returns what the cache has, which it holds until the end, or nil.
func (l *loading) find(d cas.Digest) (dir *directory, fresh bool) {
	l.cache.mu.Lock()
	defer l.cache.mu.Unlock()
	it := l.item(d)
	if it == nil {
		return nil, false
	}
	l.cache.hold(it)
	l.held = append(l.held, it)
	return it.dir, l.cache.isFresh(it)
}

// item returns what the cache has, or nil. The caller holds its mu.
func (l *loading) item(d cas.Digest) *item { return l.cache.items[key{l.in.Name, d, ""}] }

// read reads and decodes those of the level that are new. One that is absent or damaged stays without entries.
func (l *loading) read(ctx context.Context) error {
	var unknown []*directory
	for _, d := range l.level {
		if !d.measured {
			unknown = append(unknown, d)
		}
	}
	if err := fetch(ctx, l.in.Store, unknown); err != nil {
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

// list lists what is to be marked of d, and meets the directories in it.
func (l *loading) list(top, d *directory) error {
	if d.measured {
		l.mark(d.digest) // reading has marked the others
	}
	for i := range d.entries {
		switch e := &d.entries[i]; e.kind {
		case File:
			l.mark(e.digest)
		case Directory:
			if l.dirs[e.digest] == nil && len(l.dirs) == maxDirectories {
				return top.tooLarge(maxDirectories, "distinct directories")
			}
			if below := l.meet(e.digest); e.dir == nil { // else others may be reading it
				e.dir = below
			}
		}
	}
	return nil
}

func (l *loading) mark(d cas.Digest) {
	if !l.listed[d] {
		l.listed[d] = true
		l.ask = append(l.ask, d)
	}
}

// keep puts what is new into the cache and notes what was marked, all of which is present. It returns top as
// the cache has it: who loads the same at the same time must not keep it twice.
func (l *loading) keep(top *directory) *directory {
	// What lies below comes first.
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
		marked := l.began
		for i := range d.entries {
			e := &d.entries[i]
			if e.kind != Directory {
				continue
			}
			below := l.item(e.digest)
			if below.marked.Before(marked) {
				marked = below.marked
			}
			if isNew {
				e.dir = below.dir
				c.hold(below)
			}
		}
		if marked.After(it.marked) {
			it.marked = marked
		}
	}
	return l.item(top.digest).dir
}

// end lets go of what was found.
func (l *loading) end() {
	c := l.cache
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, it := range slices.Backward(l.held) { // so that the root is the most recently used
		c.letGo(it)
	}
	c.evict()
}

// memory returns what d is taken to cost, without what lies below it.
func (d *directory) memory() int64 {
	n := int64(itemBytes)
	for i := range d.entries {
		n += entryBytes + int64(len(d.entries[i].name)+len(d.entries[i].target))
		if d.entries[i].own != nil {
			n += ownBytes
		}
	}
	return n
}
