// SPDX-License-Identifier: Apache-2.0

package tree

import (
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/tree/internal/erofs"
)

// A Workspace is an empty private file system that may outlive a run. The Stager closes it.
type Workspace interface {
	Root() *os.Root
	Name() string
	Close() error
}

// A Root is a root file system that is ready to be mounted read-only. All runs share it.
type Root struct {
	// Image is the name of the Mount or Workspace that has it, and Source its directory there.
	Image, Source string
	// Binds are the files that the store provides, relative to the root.
	Binds      []Bind
	Form       Form
	CopyReason string // why Form is FormCopy

	location cas.Location // nil without files
	release  func()
}

// Valid is Staged.Valid for a root file system.
func (r *Root) Valid() bool { return r.location == nil || r.location.Valid() }

// Release ends the use of r. It may be called once.
func (r *Root) Release() { r.release() }

// A rootKey names a root file system of an instance. Instances share nothing.
type rootKey struct {
	instance string
	digest   cas.Digest
	points   string // the mount points
}

// StageRoot stages root, whose blobs are in the instance in, as a root file system. It adds mount points: the
// directories points and an empty file etc/hosts, as paths relative to the root. The result stays staged for later runs
// within the budget of the images of input trees, of which each root counts at most half. Concurrent calls share the
// work. The caller releases the result when the run has ended.
//
// Every file of the store that an image refers to is one of its devices, so nothing needs to be bound. If no image
// is available, the files are copied to a workspace; large ones are bound if half of the budget has no room for them.
// StageRoot fails like Stage, and with cas.ErrInvalid if a point lies below a file or link.
func (s *Stager) StageRoot(ctx context.Context, root *Input, points []string, in *cas.Instance,
	workspace func(bytes, files int64) (Workspace, error),
) (*Root, error) {
	if in == nil || in.Store == nil {
		return nil, errNoStore
	}
	k := rootKey{in.Name, root.Digest(), strings.Join(slices.Sorted(slices.Values(points)), "\x00")}
	for {
		if ctx.Err() != nil {
			return nil, context.Cause(ctx)
		}
		g, wait := s.mounts.useRoot(k)
		switch {
		case g != nil && (g.location == nil || g.location.Valid()):
			return s.useRoot(g), nil
		case g != nil:
			s.mounts.forget(g)
			s.releaseRoot(g)
			continue
		case wait != nil:
			select {
			case <-wait:
			case <-ctx.Done():
			}
			continue
		}
		g, err := s.newRoot(ctx, root, points, in, workspace)
		if err == nil {
			g.root = &k
		}
		for _, evicted := range s.mounts.addRoot(k, g) {
			s.drop(evicted)
		}
		if err != nil {
			return nil, err
		}
		return s.useRoot(g), nil
	}
}

// useRoot returns the root file system in g, of which the caller has become a user.
func (s *Stager) useRoot(g *cachedImage) *Root {
	r := &Root{Form: FormImage, Source: rootName, location: g.location, release: func() { s.releaseRoot(g) }}
	if g.workspace != nil {
		r.Form, r.CopyReason, r.Image, r.Source, r.Binds = FormCopy, g.reason, g.workspace.Name(), "out", g.binds
	} else {
		r.Image = g.mount.Name()
	}
	return r
}

func (s *Stager) releaseRoot(g *cachedImage) {
	if _, unmount := s.mounts.release(g, nil); unmount {
		s.drop(g)
	}
}

// useRoot returns the root file system k, which gains a user, or a channel that is closed when a running StageRoot has
// ended. Without either, the caller stages it and calls addRoot.
func (c *mountCache) useRoot(k rootKey) (*cachedImage, chan struct{}) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if g := c.roots[k]; g != nil {
		g.users++
		c.images.MoveToFront(g.element)
		return g, nil
	}
	if wait := c.staging[k]; wait != nil {
		return nil, wait
	}
	c.staging[k] = make(chan struct{})
	return nil, nil
}

// addRoot ends the staging of k, adds g with one user unless it is nil, and returns the evicted images, which the
// caller unmounts. Without a budget, g is unmounted when it is released.
func (c *mountCache) addRoot(k rootKey, g *cachedImage) (evicted []*cachedImage) {
	switch {
	case g == nil:
	case c.budget <= 0:
		g.users = 1
	default:
		evicted = c.add(g, nil)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if g != nil && g.element != nil {
		c.roots[k] = g
	}
	close(c.staging[k])
	delete(c.staging, k)
	return evicted
}

// newRoot makes the root file system, as an image or as a copy.
func (s *Stager) newRoot(ctx context.Context, root *Input, points []string, in *cas.Instance,
	workspace func(bytes, files int64) (Workspace, error),
) (*cachedImage, error) {
	with, err := root.WithPaths(root.Digest().Function(), points, []string{"etc/hosts"})
	if err != nil {
		return nil, err
	}
	locator, _ := cas.As[cas.Locator](in.Store)
	reason := s.copyReason
	if reason == "" && locator == nil {
		reason = s.withoutLocator(in.Store)
	}
	g := &cachedImage{made: time.Now()}
	if reason == "" {
		w := &imageStage{Stager: s, in: in, locator: locator}
		w.filer, _ = cas.As[cas.Filer](in.Store)
		c := &composer{}
		if err := c.composeRoot(ctx, with.root); err != nil {
			return nil, err
		}
		g.mountedImage, err = w.newImage(ctx, c, w.locateRoot)
		var missing *MissingError
		switch {
		case err == nil:
			g.bytes = min(g.bytes, s.mounts.budget/2)
			return g, nil
		case ctx.Err() != nil || errors.As(err, &missing):
			return nil, err
		}
		reason = err.Error()
	}
	g.mountedImage, g.reason = &mountedImage{}, reason
	if err := s.copyRoot(ctx, g, with, in.Store, workspace); err != nil {
		if g.workspace != nil {
			err = errors.Join(err, g.workspace.Close())
		}
		return nil, err
	}
	return g, nil
}

// locateRoot points the files of a root file system at their extents, or at files of the store as further devices. The
// end of such a file is copied: the kernel cannot read a device whose size is not a multiple of a block there.
func (w *imageStage) locateRoot(ctx context.Context, c *composer, m *mountedImage) error {
	files, total, err := c.locate(m.location, w.filer != nil, math.MaxInt64)
	if err != nil {
		return err
	}
	if n := len(c.tree.Devices) + len(files) + 1; n > erofs.MaxDevices {
		return fmt.Errorf("%w: %d files and segments of at most %d", errDevices, n, erofs.MaxDevices)
	}
	known := map[cas.Digest]*erofs.Entry{}
	var tails []byte
	for i := range files {
		f := &files[i]
		at, size := &c.tree.Entries[f.at], f.digest.Size()
		if same := known[f.digest]; same != nil {
			at.Device, at.Size, at.Tail = same.Device, size, same.Tail
			continue
		}
		known[f.digest] = at
		file, err := w.openFile(ctx, m, f)
		if err != nil {
			return fmt.Errorf("%s: %w", f.path, err)
		}
		at.Device, at.Size = int32(len(c.tree.Devices)), size
		c.tree.Devices = append(c.tree.Devices, size)
		total = addSaturating(total, size)
		if size%erofs.BlockSize == 0 {
			continue
		}
		begin := (size - 1) / erofs.TailChunk * erofs.TailChunk
		c.tree.Tails = append(c.tree.Tails, erofs.Tail{Offset: int64(len(tails))})
		at.Tail = int32(len(c.tree.Tails))
		tail := make([]byte, (size-begin+erofs.BlockSize-1)/erofs.BlockSize*erofs.BlockSize)
		if _, err := file.ReadAt(tail[:size-begin], begin); err != nil {
			return fmt.Errorf("%s: %w", f.path, err)
		}
		tails = append(tails, tail...)
	}
	m.bytes = total
	if len(tails) == 0 {
		return nil
	}
	for i := range c.tree.Tails {
		c.tree.Tails[i].Device = int32(len(c.tree.Devices))
	}
	c.tree.Devices = append(c.tree.Devices, int64(len(tails)))
	if m.tails, err = w.files.get(); err != nil {
		return err
	}
	return m.tails.write(tails)
}

// openFile opens the store's file of f as a further device of m.
func (w *imageStage) openFile(ctx context.Context, m *mountedImage, f *storeFile) (*os.File, error) {
	source, release, err := w.filer.File(ctx, f.digest, false)
	if err != nil {
		return nil, notFound(f.digest, err)
	}
	m.release = append(m.release, release)
	file, err := os.Open(source)
	if err == nil {
		m.files = append(m.files, file)
	}
	return file, err
}

// copyRoot copies the root file system into a workspace of its own.
func (s *Stager) copyRoot(ctx context.Context, g *cachedImage, root *Input, store cas.Store,
	workspace func(bytes, files int64) (Workspace, error),
) error {
	l, err := root.Plan(".", nil, nil)
	if err != nil {
		return err
	}
	l.readOnly, l.dirs[0].mode = true, root.root.readOnlyMode()
	if all := root.Bytes(); all <= s.mounts.budget/2 {
		store = withoutFiles{store} // a bind mount for each large file costs every run more than this costs once
	}
	bytes, files := l.SizeEstimate(store)
	if g.workspace, err = workspace(bytes, files); err != nil {
		return err
	}
	staged, err := l.Stage(ctx, store, g.workspace.Root())
	if err != nil {
		return err
	}
	g.binds, g.release = staged.Binds, []func(){staged.Release}
	g.bytes = min(bytes, s.mounts.budget/2)
	return nil
}
