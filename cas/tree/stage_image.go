// SPDX-License-Identifier: Apache-2.0

package tree

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/tree/internal/erofs"
)

var (
	errFewInputs  = errors.New("copying so few inputs is cheaper")
	errCachedName = fmt.Errorf("the input root has the reserved name %s", cachedName)
)

// An imageStage is one call of Stage that uses images.
type imageStage struct {
	*Stager
	in      *cas.Instance
	locator cas.Locator
	filer   cas.Filer // nil if the store is not one
	stage   uint64    // the number of this Stage
	staged  *Staged

	noCache     bool         // use no cached image
	toCache     []boundInput // the subtrees in a new image that stays mounted
	image       uint64       // the number of that image
	cacheBytes  int64        // of the files in toCache
	cachedBinds int          // subtrees in cached images
	uses        []*cachedImage
	used        []*cachedSubtree
	mounted     map[*cachedImage]Mount // this run's mounts of the images in uses
	// copies are the files whose mode or time differs from those of the store's file: in/0, in/1 and so on.
	copies []boundInput
}

// A boundInput is an input that an image has.
type boundInput struct {
	*entry
	target string // relative to the exec root
	whole  bool   // nothing below it is in another image
}

// mount mounts the images for l and lists the layers and binds.
func (w *imageStage) mount(ctx context.Context, l *Layout) error {
	defer func() { w.mounts.finishBuild(w.in.Name, w.toCache) }()
	own := composers.Get().(*composer)
	defer own.recycle()
	_, taken := l.dirs[0].declared(cachedName)
	w.noCache = taken
	if err := own.compose(ctx, l, func(b *boundInput) (string, bool, error) { return w.cached(ctx, b) }); err != nil {
		return err
	}
	cached := len(w.used)+len(w.toCache) > 0
	switch n := len(own.tree.Entries) + 1 - l.planned(); {
	case cached:
	case n <= 0:
		return nil // only outputs, or what lies in them
	case n <= w.config.CopyUpTo:
		return errFewInputs
	}
	if cached && !own.hideCached(l) {
		return errCachedName
	}
	m, err := w.newImage(ctx, own, w.locate)
	if err != nil {
		return err
	}
	w.staged.release = append(w.staged.release, func() { w.unmount(m) })
	w.staged.Lower = append(w.staged.Lower, Lower{".", m.mount.Name()})
	for _, f := range m.storeFiles {
		if err := w.bindFile(ctx, f.path, f.entry); err != nil {
			return err
		}
	}
	if m.location != nil {
		w.staged.locations = append(w.staged.locations, m.location)
	}
	if err := w.mountNewCached(ctx); err != nil {
		return err
	}
	for _, g := range w.uses {
		if m := w.mounted[g]; m != nil {
			w.staged.Lower = append(w.staged.Lower, Lower{".", m.Name()})
		}
	}
	if !cached {
		return nil
	}
	// Overlayfs lists the names of the lowest layer first. This is the own image again, so that the order does not depend
	// on what is in the cache.
	again, err := w.config.Mounter.Mount(ctx, m.file.File, m.devices())
	if err != nil {
		return err
	}
	w.staged.release = append(w.staged.release, func() { w.close(again) })
	w.staged.Lower = append(w.staged.Lower, Lower{".", again.Name()})
	return nil
}

// planned returns the number of planned directories that an image has.
func (l *Layout) planned() int {
	n := 0
	for i := range l.dirs {
		if !l.dirs[i].inOutput {
			n++
		}
	}
	return n
}

// bindFile binds a file from the store, or from a copy if it needs one.
func (w *imageStage) bindFile(ctx context.Context, target string, e *entry) error {
	if e.needsCopy() {
		w.staged.Binds = append(w.staged.Binds, Bind{target, fmt.Sprintf("in/%d", len(w.copies)), e.digest})
		w.copies = append(w.copies, boundInput{entry: e, target: target})
		return nil
	}
	source, release, err := w.filer.File(ctx, e.digest, e.exec)
	if err != nil {
		return fmt.Errorf("%s: %w", target, notFound(e.digest, err))
	}
	w.staged.release = append(w.staged.release, release)
	w.staged.Binds = append(w.staged.Binds, Bind{target, source, e.digest})
	return nil
}

// A mountedImage is a mounted image and the resources it needs.
type mountedImage struct {
	mount      Mount // nil if it has several
	file       *imageFile
	location   cas.Location // nil without files
	storeFiles []storeFile
	bytes      int64 // of the image and the files in segments

	// A root file system has these, so that none of its files needs a bind mount.
	files   []*os.File // of the store, as further devices; closed once they are mounted
	release []func()   // of these files
	tails   *imageFile // the last device: the ends of these files
}

// A storeFile is a file that is bound from the store over a placeholder in an image.
type storeFile struct {
	composedFile
	nth  int    // of all files of the image
	path string // relative to its root
}

// locate points the files of an image of inputs at their extents, and lists those to be bound.
func (w *imageStage) locate(_ context.Context, c *composer, m *mountedImage) (err error) {
	m.storeFiles, m.bytes, err = c.locate(m.location, w.filer != nil, LargeFile)
	return err
}

// newImage writes and mounts the composed image. The function locate points the files at m.location.
func (w *imageStage) newImage(ctx context.Context, c *composer, locate func(context.Context, *composer, *mountedImage) error,
) (_ *mountedImage, err error) {
	m := &mountedImage{}
	defer func() {
		for _, f := range m.files {
			f.Close()
		}
		m.files = nil
		if err != nil {
			w.unmount(m)
		}
	}()
	if len(c.digests) > 0 {
		if err := cas.Fetch(ctx, w.in.Store, c.digests); err != nil {
			return nil, err
		}
		if m.location, err = w.locator.Locate(ctx, c.digests); err != nil {
			return nil, err
		}
		if err = locate(ctx, c, m); err != nil {
			return nil, err
		}
	}
	if c.image, err = erofs.Encode(c.image, &c.tree); err != nil {
		return nil, err
	}
	m.bytes += int64(len(c.image))
	if m.file, err = w.files.get(); err != nil {
		return nil, err
	}
	if err = m.file.write(c.image); err != nil {
		return nil, err
	}
	m.mount, err = w.config.Mounter.Mount(ctx, m.file.File, m.devices())
	return m, err
}

// devices returns the files of the store that the image points at.
func (m *mountedImage) devices() []*os.File {
	if m.location == nil {
		return nil
	}
	files := slices.Concat(m.location.Files(), m.files)
	if m.tails != nil {
		files = append(files, m.tails.File)
	}
	return files
}

// size returns the size of the workspace: the planned directories, private inputs and the copies.
func (w *imageStage) size(l *Layout) (bytes, files int64) {
	r := newSizeEstimate(false)
	bytes, files = r.layout(l, true)
	if len(w.staged.Lower) == 0 {
		files -= overlayFiles
	}
	if len(w.copies) > 0 {
		files++ // in/
	}
	for _, c := range w.copies {
		bytes, files = addSaturating(bytes, r.entry(c.entry, true)), files+1
	}
	return bytes, files
}

// copy writes the copies to ws.
func (w *imageStage) copy(ctx context.Context, ws *os.Root) error {
	if len(w.copies) == 0 {
		return nil
	}
	if err := ws.Mkdir("in", 0o700); err != nil {
		return err
	}
	dir, err := ws.OpenRoot("in")
	if err != nil {
		return err
	}
	defer dir.Close()
	var files []stageFile
	for i, c := range w.copies {
		files = append(files, c.file(dir, strconv.Itoa(i), c.target, false))
	}
	if err := (&stager{store: w.in.Store}).write(ctx, files); err != nil {
		return full(err)
	}
	return finish(ws, "in", 0o755, epoch)
}
