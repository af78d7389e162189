// SPDX-License-Identifier: Apache-2.0

package tree

import (
	linked "container/list"
	"context"
	"os"
	"slices"
	"sync"
	"time"

	"github.com/cloister-build/cloister/cas"
)

// What stays mounted. A subtree that a second run has is written into an image of its own, with all others that the
// same run has for the second time. From then on it, and every directory below it, is bound from there.
const (
	// minHot is how many files make it worth it. A bind costs as much as twenty files in an image. What it saves is about
	// 5 us for each file that a run reads, since its pages are there already.
	minHot = 8
	// maxHotBinds is how many binds of one run are from such images: more cost more than they save.
	maxHotBinds = 128
	// maxHotImages is how many images stay mounted.
	maxHotImages = 128
	// maxHotAge is how long an image stays mounted. As long as it does, it keeps on the disk what the store has removed or
	// moved meanwhile, whole segments of it, and no budget counts that.
	maxHotAge = 15 * time.Minute
	// maxSeen is how many digests are remembered, twice, at about 100 bytes each.
	maxSeen = 1 << 16
	// markAfter is how old the last use may be that the store was told of. The store keeps what is mounted anyway: this
	// is for its order of eviction, and for clients who ask what it has.
	markAfter = 5 * time.Minute
)

// hot is what stays mounted, and what was seen once.
type hot struct {
	budget int64

	mu     sync.Mutex
	stages uint64               // guarded by mu; how many were begun
	parts  map[hotKey]*hotPart  // guarded by mu
	images linked.List          // guarded by mu; of *hotImage, the least recently used last
	bytes  int64                // guarded by mu; of images
	making map[hotKey]bool      // guarded by mu; what a Stage is about to keep mounted
	seen   [2]map[hotKey]uint64 // guarded by mu; by which Stage first: lately, and before that
}

// A hotKey names a subtree. What one instance has is nothing to another.
type hotKey struct {
	instance string
	digest   cas.Digest
}

// A hotImage is an image that stays. Each run has a mount of its own, so that no lock and no notice of one reaches
// another; those that a run has left without a trace serve others, one at a time, and what was read of them is there
// already.
type hotImage struct {
	*mounted // without a mount
	made     time.Time
	idle     []Mount         // guarded by hot.mu; each but the first counts as much as the image
	users    int             // guarded by hot.mu
	keys     []hotKey        // of its parts
	place    *linked.Element // guarded by hot.mu; nil once it is to be unmounted
}

// A hotPart is a subtree of one.
type hotPart struct {
	image   *hotImage
	source  string // where it is there
	digests []cas.Digest
	loose   []looseFile
	marked  time.Time // guarded by hot.mu; when the store was told of its use
}

func newHot(budget int64) hot {
	return hot{budget: budget, parts: map[hotKey]*hotPart{}, making: map[hotKey]bool{}, seen: [2]map[hotKey]uint64{{}, {}}}
}

// begin numbers a Stage, and returns the images that were mounted for too long and are to be unmounted.
func (h *hot) begin() (stage uint64, old []*hotImage) {
	now := time.Now()
	h.mu.Lock()
	defer h.mu.Unlock()
	for e := h.images.Front(); e != nil; {
		g := e.Value.(*hotImage)
		e = e.Next() // which e has no more once it is removed
		if now.Sub(g.made) >= maxHotAge && h.remove(g) {
			old = append(old, g)
		}
	}
	h.stages++
	return h.stages, old
}

// What to do with a subtree that is no part of what is mounted.
type advice int

const (
	pass advice = iota
	keep        // keep it mounted, since another Stage has seen it before, and call built
	wait        // somebody is doing so: leave alone what is below it, too
)

// find returns the part that is d, for the user of the images uses: one that is not among them has a user more. Where
// there is none, it notes that stage has seen d, and says what to do.
func (h *hot) find(k hotKey, d *directory, stage uint64, room int64, uses []*hotImage) (*hotPart, advice) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if p := h.parts[k]; p != nil {
		if !slices.Contains(uses, p.image) {
			p.image.users++
			h.images.MoveToFront(p.image.place)
		}
		return p, pass
	}
	first, known := h.seen[0][k]
	if !known {
		if first, known = h.seen[1][k]; !known {
			first = stage
		}
		if len(h.seen[0]) >= maxSeen {
			h.seen[0], h.seen[1] = map[hotKey]uint64{}, h.seen[0]
		}
		h.seen[0][k] = first
	}
	switch {
	case first == stage || d.packable() > room:
		return nil, pass
	case h.making[k]:
		return nil, wait
	}
	h.making[k] = true
	return nil, keep
}

// packable returns no less than the bytes of all files below d that an image points at: each is smaller than LargeFile.
func (d *directory) packable() int64 { return min(d.bytes, d.files*LargeFile) }

// built says that bs are kept mounted by now, or cannot be.
func (h *hot) built(instance string, bs []bound) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, b := range bs {
		delete(h.making, hotKey{instance, b.digest})
	}
}

// stale reports whether the store is to be told of the use of p.
func (h *hot) stale(p *hotPart) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	return time.Since(p.marked) >= markAfter
}

// mark notes that it was told.
func (h *hot) mark(p *hotPart, at time.Time) {
	h.mu.Lock()
	defer h.mu.Unlock()
	p.marked = at
}

// add adds an image with its parts, for one user, and returns the images that are to be unmounted for it.
func (h *hot) add(g *hotImage, parts map[hotKey]*hotPart) []*hotImage {
	h.mu.Lock()
	defer h.mu.Unlock()
	g.users = 1
	g.place = h.images.PushFront(g)
	h.bytes += g.bytes
	for k, p := range parts {
		if h.parts[k] == nil {
			h.parts[k] = p
			g.keys = append(g.keys, k)
		}
	}
	var idle []*hotImage
	for h.bytes > h.budget || h.images.Len() > maxHotImages {
		if last := h.images.Back().Value.(*hotImage); h.remove(last) {
			idle = append(idle, last)
		}
	}
	return idle
}

// remove has nobody find g any more, and reports whether nobody uses it, so that it can be unmounted. The caller holds
// mu.
func (h *hot) remove(g *hotImage) (idle bool) {
	if g.place == nil {
		return false
	}
	h.images.Remove(g.place)
	g.place = nil
	h.bytes -= g.bytes * int64(max(1, len(g.idle)))
	for _, k := range g.keys {
		delete(h.parts, k)
	}
	return g.users == 0
}

// forget removes g, which the caller uses.
func (h *hot) forget(g *hotImage) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.remove(g)
}

// take returns a mount of g that nobody uses, or nil.
func (h *hot) take(g *hotImage) Mount {
	h.mu.Lock()
	defer h.mu.Unlock()
	n := len(g.idle)
	if n == 0 {
		return nil
	}
	m := g.idle[n-1]
	g.idle = g.idle[:n-1]
	if g.place != nil && n > 1 {
		h.bytes -= g.bytes
	}
	return m
}

// letGo is called once by each user of g, with its mount if another run may have that. It reports whether the mount was
// kept for one, and whether g is to be unmounted.
func (h *hot) letGo(g *hotImage, m Mount) (kept, unmount bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	g.users--
	more := g.bytes * int64(min(1, len(g.idle)))
	if kept = m != nil && g.place != nil && h.bytes+more <= h.budget; kept {
		g.idle = append(g.idle, m)
		h.bytes += more
	}
	return kept, g.users == 0 && g.place == nil
}

// clear removes all images and returns those that are to be unmounted.
func (h *hot) clear() []*hotImage {
	h.mu.Lock()
	defer h.mu.Unlock()
	var idle []*hotImage
	for h.images.Len() > 0 {
		if g := h.images.Back().Value.(*hotImage); h.remove(g) {
			idle = append(idle, g)
		}
	}
	return idle
}

// bindHot binds b, if that is a subtree that stays mounted or will be.
func (w *imaging) bindHot(ctx context.Context, b *bound) (bool, error) {
	if b.kind != Directory || b.dir.files < minHot || w.hot.budget <= 0 || w.binds == maxHotBinds {
		return false, nil
	}
	k := hotKey{w.in.Name, b.digest}
	for {
		p, do := w.hot.find(k, b.dir, w.stage, w.hot.budget-w.bytes, w.uses)
		if do == keep {
			w.keep = append(w.keep, *b)
			w.bytes += b.dir.packable()
			w.binds++
		}
		if p == nil {
			b.whole = do == wait
			return do == keep, nil
		}
		sound, err := w.use(ctx, p)
		if err != nil {
			return false, err
		}
		if !sound {
			w.hot.forget(p.image)
			continue
		}
		w.binds++
		w.staged.Binds = append(w.staged.Binds, Bind{b.target, p.source, w.mounts[p.image].Name(), b.digest})
		for _, f := range p.loose {
			if err := w.bindFile(ctx, b.target+f.path[len(p.source):], f.entry); err != nil {
				return false, err
			}
		}
		return true, nil
	}
}

// use reports whether the bytes of p are still there, and tells the store of the use.
func (w *imaging) use(ctx context.Context, p *hotPart) (sound bool, err error) {
	if g := p.image; !slices.Contains(w.uses, g) {
		w.uses = append(w.uses, g)
		w.staged.release = append(w.staged.release, func() { w.letGo(g) })
		var devices []*os.File
		if g.placement != nil {
			if !g.placement.Valid() {
				return false, nil
			}
			w.staged.placements = append(w.staged.placements, g.placement)
			devices = g.placement.Files()
		}
		m := w.hot.take(g)
		if m == nil {
			if m, err = w.c.Mounter.Mount(ctx, g.file.File, devices); err != nil {
				return false, err
			}
		}
		w.mounts[g] = m
	}
	if !w.hot.stale(p) {
		return true, nil
	}
	now := time.Now()
	missing, err := w.in.Store.Missing(ctx, p.digests)
	if err != nil || len(missing) > 0 {
		return false, err
	}
	w.hot.mark(p, now)
	return true, nil
}

// mountHot mounts what is to stay mounted from now on, and binds it.
func (w *imaging) mountHot(ctx context.Context) error {
	if len(w.keep) == 0 {
		return nil
	}
	c := &composer{} // whose slices stay
	if err := c.compose(ctx, w.keep, nil); err != nil {
		return err
	}
	now := time.Now()
	m, err := w.image(ctx, c)
	if err != nil {
		return err
	}
	g := &hotImage{mounted: m, made: now}
	parts := map[hotKey]*hotPart{}
	for _, d := range c.dirs[1:] {
		k := hotKey{w.in.Name, d.dir.digest}
		if d.dir.files < minHot || parts[k] != nil {
			continue
		}
		parts[k] = &hotPart{g, d.path, c.digests[d.from:d.to], d.within(m.loose), now}
	}
	w.mounts[g], m.mount = m.mount, nil
	for _, idle := range w.hot.add(g, parts) {
		w.drop(idle)
	}
	w.uses = append(w.uses, g)
	w.staged.release = append(w.staged.release, func() { w.letGo(g) })
	return w.bind(ctx, m, w.mounts[g], c.names, w.keep)
}

// letGo lets go of g and of the run's mount of it, if it came to have one.
func (w *imaging) letGo(g *hotImage) {
	m := w.mounts[g]
	spare := m
	if !w.staged.gone {
		spare = nil
	}
	kept, unmount := w.hot.letGo(g, spare)
	if m != nil && !kept {
		w.close(m)
	}
	if unmount {
		w.drop(g)
	}
}

// drop unmounts an image that nobody uses or finds any more.
func (s *Stager) drop(g *hotImage) {
	for _, m := range g.idle {
		s.close(m)
	}
	s.unmount(g.mounted)
}
