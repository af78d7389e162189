// SPDX-License-Identifier: Apache-2.0

package namespace

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync"

	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/sandbox/internal/zygote"
	"golang.org/x/sys/unix"
)

// Workspace returns a new detached tmpfs.
func (b *Backend) Workspace(_ context.Context, bytes, files int64) (sandbox.Workspace, error) {
	for _, limit := range []int64{bytes, files} {
		if limit <= 0 && limit != sandbox.Unlimited {
			return nil, fmt.Errorf("%w: a workspace of %d bytes and %d files: each must be positive or Unlimited", sandbox.ErrSpec, bytes, files)
		}
	}
	if err := b.ready(); err != nil {
		return nil, err
	}
	room := zygote.WorkspaceSize{Bytes: bytes, Files: files}
	fd, err := b.newWorkspace(room)
	if err != nil {
		return nil, fmt.Errorf("workspace: %w", err)
	}
	w := &workspace{b: b, mount: os.NewFile(uintptr(fd), "workspace"), name: fmt.Sprintf("/proc/self/fd/%d", fd), room: room}
	if w.root, err = os.OpenRoot(w.name); err != nil {
		w.mount.Close()
		return nil, fmt.Errorf("workspace: %w", err)
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.open[w.name] = w
	return w, nil
}

// newWorkspace returns the descriptor of a workspace, through the zygote if this process may not mount.
func (b *Backend) newWorkspace(room zygote.WorkspaceSize) (int, error) {
	if !b.rootless {
		return zygote.NewWorkspace(room)
	}
	text, err := json.Marshal(room)
	if err != nil {
		return -1, err
	}
	return b.request(append([]byte{zygote.ReqWorkspace}, text...), true)
}

// copiesDetached caches what the kernel can do.
var copiesDetached = sync.OnceValue(zygote.CopiesDetached)

// Mount mounts an image, detached.
func (b *Backend) Mount(_ context.Context, file *os.File, devices []*os.File) (sandbox.Mount, error) {
	if err := b.ready(); err != nil {
		return nil, err
	}
	if file == nil || slices.Contains(devices, nil) {
		return nil, fmt.Errorf("%w: mount an image: a file is nil", sandbox.ErrSpec)
	}
	if b.rootless {
		return nil, fmt.Errorf("%w: an ordinary user cannot mount an EROFS image", sandbox.ErrUnsupported)
	}
	if b.config.attached || !copiesDetached() {
		// It could be attached in one run only.
		return nil, fmt.Errorf("%w: this kernel cannot copy detached mounts (needs Linux 6.15)", sandbox.ErrUnsupported)
	}
	if b.noLower.Load() {
		return nil, fmt.Errorf("%w: this kernel cannot mount an overlay over an image (needs Linux 6.13)", sandbox.ErrUnsupported)
	}
	fd, err := zygote.NewImage(file, devices)
	if err != nil {
		return nil, fmt.Errorf("image: %w", err)
	}
	m := &image{b: b, fd: fd, name: fmt.Sprintf("image/%d", b.mounted.Add(1))}
	b.images.Store(m.name, m)
	return m, nil
}

// An image is a detached mount.
type image struct {
	b    *Backend
	fd   int
	name string
}

func (m *image) Name() string { return m.name }

func (m *image) Close() error {
	m.b.images.Delete(m.name)
	m.b.mu.Lock()
	defer m.b.mu.Unlock()
	m.b.forgetRoots()
	return unix.Close(m.fd)
}

// openRoot opens the workspace that has the root file system of a run.
func (b *Backend) openRoot(spec *sandbox.Spec, name string) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	w := b.open[name]
	shared := func(in sandbox.Input) bool { return in.Image == name }
	lower := func(l sandbox.Lower) bool { return l.Image == name }
	if w == nil || spec.Root == nil || spec.Root.Image != name || slices.ContainsFunc(spec.Inputs, shared) || slices.ContainsFunc(spec.Lower, lower) {
		return -1, fmt.Errorf("%w: unknown image %q", sandbox.ErrSpec, name)
	}
	return unix.Open(name, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
}

// device returns the device number of a workspace. A template that keeps a workspace keeps the number from being
// reused, unlike its name. The names of images are not reused, and device returns "".
func device(image string) string {
	var st unix.Stat_t
	if unix.Stat(image, &st) != nil {
		return ""
	}
	return fmt.Sprintf(" %d", st.Dev)
}

// forgetRoots ends idle slots whose templates keep a closed root file system. release does so for those that are busy.
// The caller holds b.mu.
func (b *Backend) forgetRoots() {
	for _, s := range b.free {
		if !b.rootOpen(s) {
			s.drop()
		}
	}
}

// rootOpen reports whether the root file system of a slot's template is open, or there is none. The caller holds b.mu.
func (b *Backend) rootOpen(s *slot) bool {
	if s.base == nil || s.base.RootName == "" {
		return true
	}
	name, rest, _ := strings.Cut(s.base.RootName, " ")
	if _, ok := b.images.Load(name); ok {
		return true
	}
	return b.open[name] != nil && strings.HasSuffix(rest, device(name))
}

// A workspace is a detached mount, reachable through its descriptors only.
type workspace struct {
	b     *Backend
	mount *os.File
	root  *os.Root
	name  string
	room  zygote.WorkspaceSize
}

func (w *workspace) Root() *os.Root { return w.root }
func (w *workspace) Name() string   { return w.name }

func (w *workspace) Close() error {
	// Freeing much memory takes time.
	err := errors.Join(w.root.Close(), w.mount.Close())
	w.b.mu.Lock()
	defer w.b.mu.Unlock()
	if w.b.open[w.name] == w { // not a newer one with the same descriptor
		delete(w.b.open, w.name)
		w.b.forgetRoots()
	}
	return err
}
