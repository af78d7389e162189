// SPDX-License-Identifier: Apache-2.0

package tree

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"slices"
	"strings"
	"sync"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/tree/internal/erofs"
)

// A Mounter mounts images: package tree mounts nothing itself. It is safe for concurrent use.
type Mounter interface {
	// Mount mounts the EROFS image at the start of the file image read-only, with devices as its extra devices, in
	// order; the file may be longer than the image. The caller keeps the files: it may close the devices when Mount
	// returns, and does not change the bytes of the image until the Mount is closed.
	Mount(ctx context.Context, image *os.File, devices []*os.File) (Mount, error)
}

// A Mount is a mounted image.
type Mount interface {
	// Name identifies the mount in Binds. It is unique among the open Mounts of a Mounter.
	Name() string
	// Close unmounts the image. It is called once, when no run binds from it any more.
	Close() error
}

// A Form is the way in which the inputs of a run were laid out.
type Form string

// The forms.
const (
	FormCopy  Form = "copy"  // small files are copied into the workspace
	FormImage Form = "image" // an image points at the files of the store
)

// StagerConfig configures a Stager.
type StagerConfig struct {
	Mounter Mounter // nil copies everything
	// Dir is the directory for the unnamed files that hold images. It must not be on a memory-backed file system.
	Dir string
	// Budget limits the bytes of cached mounts: their images and the files in them, since the kernel caches data read
	// through a mount a second time. 0 caches none.
	Budget int64
	// SeenBytes limits the memory for digests of subtrees that were seen once. Zero is DefaultSeenBytes.
	SeenBytes int64
	// CopyUpTo is the largest number of inputs, including directories, that are copied although images are available:
	// mounting an image costs as much as about twenty copies.
	CopyUpTo int
	Log      *slog.Logger // for errors without effect on a run; nil discards them
}

// A Stager lays out input trees without copying them if the store is a cas.Locator: it writes an image whose files
// point at the bytes in the store, and has it mounted. Images of subtrees that many runs share stay mounted, separately
// for each instance. One Stager belongs to one cas.Instances. Its methods are safe for concurrent use; create one with
// NewStager.
type Stager struct {
	config     StagerConfig
	files      imageFiles
	mounts     mountCache
	copyReason string    // why everything is copied, or ""
	hidden     sync.Once // the warning that a decorator hides the Locator

	dropping sync.Mutex // held while images are unmounted that no Stage or Release unmounts; before mountCache.mu
}

// NewStager returns a Stager. The caller closes it.
func NewStager(c StagerConfig) *Stager {
	c.Log = cmp.Or(c.Log, slog.New(slog.DiscardHandler))
	s := &Stager{config: c, files: imageFiles{dir: c.Dir}, mounts: newMountCache(&c)}
	s.mounts.expire = s.dropExpired
	if c.Mounter == nil {
		s.copyReason = "this worker mounts no images"
	}
	return s
}

// Probe mounts and unmounts an image with one file, which lies on an extra device. If that fails, Probe returns the
// reason, and Stage copies everything from then on. Call it before Stage.
func (s *Stager) Probe(ctx context.Context) error {
	if s.config.Mounter == nil {
		return errors.New(s.copyReason)
	}
	err := s.probe(ctx)
	if err != nil {
		s.copyReason = err.Error()
	}
	return err
}

func (s *Stager) probe(ctx context.Context) error {
	image, err := erofs.Encode(nil, &erofs.Tree{
		Devices: []int64{cas.ExtentAlign},
		Dirs:    []erofs.Dir{{Mode: 0o755, Count: 1}},
		Entries: []erofs.Entry{{Name: "file", Kind: erofs.File, Mode: 0o444, Size: 1, Device: 0}},
	})
	if err != nil {
		return err
	}
	m := &mountedImage{}
	defer s.unmount(m)
	if m.file, err = s.files.get(); err != nil {
		return err
	}
	device, err := s.files.get()
	if err != nil {
		return err
	}
	defer s.files.put(device, true)
	if err := errors.Join(m.file.write(image), device.write(make([]byte, cas.ExtentAlign))); err != nil {
		return err
	}
	m.mount, err = s.config.Mounter.Mount(ctx, m.file.File, []*os.File{device.File})
	return err
}

// SeenBytes returns the estimated memory for digests of subtrees that were seen once.
func (s *Stager) SeenBytes() int64 { return s.mounts.seenMemory() }

// dropExpired unmounts the expired images.
func (s *Stager) dropExpired() {
	s.dropping.Lock()
	defer s.dropping.Unlock()
	for _, g := range s.mounts.removeExpired() {
		s.drop(g)
	}
}

// ReleaseRemoved drops the least recently used cached image that keeps removed files of the store on the disk, and
// reports whether there was one. The image is unmounted immediately, or when the last run that uses it has ended.
func (s *Stager) ReleaseRemoved() bool {
	s.dropping.Lock()
	defer s.dropping.Unlock()
	g, unused := s.mounts.removeOutdated()
	if unused {
		s.drop(g)
	}
	return g != nil
}

// Close unmounts the cached images. Call it after everything that was staged is released.
func (s *Stager) Close() error {
	s.dropping.Lock()
	defer s.dropping.Unlock()
	for _, g := range s.mounts.clear() {
		s.drop(g)
	}
	return s.files.close()
}

// A newWorkspace function returns an empty workspace with room for the given bytes and files.
type newWorkspace = func(bytes, files int64) (*os.Root, error)

// Stage lays out l, all of whose blobs are in the instance in. It calls workspace for an empty workspace once it knows
// the size of the inputs, and builds out/ in it, and in/ for the inputs it has to copy. The caller keeps the workspace.
//
// If no image is available, it does what Layout.Stage does, and sets Form and CopyReason. It fails like Layout.Stage.
func (s *Stager) Stage(ctx context.Context, l *Layout, in *cas.Instance, workspace newWorkspace) (*Staged, error) {
	if in == nil || in.Store == nil {
		return nil, errNoStore
	}
	if ctx.Err() != nil {
		return nil, context.Cause(ctx)
	}
	locator, _ := cas.As[cas.Locator](in.Store)
	switch {
	case l.order != 0:
		return l.copied(ctx, in.Store, workspace, "its directories have a custom order")
	case l.layered:
		return l.copied(ctx, in.Store, workspace, s.layeredReason())
	case s.copyReason != "":
		return l.copied(ctx, in.Store, workspace, s.copyReason)
	case locator == nil:
		return l.copied(ctx, in.Store, workspace, s.withoutLocator(in.Store))
	}
	w := &imageStage{
		Stager: s, in: in, locator: locator, stage: s.mounts.nextStage(),
		staged: &Staged{Form: FormImage, reusable: true}, mounted: map[*cachedImage]Mount{},
	}
	w.filer, _ = cas.As[cas.Filer](in.Store)
	err := w.mount(ctx, l)
	var missing *MissingError
	switch {
	case err == nil:
	case ctx.Err() != nil || errors.As(err, &missing):
		w.staged.Release()
		return nil, err
	default:
		w.staged.Release()
		store := in.Store
		if errors.Is(err, cas.ErrFull) {
			store = withoutFiles{store} // so that the workspace has room for copies of large files
		}
		return l.copied(ctx, store, workspace, err.Error())
	}
	ws, err := workspace(w.size(l))
	if err == nil {
		_, err = l.build(ctx, in.Store, ws, true)
	}
	if err == nil {
		err = w.copy(ctx, ws)
	}
	if err != nil {
		w.staged.Release()
		return nil, err
	}
	w.staged.reusable = false // until AllowReuse
	return w.staged, nil
}

// layeredReason returns why a run with the worker's user gets copies.
func (s *Stager) layeredReason() string {
	return cmp.Or(s.copyReason, "runs have the worker's user")
}

// withoutLocator returns why a store that is no Locator cannot be mounted, and logs a decorator's mistake once.
func (s *Stager) withoutLocator(store cas.Store) string {
	hidden := cas.Hidden(store)
	if !slices.Contains(hidden, "Locator") {
		return "the store has no segments on this host"
	}
	reason := fmt.Sprintf("the store %T hides the %s of the store that it decorates: add Unwrap", store, strings.Join(hidden, ", "))
	s.hidden.Do(func() { s.config.Log.Warn("every input is copied", "reason", reason) })
	return reason
}

// copied lays out l as Layout.Stage does.
func (l *Layout) copied(ctx context.Context, store cas.Store, workspace newWorkspace, reason string) (*Staged, error) {
	ws, err := workspace(l.SizeEstimate(store))
	if err != nil {
		return nil, err
	}
	staged, err := l.Stage(ctx, store, ws)
	if err != nil {
		return nil, err
	}
	staged.CopyReason = reason
	return staged, nil
}

// withoutFiles hides that a store is a cas.Filer.
type withoutFiles struct{ cas.Store }

// Fetch implements cas.Fetcher.
func (s withoutFiles) Fetch(ctx context.Context, ds []cas.Digest) ([]cas.Digest, error) {
	return nil, cas.Fetch(ctx, s.Store, ds)
}

// unmount releases the resources of m, which may be partly set.
func (s *Stager) unmount(m *mountedImage) {
	closed := m.mount == nil || s.close(m.mount)
	if m.file != nil {
		s.files.put(m.file, closed)
	}
	if m.location != nil {
		m.location.Release()
	}
	if m.tails != nil {
		s.files.put(m.tails, closed)
	}
	for _, release := range m.release {
		release()
	}
}

// close unmounts m and reports whether that succeeded.
func (s *Stager) close(m Mount) bool {
	err := m.Close()
	if err != nil {
		s.config.Log.Warn("cannot unmount an image of inputs", "mount", m.Name(), "err", err)
	}
	return err == nil
}
