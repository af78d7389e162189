// SPDX-License-Identifier: Apache-2.0

package tree

import (
	"context"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/cloister-build/cloister/cas/tree/internal/erofs"
)

// cached returns the path of the directory b in a cached image, which may still have to be made, and whether there is
// one.
func (w *imageStage) cached(ctx context.Context, b *boundInput) (string, bool, error) {
	if w.noCache || b.dir.files < minCachedFiles || w.mounts.budget <= 0 || w.cachedBinds == maxCachedBinds {
		return "", false, nil
	}
	if b.digest.IsZero() {
		return "", false, nil // it is merged
	}
	k := subtreeKey{w.in.Name, b.digest}
	for {
		p, do := w.mounts.lookup(k, b.dir, w.stage, w.mounts.budget-w.cacheBytes, w.uses)
		switch {
		case p == nil && do == cacheIt:
			if w.image == 0 {
				w.image = w.mounts.nextImage()
			}
			w.toCache = append(w.toCache, *b)
			w.cacheBytes += b.dir.packable()
			w.cachedBinds++
			return cachedPath(w.image, len(w.toCache)-1), true, nil
		case p == nil:
			b.whole = do == dontDescend
			return "", false, nil
		}
		sound, err := w.use(ctx, p)
		if err != nil {
			return "", false, err
		}
		if !sound {
			w.mounts.forget(p.image)
			continue
		}
		if slices.ContainsFunc(w.used, p.overlaps) {
			return "", false, nil
		}
		w.used = append(w.used, p)
		w.cachedBinds++
		for _, f := range p.storeFiles {
			if err := w.bindFile(ctx, b.target+f.path[len(p.source):], f.entry); err != nil {
				return "", false, err
			}
		}
		return "/" + p.source, true, nil
	}
}

// overlaps reports whether p and q have a directory in common. Overlayfs cannot show one directory in two places.
func (p *cachedSubtree) overlaps(q *cachedSubtree) bool {
	return p.image == q.image && (p.source == q.source || strings.HasPrefix(p.source, q.source+"/") ||
		strings.HasPrefix(q.source, p.source+"/"))
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

// mountNewCached mounts a new cached image of the subtrees in toCache.
func (w *imageStage) mountNewCached(ctx context.Context) error {
	if len(w.toCache) == 0 {
		return nil
	}
	c := &composer{} // not from the pool, since the cache keeps its slices
	if err := c.composeCached(ctx, w.image, w.toCache); err != nil {
		return err
	}
	now := time.Now()
	m, err := w.newImage(ctx, c, w.locate)
	if err != nil {
		return err
	}
	g := &cachedImage{mountedImage: m, made: now}
	subtrees := map[subtreeKey]*cachedSubtree{}
	for _, d := range c.dirs {
		if d.dir == nil || d.dir.files < minCachedFiles || len("/"+d.path) > erofs.MaxRedirect {
			continue
		}
		if k := (subtreeKey{w.in.Name, d.dir.digest}); subtrees[k] == nil {
			subtrees[k] = &cachedSubtree{g, d.path, c.digests[d.from:d.to], d.within(m.storeFiles), now}
		}
	}
	w.mounted[g], m.mount = m.mount, nil
	for _, evicted := range w.mounts.add(g, subtrees) {
		w.drop(evicted)
	}
	w.uses = append(w.uses, g)
	w.staged.release = append(w.staged.release, func() { w.releaseCached(g) })
	if m.location != nil {
		w.staged.locations = append(w.staged.locations, m.location)
	}
	for _, f := range m.storeFiles {
		i, rest, err := splitCached(f.path)
		if err == nil {
			err = w.bindFile(ctx, w.toCache[i].target+rest, f.entry)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// splitCached returns the number of the subtree that has the file at p in a cached image, and the rest of the path,
// which begins with a slash.
func splitCached(p string) (i int, rest string, err error) {
	fields := strings.SplitN(p, "/", 4) // cachedName, image, subtree, rest
	i, err = strconv.Atoi(fields[2])
	return i, "/" + fields[3], err
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
	if g.workspace != nil {
		if err := g.workspace.Close(); err != nil {
			s.config.Log.Warn("cannot free a root file system", "workspace", g.workspace.Name(), "err", err)
		}
	}
}
