// SPDX-License-Identifier: Apache-2.0

package disk

import (
	"context"
	"os"
	"sync"

	"github.com/cloister-build/cloister/cas/disk/internal/fault"
	"github.com/cloister-build/cloister/cas/disk/internal/index"
	"github.com/cloister-build/cloister/cas/disk/internal/segment"
)

// A file in DIR/files without a record belongs to a Put that the end of the process interrupted, or its record was lost
// with a part of a log. If its content matches its name, it becomes a blob again; otherwise it is removed. Open does
// this for files with a total of adoptAtOpen bytes, and a goroutine for the rest. Store.Open does not wait for that
// goroutine: it adopts the file that it needs.

// adoptAtOpen is the maximum number of bytes that Open reads to adopt files. Tests replace it.
var adoptAtOpen = int64(64 << 20)

// orphans are the files that are not adopted yet. They count against the budget, and their blobs are absent.
type orphans struct {
	mu   sync.Mutex
	keys map[index.Key]bool // guarded by mu
}

func (o *orphans) add(k index.Key) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.keys == nil {
		o.keys = map[index.Key]bool{}
	}
	o.keys[k] = true
}

func (o *orphans) remove(k index.Key) {
	o.mu.Lock()
	defer o.mu.Unlock()
	delete(o.keys, k)
}

func (o *orphans) has(k index.Key) bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.keys[k]
}

// adoptAll adopts the files with these keys, up to a total size in bytes, and returns the others.
func (c *Cache) adoptAll(ctx context.Context, keys []index.Key, limit int64) (rest []index.Key) {
	adopted, n := 0, int64(0)
	for i, k := range keys {
		if n += k.Size; n > limit && i > 0 || ctx.Err() != nil {
			rest = keys[i:]
			break
		}
		if c.adopt(ctx, k) {
			adopted++
		}
	}
	if adopted > 0 {
		c.config.Log.Info("large blobs without a record are present again", "blobs", adopted, "to verify", len(rest))
	}
	return rest
}

// adoptRest adopts the files with these keys until Close.
func (c *Cache) adoptRest(keys []index.Key) {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	go func() {
		select {
		case <-c.stop:
			cancel()
		case <-ctx.Done():
		}
	}()
	for len(keys) > 0 && ctx.Err() == nil {
		keys = c.adoptAll(ctx, keys, adoptAtOpen)
	}
}

// adopt makes the file of k a blob if its content matches, and removes it otherwise. If this process cannot read it
// now, the file stays, and the next Open tries again.
func (c *Cache) adopt(ctx context.Context, k index.Key) bool {
	path, err := c.pathBelow("files", k)
	if err != nil {
		return false
	}
	it := segment.Item{Failures: c.segments.Trusted()}
	err = readWhole(ctx, path, k)
	if ctx.Err() != nil || fault.Ours(err) {
		return false
	}
	mu := &c.files[k.Hash[0]]
	mu.Lock()
	defer mu.Unlock()
	if !c.orphans.has(k) {
		return false // a concurrent call has adopted it
	}
	fi, statErr := os.Lstat(path)
	_, present := c.index.Get(k)
	switch {
	case present || vanished(statErr): // put, and maybe evicted again, meanwhile
		c.dropOrphan(k)
		return false
	case fault.Ours(statErr):
		return false
	case err != nil || statErr != nil:
		c.dropOrphan(k)
		c.discard(path)
		return false
	}
	// The Put was its last known use.
	stamp := min(c.now(), seconds(changedAt(fi)))
	it.Entry = index.Entry{Key: k, Stamp: stamp, File: true, Verified: true}
	if err := c.fresh.Append([]segment.Item{it}, c.committed); err != nil {
		return false
	}
	c.orphans.remove(k) // the blob has its charge
	return true
}

// dropOrphan ends the charge of an orphan.
func (c *Cache) dropOrphan(k index.Key) {
	c.orphans.remove(k)
	c.budget.count(-charge(k.Size), -1)
}

// orphan counts the file at path, which has no entry, for adoption. It removes a file of the wrong size at once. If this
// process could not inspect the file, fi is nil.
func (r *recovery) orphan(path string, k index.Key, fi os.FileInfo) {
	if fi != nil && fi.Size() != k.Size {
		r.cache.discard(path)
		return
	}
	r.cache.orphans.add(k)
	r.cache.budget.count(charge(k.Size), 1)
	r.orphans = append(r.orphans, k)
}

// discard removes the file at path. It reports one that cannot be removed; the next Open tries again.
func (c *Cache) discard(path string) {
	if err := os.Remove(path); err != nil && !vanished(err) {
		c.config.Log.Warn("a file in the store has no use and cannot be removed; remove it", "err", err)
	}
}
