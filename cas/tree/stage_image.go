// SPDX-License-Identifier: Apache-2.0

package tree

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"strconv"
	"sync"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/tree/internal/erofs"
)

// A Mounter mounts images, and nothing else: package tree mounts nothing itself. It is safe for concurrent use.
type Mounter interface {
	// Mount mounts the EROFS image at the start of the file image read-only, with devices as its extra devices, in
	// order; the file may be longer than the image. The files stay the caller's, who may close the devices when it
	// returns, and leaves the bytes of the image as they are until the Mount is closed.
	Mount(ctx context.Context, image *os.File, devices []*os.File) (Mount, error)
}

// A Mount is a mounted image.
type Mount interface {
	// Name is what a Bind calls it: no other Mount of the Mounter has the same name at the same time.
	Name() string
	// Close unmounts it. It is called once, when no run that binds from it is left.
	Close() error
}

// A Form is how the inputs of a run were laid out.
type Form string

// The forms.
const (
	FormCopy  Form = "copy"  // small files were copied into the workspace
	FormImage Form = "image" // they are where the store has them, and an image says so
)

// StagerConfig configures a Stager.
type StagerConfig struct {
	Mounter Mounter // nil: everything is copied
	// Dir is a directory, not on a memory-backed file system, for the files that hold images. They have no names.
	Dir string
	// Budget is how many bytes the subtrees that stay mounted may take: their images, and their files as if all
	// were read, since the kernel caches what is read through a mount once more. 0 keeps none.
	Budget int64
	// CopyUpTo is how many inputs, directories included, are copied all the same, if that is all there are: to mount an
	// image costs as much as some twenty copies.
	CopyUpTo int
	Log      *slog.Logger // is told what goes wrong with no effect on a run; nil is nobody
}

// A Stager lays out input trees without copying them, where the store is a cas.Locator: it writes an image whose
// files point at the bytes in the store, and has it mounted. Subtrees that many runs have in common stay mounted,
// each instance's apart. One Stager belongs to one cas.Instances. Its methods are safe for concurrent use; make it
// with NewStager.
type Stager struct {
	c     StagerConfig
	files imageFiles
	hot   hot
	// why says why there are no images, "" if there are.
	why string
}

// NewStager returns a Stager. The caller closes it.
func NewStager(c StagerConfig) *Stager {
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	s := &Stager{c: c, files: imageFiles{dir: c.Dir}, hot: newHot(c.Budget)}
	if c.Mounter == nil {
		s.why = "this worker mounts no images"
	}
	return s
}

// Probe mounts an image of a kind that Stage makes, with a file in another file, and unmounts it. If that fails
// everything is copied from then on, and Probe returns why. It is called before Stage, if at all.
func (s *Stager) Probe(ctx context.Context) error {
	if s.c.Mounter == nil {
		return errors.New(s.why)
	}
	err := s.probe(ctx)
	if err != nil {
		s.why = err.Error()
	}
	return err
}

func (s *Stager) probe(ctx context.Context) error {
	image, err := erofs.Encode(nil, &erofs.Tree{
		Devices: []int64{cas.ExtentAlign},
		Dirs:    []erofs.Dir{{Mode: modeBoundDir, Count: 1}},
		Entries: []erofs.Entry{{Name: "file", Kind: erofs.File, Mode: 0o444, Size: 1, Device: 0}},
	})
	if err != nil {
		return err
	}
	m := &mounted{}
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
	m.mount, err = s.c.Mounter.Mount(ctx, m.file.File, []*os.File{device.File})
	return err
}

// Close unmounts what stays mounted. It is called after everything that was staged is released.
func (s *Stager) Close() error {
	for _, g := range s.hot.clear() {
		s.drop(g)
	}
	return s.files.close()
}

// Stage lays out l, of whose blobs the instance in has all. When it knows how much room the inputs take, in bytes
// and files, it calls workspace, which returns an empty workspace with as much: there it builds out/, and what it
// has to copy as in/. The workspace stays the caller's.
//
// Where an image cannot be had, it does what Layout.Stage does, and says so in Form and Why. It fails as that does.
func (s *Stager) Stage(ctx context.Context, l *Layout, in *cas.Instance,
	workspace func(bytes, files int64) (*os.Root, error),
) (*Staged, error) {
	if ctx.Err() != nil {
		return nil, context.Cause(ctx)
	}
	placer, _ := cas.As[cas.Locator](in.Store)
	switch {
	case l.order != 0:
		return l.copied(ctx, in.Store, workspace, "its directories have an order of their own")
	case s.why != "":
		return l.copied(ctx, in.Store, workspace, s.why)
	case placer == nil:
		return l.copied(ctx, in.Store, workspace, "the store has no segments on this host")
	}
	stage, old := s.hot.begin()
	for _, g := range old {
		s.drop(g)
	}
	w := &imaging{Stager: s, in: in, placer: placer, stage: stage, staged: &Staged{Form: FormImage, gone: true}, mounts: map[*hotImage]Mount{}}
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
			store = unfiled{store} // so that the room for copies of large files is asked for
		}
		return l.copied(ctx, store, workspace, err.Error())
	}
	ws, err := workspace(w.room(l))
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
	w.staged.gone = false // until its caller says so
	return w.staged, nil
}

// copied lays out l as Layout.Stage does.
func (l *Layout) copied(ctx context.Context, store cas.Store, workspace func(bytes, files int64) (*os.Root, error),
	why string,
) (*Staged, error) {
	ws, err := workspace(l.SizeEstimate(store))
	if err != nil {
		return nil, err
	}
	staged, err := l.Stage(ctx, store, ws)
	if err != nil {
		return nil, err
	}
	staged.CopyReason = why
	return staged, nil
}

// An unfiled store shows no blob as a file.
type unfiled struct{ cas.Store }

// Fetch implements cas.Fetcher.
func (s unfiled) Fetch(ctx context.Context, ds []cas.Digest) ([]cas.Digest, error) {
	return nil, cas.Fetch(ctx, s.Store, ds)
}

// spineRoom is Room for the spine alone, where images hold what is bound into it.
func (l *Layout) spineRoom() (bytes, files int64) {
	r := &room{page: int64(os.Getpagesize())}
	files = 1 // the workspace itself
	for i := range l.dirs {
		files++
		for _, e := range l.dirs[i].entries {
			files++
			if e.source != "" {
				continue
			}
			if e.kind == Directory {
				files += e.dir.count
			}
			bytes = addSaturating(bytes, r.entry(e.entry, true))
		}
	}
	return bytes, files
}

// room is what the workspace takes beside images: the spine, and the files in copies.
func (w *imaging) room(l *Layout) (bytes, files int64) {
	bytes, files = l.spineRoom()
	if len(w.copies) > 0 {
		files++ // in/
	}
	r := &room{page: int64(os.Getpagesize())}
	for _, c := range w.copies {
		bytes, files = addSaturating(bytes, r.entry(c.entry, true)), files+1
	}
	return bytes, files
}

// copy makes the files in copies, in ws.
func (w *imaging) copy(ctx context.Context, ws *os.Root) error {
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
	return seal(ws, "in", modeSpine, epoch)
}

var errFew = errors.New("copies of so few inputs cost less")

// An imaging is one Stage on its way to images.
type imaging struct {
	*Stager
	in     *cas.Instance
	placer cas.Locator
	filer  cas.Filer // nil if the store is none
	stage  uint64    // which Stage of the Stager
	staged *Staged

	own   []bound     // what the image of this run has
	keep  []bound     // what one has that stays mounted from now on
	bytes int64       // of the files in keep
	uses  []*hotImage // that are mounted and not let go
	// mounts are the run's own of these.
	mounts map[*hotImage]Mount
	binds  int // from images that stay mounted
	// copies are files that the store shows with another mode or date than they are to have: in/0 of the workspace,
	// in/1 and so on.
	copies []bound
}

// A bound is an input that an image has in its root.
type bound struct {
	*entry
	target string // relative to the exec root
	whole  bool   // with nothing in it that is bound from elsewhere
}

// mount mounts all that l binds, and lists the binds: what has others inside comes before them.
func (w *imaging) mount(ctx context.Context, l *Layout) error {
	defer func() { w.hot.built(w.in.Name, w.keep) }()
	own := composers.Get().(*composer)
	defer own.giveBack()
	for i := range l.dirs {
		for _, e := range l.dirs[i].entries {
			if e.source == "" {
				continue
			}
			b := bound{entry: e.entry, target: join(l.dirs[i].path, e.name)}
			if hot, err := w.bindHot(ctx, &b); err != nil {
				return err
			} else if !hot {
				w.own = append(w.own, b)
			}
		}
	}
	err := own.compose(ctx, w.own, func(b *bound) (bool, error) { return w.bindHot(ctx, b) })
	if err != nil {
		return err
	}
	if n := len(own.tree.Entries); n > 0 && n <= w.c.CopyUpTo && len(w.staged.Binds)+len(w.keep) == 0 {
		return errFew
	}
	inside := w.staged.Binds
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
	w.staged.Binds = append(w.staged.Binds, inside...)
	return w.mountHot(ctx)
}

// bind binds all that is in the root of an image, from a mount of it.
func (w *imaging) bind(ctx context.Context, m *mounted, from Mount, names []string, bs []bound) error {
	if m.placement != nil {
		w.staged.placements = append(w.staged.placements, m.placement)
	}
	loose := make([]bool, len(bs)) // in the root: then a bind of it alone will do
	for _, f := range m.loose {
		if f.dir == 0 {
			loose[f.top] = true
		}
	}
	for i, b := range bs {
		if !loose[i] {
			w.staged.Binds = append(w.staged.Binds, Bind{b.target, names[i], from.Name(), b.digest})
		}
	}
	for _, f := range m.loose {
		if err := w.bindFile(ctx, bs[f.top].target+f.path[len(names[f.top]):], f.entry); err != nil {
			return err
		}
	}
	return nil
}

// bindFile binds a file from where the store shows it, or from a copy if that is another.
func (w *imaging) bindFile(ctx context.Context, target string, e *entry) error {
	if e.special() {
		w.staged.Binds = append(w.staged.Binds, Bind{target, fmt.Sprintf("in/%d", len(w.copies)), "", e.digest})
		w.copies = append(w.copies, bound{entry: e, target: target})
		return nil
	}
	source, release, err := w.filer.File(ctx, e.digest, e.exec)
	if err != nil {
		return fmt.Errorf("%s: %w", target, vanished(e.digest, err))
	}
	w.staged.release = append(w.staged.release, release)
	w.staged.Binds = append(w.staged.Binds, Bind{target, source, "", e.digest})
	return nil
}

// A mounted is an image that is mounted, and all that it needs for that.
type mounted struct {
	mount     Mount // nil where it has several
	file      *imageFile
	placement cas.Location // nil if there is no file to place
	loose     []looseFile
	bytes     int64 // of the image, and of the files in segments
}

// A looseFile is a file of which an image has a placeholder only: the store has it as a file.
type looseFile struct {
	composedFile
	nth  int    // of all files of the image
	path string // relative to its root
}

// image has what was composed mounted.
func (w *imaging) image(ctx context.Context, c *composer) (_ *mounted, err error) {
	m := &mounted{}
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
		if m.placement, err = w.placer.Locate(ctx, c.digests); err != nil {
			return nil, err
		}
		if m.loose, m.bytes, err = c.place(m.placement, w.filer != nil); err != nil {
			return nil, err
		}
		devices = m.placement.Files()
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
	m.mount, err = w.c.Mounter.Mount(ctx, m.file.File, devices)
	return m, err
}

// unmount undoes image, as far as that came.
func (s *Stager) unmount(m *mounted) {
	closed := m.mount == nil || s.close(m.mount)
	if m.file != nil {
		s.files.put(m.file, closed)
	}
	if m.placement != nil {
		m.placement.Release()
	}
}

// close unmounts m and reports whether it is unmounted.
func (s *Stager) close(m Mount) bool {
	err := m.Close()
	if err != nil {
		s.c.Log.Warn("an image of inputs stays mounted", "mount", m.Name(), "error", err)
	}
	return err == nil
}

// An imageFile holds an image: one after the other, since making files costs more than writing to them.
type imageFile struct {
	*os.File
	size int // of the largest image that it has held
}

func (f *imageFile) write(image []byte) error {
	f.size = max(f.size, len(image))
	_, err := f.WriteAt(image, 0)
	return err
}

// imageFiles are the files that wait for another image.
type imageFiles struct {
	dir  string
	mu   sync.Mutex
	idle []*imageFile // guarded by mu
}

// Limits of what waits.
const (
	maxImageFiles    = 64
	maxImageFileSize = 4 << 20 // bytes; the time to make a larger one is nothing beside that of its tree
)

// get returns a file without a name.
func (s *imageFiles) get() (*imageFile, error) {
	s.mu.Lock()
	if n := len(s.idle); n > 0 {
		defer s.mu.Unlock()
		f := s.idle[n-1]
		s.idle = s.idle[:n-1]
		return f, nil
	}
	s.mu.Unlock()
	f, err := os.CreateTemp(s.dir, "image-")
	if err != nil {
		return nil, err
	}
	return &imageFile{File: f}, os.Remove(f.Name())
}

// put takes a file back, to be used again if that is safe.
func (s *imageFiles) put(f *imageFile, again bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if again && len(s.idle) < maxImageFiles && f.size <= maxImageFileSize {
		s.idle = append(s.idle, f)
		return
	}
	f.Close() // it has no name: nothing is lost
}

func (s *imageFiles) close() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	var err error
	for _, f := range s.idle {
		err = errors.Join(err, f.Close())
	}
	s.idle = nil
	return err
}
