// SPDX-License-Identifier: Apache-2.0

package tree

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/tree/internal/erofs"
)

var errFewInputs = errors.New("copying so few inputs is cheaper")

// An imageStage is one call of Stage that uses images.
type imageStage struct {
	*Stager
	in      *cas.Instance
	locator cas.Locator
	filer   cas.Filer // nil if the store is not one
	stage   uint64    // the number of this Stage
	staged  *Staged

	own         []boundInput // the inputs in the image of this run alone
	toCache     []boundInput // the inputs in a new image that stays mounted
	cacheBytes  int64        // of the files in toCache
	cachedBinds int          // binds from cached images
	uses        []*cachedImage
	mounted     map[*cachedImage]Mount // this run's mounts of the images in uses
	// copies are the files whose mode or time differs from those of the store's file: in/0, in/1 and so on.
	copies []boundInput
}

// A boundInput is an input in the root of an image.
type boundInput struct {
	*entry
	target string // relative to the exec root
	whole  bool   // nothing below it is bound from another image
}

// mount mounts the images for l and lists the binds, outer ones before inner ones.
func (w *imageStage) mount(ctx context.Context, l *Layout) error {
	defer func() { w.mounts.finishBuild(w.in.Name, w.toCache) }()
	own := composers.Get().(*composer)
	defer own.recycle()
	for i := range l.dirs {
		for _, e := range l.dirs[i].entries {
			if e.source == "" {
				continue
			}
			b := boundInput{entry: e.entry, target: join(l.dirs[i].path, e.name)}
			if cached, err := w.bindCached(ctx, &b); err != nil {
				return err
			} else if !cached {
				w.own = append(w.own, b)
			}
		}
	}
	err := own.compose(ctx, w.own, func(b *boundInput) (bool, error) { return w.bindCached(ctx, b) })
	if err != nil {
		return err
	}
	if n := len(own.tree.Entries); n > 0 && n <= w.config.CopyUpTo && len(w.staged.Binds)+len(w.toCache) == 0 {
		return errFewInputs
	}
	inner := w.staged.Binds
	w.staged.Binds = nil
	if len(w.own) > 0 {
		m, err := w.image(ctx, own)
		if err != nil {
			return err
		}
		w.staged.release = append(w.staged.release, func() { w.unmount(m) })
		if err := w.bind(ctx, m, m.mount, own.names, w.own); err != nil {
			return err
		}
	}
	w.staged.Binds = append(w.staged.Binds, inner...)
	return w.mountNewCached(ctx)
}

// bind binds the inputs bs, which are in the root of the image m as names, from a mount of it.
func (w *imageStage) bind(ctx context.Context, m *mountedImage, from Mount, names []string, bs []boundInput) error {
	if m.location != nil {
		w.staged.locations = append(w.staged.locations, m.location)
	}
	inRoot := make([]bool, len(bs)) // the inputs that are store files themselves
	for _, f := range m.storeFiles {
		if f.dir == 0 {
			inRoot[f.top] = true
		}
	}
	for i, b := range bs {
		if !inRoot[i] {
			w.staged.Binds = append(w.staged.Binds, Bind{b.target, names[i], from.Name(), b.digest})
		}
	}
	for _, f := range m.storeFiles {
		if err := w.bindFile(ctx, bs[f.top].target+f.path[len(names[f.top]):], f.entry); err != nil {
			return err
		}
	}
	return nil
}

// bindFile binds a file from the store, or from a copy if it needs one.
func (w *imageStage) bindFile(ctx context.Context, target string, e *entry) error {
	if e.needsCopy() {
		w.staged.Binds = append(w.staged.Binds, Bind{target, fmt.Sprintf("in/%d", len(w.copies)), "", e.digest})
		w.copies = append(w.copies, boundInput{entry: e, target: target})
		return nil
	}
	source, release, err := w.filer.File(ctx, e.digest, e.exec)
	if err != nil {
		return fmt.Errorf("%s: %w", target, notFound(e.digest, err))
	}
	w.staged.release = append(w.staged.release, release)
	w.staged.Binds = append(w.staged.Binds, Bind{target, source, "", e.digest})
	return nil
}

// A mountedImage is a mounted image and the resources it needs.
type mountedImage struct {
	mount      Mount // nil if it has several
	file       *imageFile
	location   cas.Location // nil without files
	storeFiles []storeFile
	bytes      int64 // of the image and the files in segments
}

// A storeFile is a file that is bound from the store over a placeholder in an image.
type storeFile struct {
	composedFile
	nth  int    // of all files of the image
	path string // relative to its root
}

// image writes and mounts the composed image.
func (w *imageStage) image(ctx context.Context, c *composer) (_ *mountedImage, err error) {
	m := &mountedImage{}
	defer func() {
		if err != nil {
			w.unmount(m)
		}
	}()
	var devices []*os.File
	if len(c.digests) > 0 {
		if err := cas.Fetch(ctx, w.in.Store, c.digests); err != nil {
			return nil, err
		}
		if m.location, err = w.locator.Locate(ctx, c.digests); err != nil {
			return nil, err
		}
		if m.storeFiles, m.bytes, err = c.locate(m.location, w.filer != nil); err != nil {
			return nil, err
		}
		devices = m.location.Files()
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
	m.mount, err = w.config.Mounter.Mount(ctx, m.file.File, devices)
	return m, err
}

// size returns the size of the workspace: the writable directories and the copies.
func (w *imageStage) size(l *Layout) (bytes, files int64) {
	r := newSizeEstimate(false)
	bytes, files = r.layout(l, true)
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
	return finish(ws, "in", modeParent, epoch)
}
