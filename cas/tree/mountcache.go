// SPDX-License-Identifier: Apache-2.0

package tree

import (
	"cmp"
	linked "container/list"
	"slices"
	"sync"
	"time"

	"github.com/cloister-build/cloister/cas"
)

// The mount cache keeps images mounted. A subtree that a second run uses is written to a cached image, together with
// all others that this run uses for the second time. The images of later runs have redirects to the subtree, or to
// directories below it.
const (
	// minCachedFiles is the smallest number of files in a cached subtree. It was chosen when each one was a bind mount,
	// which cost as much as twenty files in an image, and saved about 5 us for each file read, since pages are cached.
	minCachedFiles = 8
	// maxCachedBinds limits the cached subtrees of one run: more cost more than they save.
	maxCachedBinds = 128
	// maxCachedImages limits the number of cached images.
	maxCachedImages = 128
	// maxCachedAge limits the time an image stays mounted. Meanwhile it keeps whole segments on the disk that the store
	// has removed or moved; see Stager.ReleaseRemoved.
	maxCachedAge = 15 * time.Minute
	// seenBytes estimates the memory of a digest in seen.
	seenBytes = 128
	// renewAfter is the age from which the lease of a cached subtree is renewed. The store keeps what is mounted
	// anyway: the lease matters for its order of eviction, and for clients that query it.
	renewAfter = 5 * time.Minute
)

// A mountCache holds the cached images, and the subtrees that were seen once.
type mountCache struct {
	budget  int64
	maxSeen int // digests in each of the two generations of seen

	expire func() // called when an image may have reached maxCachedAge

	mu       sync.Mutex
	timer    *time.Timer                   // guarded by mu; of expire; nil without images
	stages   uint64                        // guarded by mu; number of calls of Stage
	numbers  uint64                        // guarded by mu; number of cached images so far
	subtrees map[subtreeKey]*cachedSubtree // guarded by mu
	images   linked.List                   // guarded by mu; of *cachedImage, least recently used last
	bytes    int64                         // guarded by mu; of images
	building map[subtreeKey]bool           // guarded by mu; to be cached by a running Stage
	roots    map[rootKey]*cachedImage      // guarded by mu
	staging  map[rootKey]chan struct{}     // guarded by mu; closed when a running StageRoot has ended
	// seen has the first Stage that used a subtree, in the current and the previous generation.
	seen [2]map[subtreeKey]uint64 // guarded by mu
}

// A subtreeKey names a subtree of an instance. Instances share nothing.
type subtreeKey struct {
	instance string
	digest   cas.Digest
}

// A cachedImage is an image of cached subtrees. Each run has its own mount of it, so that file locks and notifications
// do not cross runs. The mount of a run that left nothing behind is reused, with the pages it has read.
type cachedImage struct {
	*mountedImage // without a mount
	made          time.Time
	idle          []Mount      // guarded by mountCache.mu; each but the first counts as much as the image
	users         int          // guarded by mountCache.mu
	keys          []subtreeKey // of its subtrees
	// root is set for a root file system instead of subtrees. All runs share its mount or, if it is a copy, its workspace.
	root      *rootKey
	workspace Workspace
	binds     []Bind
	reason    string          // why it is a copy
	element   *linked.Element // guarded by mountCache.mu; nil once it is to be unmounted
}

// A cachedSubtree is a subtree in a cachedImage.
type cachedSubtree struct {
	image      *cachedImage
	source     string // its path in the image
	digests    []cas.Digest
	storeFiles []storeFile
	renewed    time.Time // guarded by mountCache.mu; when its leases in the store were renewed
}

// DefaultSeenBytes is the default of StagerConfig.SeenBytes: enough for 131,072 subtrees.
const DefaultSeenBytes = 16 << 20

func newMountCache(c *StagerConfig) mountCache {
	return mountCache{
		budget:   c.Budget,
		maxSeen:  max(1, int(cmp.Or(c.SeenBytes, DefaultSeenBytes)/seenBytes/2)),
		subtrees: map[subtreeKey]*cachedSubtree{},
		building: map[subtreeKey]bool{},
		roots:    map[rootKey]*cachedImage{},
		staging:  map[rootKey]chan struct{}{},
		seen:     [2]map[subtreeKey]uint64{{}, {}},
	}
}

// nextStage numbers a Stage.
func (c *mountCache) nextStage() uint64 {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.stages++
	return c.stages
}

// nextImage numbers a cached image, from 1.
func (c *mountCache) nextImage() uint64 {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.numbers++
	return c.numbers
}

// removeExpired removes the expired images and returns the unused ones, which the caller unmounts. It schedules expire
// for the time when the next image expires.
func (c *mountCache) removeExpired() (unused []*cachedImage) {
	now := time.Now()
	next := maxCachedAge
	c.mu.Lock()
	defer c.mu.Unlock()
	for e := c.images.Front(); e != nil; {
		g := e.Value.(*cachedImage)
		e = e.Next() // before e is removed
		if age := now.Sub(g.made); age < maxCachedAge {
			next = min(next, maxCachedAge-age)
		} else if c.remove(g) {
			unused = append(unused, g)
		}
	}
	switch {
	case c.timer == nil: // stopped by clear
	case c.images.Len() == 0:
		c.timer = nil
	default:
		c.timer.Reset(next)
	}
	return unused
}

// removeOutdated removes the least recently used image that refers to removed files of the store, or returns nil.
// unused reports whether the caller unmounts it.
func (c *mountCache) removeOutdated() (g *cachedImage, unused bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for e := c.images.Back(); e != nil; e = e.Prev() {
		if g := e.Value.(*cachedImage); g.location != nil && g.location.Removed() {
			return g, c.remove(g)
		}
	}
	return nil, false
}

// seenMemory returns the estimated memory of seen in bytes.
func (c *mountCache) seenMemory() int64 {
	c.mu.Lock()
	defer c.mu.Unlock()
	return int64(len(c.seen[0])+len(c.seen[1])) * seenBytes
}

// An advice tells a Stage how to treat a subtree that is not cached.
type advice int

const (
	dontCache   advice = iota
	cacheIt            // another Stage has used it: cache it, then call finishBuild
	dontDescend        // another Stage is caching it: cache nothing below it either
)

// lookup returns the cached subtree k, for a Stage that already uses the images in uses: another image gains a user.
// Without one, it records that stage has used the directory d, and returns advice. free is the unused budget.
func (c *mountCache) lookup(k subtreeKey, d *directory, stage uint64, free int64, uses []*cachedImage,
) (*cachedSubtree, advice) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if p := c.subtrees[k]; p != nil {
		if !slices.Contains(uses, p.image) {
			p.image.users++
			c.images.MoveToFront(p.image.element)
		}
		return p, dontCache
	}
	first, known := c.seen[0][k]
	if !known {
		if first, known = c.seen[1][k]; !known {
			first = stage
		}
		if len(c.seen[0]) >= c.maxSeen {
			c.seen[0], c.seen[1] = map[subtreeKey]uint64{}, c.seen[0]
		}
		c.seen[0][k] = first
	}
	switch {
	case first == stage || d.packable() > free:
		return nil, dontCache
	case c.building[k]:
		return nil, dontDescend
	}
	c.building[k] = true
	return nil, cacheIt
}

// packable returns an upper bound of the bytes below d that an image points at: each such file is below LargeFile.
func (d *directory) packable() int64 { return min(d.bytes, d.files*LargeFile) }

// finishBuild ends the attempt to cache bs.
func (c *mountCache) finishBuild(instance string, bs []boundInput) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, b := range bs {
		delete(c.building, subtreeKey{instance, b.digest})
	}
}

// needsRenewal reports whether the leases of p are to be renewed.
func (c *mountCache) needsRenewal(p *cachedSubtree) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return time.Since(p.renewed) >= renewAfter
}

// setRenewed records that the leases of p were renewed.
func (c *mountCache) setRenewed(p *cachedSubtree, at time.Time) {
	c.mu.Lock()
	defer c.mu.Unlock()
	p.renewed = at
}

// add adds an image with its subtrees and one user, and returns the evicted images, which the caller unmounts.
func (c *mountCache) add(g *cachedImage, subtrees map[subtreeKey]*cachedSubtree) (evicted []*cachedImage) {
	c.mu.Lock()
	defer c.mu.Unlock()
	g.users = 1
	g.element = c.images.PushFront(g)
	c.bytes += g.bytes
	if c.timer == nil {
		c.timer = time.AfterFunc(maxCachedAge, c.expire)
	}
	for k, p := range subtrees {
		if c.subtrees[k] == nil {
			c.subtrees[k] = p
			g.keys = append(g.keys, k)
		}
	}
	for c.bytes > c.budget || c.images.Len() > maxCachedImages {
		if last := c.images.Back().Value.(*cachedImage); c.remove(last) {
			evicted = append(evicted, last)
		}
	}
	return evicted
}

// remove unindexes g, and reports whether it has no users, so that it can be unmounted. The caller holds mu.
func (c *mountCache) remove(g *cachedImage) (unused bool) {
	if g.element == nil {
		return false
	}
	c.images.Remove(g.element)
	g.element = nil
	c.bytes -= g.bytes * int64(max(1, len(g.idle)))
	for _, k := range g.keys {
		delete(c.subtrees, k)
	}
	if g.root != nil {
		delete(c.roots, *g.root)
	}
	return g.users == 0
}

// forget removes g, which the caller uses.
func (c *mountCache) forget(g *cachedImage) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.remove(g)
}

// takeIdle returns an idle mount of g, or nil.
func (c *mountCache) takeIdle(g *cachedImage) Mount {
	c.mu.Lock()
	defer c.mu.Unlock()
	n := len(g.idle)
	if n == 0 {
		return nil
	}
	m := g.idle[n-1]
	g.idle = g.idle[:n-1]
	if g.element != nil && n > 1 {
		c.bytes -= g.bytes
	}
	return m
}

// release ends one use of g. m is the user's mount if it can be reused, otherwise nil. It reports whether m was kept,
// and whether the caller unmounts g.
func (c *mountCache) release(g *cachedImage, m Mount) (kept, unmount bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	g.users--
	more := g.bytes * int64(min(1, len(g.idle)))
	if kept = m != nil && g.element != nil && c.bytes+more <= c.budget; kept {
		g.idle = append(g.idle, m)
		c.bytes += more
	}
	return kept, g.users == 0 && g.element == nil
}

// clear removes all images and returns the unused ones, which the caller unmounts.
func (c *mountCache) clear() (unused []*cachedImage) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.timer != nil {
		c.timer.Stop()
		c.timer = nil
	}
	for c.images.Len() > 0 {
		if g := c.images.Back().Value.(*cachedImage); c.remove(g) {
			unused = append(unused, g)
		}
	}
	return unused
}
