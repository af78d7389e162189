// SPDX-License-Identifier: Apache-2.0

package tree

import (
	linked "container/list"
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/cloister-build/cloister/cas"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
)

// A Cache holds decoded Directories and other messages of the API, so that what many input roots share is read, decoded
// and queried once. It holds only messages that were read from a store and verified against their digest. Each instance
// has its own entries, by its name: an instance must not learn which blobs another one has. Its methods are safe for
// concurrent use; create one with NewCache.
//
// Reading a blob renews its lease in the store. The Cache renews it again when it is used and the last renewal is older
// than a limit. In between, the Cache does not notice that a store has lost a blob. A caller that does, when it stages
// the tree, calls Invalidate.
type Cache struct {
	max    int64
	maxAge time.Duration

	mu    sync.Mutex
	items map[key]*item // guarded by mu
	// idle are the items without references, least recently used last. A Directory references those below it, so that
	// an eviction frees what was counted for the evicted item.
	idle        linked.List          // guarded by mu; of *item
	bytes       int64                // guarded by mu; of items
	invalidated map[string]time.Time // guarded by mu; by instance, the time before which renewals do not count
}

// A key names an item of a Cache: the same bytes may be messages of many types.
type key struct {
	instance string
	digest   cas.Digest
	message  protoreflect.FullName // "" for a directory, which is decoded further
}

// An item is one entry of a Cache.
type item struct {
	key     key
	dir     *directory    // of a Directory, complete
	message proto.Message // of anything else
	bytes   int64
	renewed time.Time // when its lease and those of everything below it were renewed
	refs    int
	element *linked.Element // in idle, while refs is 0
}

// Estimates of the memory of an item in bytes, without its names and targets, on a 64-bit machine.
const (
	itemBytes       = 512 // with its part of the map
	entryBytes      = 160 // an entry with a hash
	propertiesBytes = 48
)

// NewCache returns an empty Cache that uses about bytes of memory, not counting items in use. It renews a lease in the
// store that is older than maxAge, which must be well below the store's lease time.
func NewCache(bytes int64, maxAge time.Duration) *Cache {
	return &Cache{max: bytes, maxAge: maxAge, items: map[key]*item{}, invalidated: map[string]time.Time{}}
}

// Bytes returns the estimated memory in use.
func (c *Cache) Bytes() int64 {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.bytes
}

// Invalidate makes the Cache query the store again for every item of an instance when it is next used. Callers use it
// when the store has lost a blob that it had.
func (c *Cache) Invalidate(instance string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.invalidated[instance] = time.Now()
}

// Read returns the blob d as a message, like cas.ReadProto. It decodes into m if the Cache does not hold it. The
// message may be shared and must not be changed.
func Read[M proto.Message](ctx context.Context, c *Cache, in *cas.Instance, d cas.Digest, m M) (M, error) {
	k := key{in.Name, d, m.ProtoReflect().Descriptor().FullName()}
	c.mu.Lock()
	if it := c.items[k]; it != nil && c.isFresh(it) {
		c.idle.MoveToFront(it.element) // messages have no references, so it is idle
		c.mu.Unlock()
		return it.message.(M), nil
	}
	c.mu.Unlock()
	began := time.Now()
	cost, err := cas.ReadSized(ctx, in.Store, d, m)
	if err != nil {
		return m, err
	}
	return insert(c, k, m, cost, began), nil
}

// Add decodes the blob b, whose digest is d, into m and caches it for Read. A process must just have read b from the
// store of in, which renewed its lease. It fails as Read does.
func Add[M proto.Message](c *Cache, in *cas.Instance, d cas.Digest, b []byte, m M) error {
	if err := (cas.Blob{Digest: d, Data: b}).Check(); err != nil {
		return fmt.Errorf("%w: %d bytes do not match blob %s", cas.ErrInvalid, len(b), d)
	}
	cost, err := cas.DecodeSized(b, d, m)
	if err != nil {
		return err
	}
	insert(c, key{in.Name, d, m.ProtoReflect().Descriptor().FullName()}, m, cost, time.Now())
	return nil
}

// insert caches m, unless the Cache holds it already, and returns the cached message.
func insert[M proto.Message](c *Cache, k key, m M, cost int64, renewed time.Time) M {
	c.mu.Lock()
	defer c.mu.Unlock()
	it := c.items[k]
	if it == nil {
		it = c.add(k, itemBytes+cost)
		it.message = m
	}
	it.renewed = renewed
	c.evict()
	return it.message.(M)
}

// isFresh reports whether it can be used without a query to the store. The caller holds mu.
func (c *Cache) isFresh(it *item) bool {
	return time.Since(it.renewed) < c.maxAge && it.renewed.After(c.invalidated[it.key.instance])
}

// add adds an item without references. The caller holds mu.
func (c *Cache) add(k key, bytes int64) *item {
	it := &item{key: k, bytes: bytes}
	it.element = c.idle.PushFront(it)
	c.items[k] = it
	c.bytes += bytes
	return it
}

// retain adds a reference to it, which prevents its eviction. The caller holds mu.
func (c *Cache) retain(it *item) {
	if it.refs++; it.element != nil {
		c.idle.Remove(it.element)
		it.element = nil
	}
}

// release removes a reference. The caller holds mu.
func (c *Cache) release(it *item) {
	if it.refs--; it.refs == 0 {
		it.element = c.idle.PushFront(it)
	}
}

// evict drops the least recently used items until the rest fits. The caller holds mu.
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
			if c.release(below); below.element != nil {
				c.idle.MoveToBack(below.element) // it was only used through the evicted item
			}
		}
	}
}

// memory returns the estimated memory of d, without the directories below it.
func (d *directory) memory() int64 {
	n := int64(itemBytes)
	for i := range d.entries {
		n += entryBytes + int64(len(d.entries[i].name)+len(d.entries[i].target))
		if d.entries[i].props != nil {
			n += propertiesBytes
		}
	}
	return n
}
