// SPDX-License-Identifier: Apache-2.0

package tree

import (
	"context"
	"os"
	"slices"
	"time"
)

// bindCached binds b if it is a cached subtree, or plans to cache it. It reports whether it did either.
func (w *imageStage) bindCached(ctx context.Context, b *boundInput) (bool, error) {
	if b.kind != Directory || b.dir.files < minCachedFiles || w.mounts.budget <= 0 || w.cachedBinds == maxCachedBinds {
		return false, nil
	}
	k := subtreeKey{w.in.Name, b.digest}
	for {
		p, do := w.mounts.lookup(k, b.dir, w.stage, w.mounts.budget-w.cacheBytes, w.uses)
		if do == cacheIt {
			w.toCache = append(w.toCache, *b)
			w.cacheBytes += b.dir.packable()
			w.cachedBinds++
		}
		if p == nil {
			b.whole = do == dontDescend
			return do == cacheIt, nil
		}
		sound, err := w.use(ctx, p)
		if err != nil {
			return false, err
		}
		if !sound {
			w.mounts.forget(p.image)
			continue
		}
		w.cachedBinds++
		w.staged.Binds = append(w.staged.Binds, Bind{b.target, p.source, w.mounted[p.image].Name(), b.digest})
		for _, f := range p.storeFiles {
			if err := w.bindFile(ctx, b.target+f.path[len(p.source):], f.entry); err != nil {
				return false, err
			}
		}
		return true, nil
	}
}

// use gives the run a mount of the image of p, renews the leases of p, and reports whether its bytes are still there.
func (w *imageStage) use(ctx context.Context, p *cachedSubtree) (sound bool, err error) {
	if g := p.image; !slices.Contains(w.uses, g) {
		w.uses = append(w.uses, g)
		w.staged.release = append(w.staged.release, func() { w.releaseCached(g) })
		var devices []*os.File
		if g.location != nil {
			if !g.location.Valid() {
				return false, nil
			}
			w.staged.locations = append(w.staged.locations, g.location)
			devices = g.location.Files()
		}
		m := w.mounts.takeIdle(g)
		if m == nil {
			if m, err = w.config.Mounter.Mount(ctx, g.file.File, devices); err != nil {
				return false, err
			}
		}
		w.mounted[g] = m
	}
	if !w.mounts.needsRenewal(p) {
		return true, nil
	}
	now := time.Now()
	missing, err := w.in.Store.Missing(ctx, p.digests)
	if err != nil || len(missing) > 0 {
		return false, err
	}
	w.mounts.setRenewed(p, now)
	return true, nil
}

// mountNewCached mounts and binds a new cached image of the inputs in toCache.
func (w *imageStage) mountNewCached(ctx context.Context) error {
	if len(w.toCache) == 0 {
		return nil
	}
	c := &composer{} // not from the pool, since the cache keeps its slices
	if err := c.compose(ctx, w.toCache, nil); err != nil {
		return err
	}
	now := time.Now()
	m, err := w.image(ctx, c)
	if err != nil {
		return err
	}
	g := &cachedImage{mountedImage: m, made: now}
	subtrees := map[subtreeKey]*cachedSubtree{}
	for _, d := range c.dirs[1:] {
		k := subtreeKey{w.in.Name, d.dir.digest}
		if d.dir.files < minCachedFiles || subtrees[k] != nil {
			continue
		}
		subtrees[k] = &cachedSubtree{g, d.path, c.digests[d.from:d.to], d.within(m.storeFiles), now}
	}
	w.mounted[g], m.mount = m.mount, nil
	for _, evicted := range w.mounts.add(g, subtrees) {
		w.drop(evicted)
	}
	w.uses = append(w.uses, g)
	w.staged.release = append(w.staged.release, func() { w.releaseCached(g) })
	return w.bind(ctx, m, w.mounted[g], c.names, w.toCache)
}

// releaseCached releases g and the run's mount of it, if it has one.
func (w *imageStage) releaseCached(g *cachedImage) {
	m := w.mounted[g]
	reusable := m
	if !w.staged.reusable {
		reusable = nil
	}
	kept, unmount := w.mounts.release(g, reusable)
	if m != nil && !kept {
		w.close(m)
	}
	if unmount {
		w.drop(g)
	}
}

// drop unmounts an unused image that was removed from the cache.
func (s *Stager) drop(g *cachedImage) {
	for _, m := range g.idle {
		s.close(m)
	}
	s.unmount(g.mountedImage)
}
