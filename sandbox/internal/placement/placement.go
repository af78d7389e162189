// SPDX-License-Identifier: Apache-2.0

// Package placement lays out the files of runs for backends that cannot mount: those of macOS and Windows. A run sees
// the paths of this host instead of its Targets, so its inputs are put into its outputs before it starts, and taken out
// again when it has ended.
package placement

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"

	"github.com/cloister-build/cloister/sandbox"
)

// A Host is the part of a backend that does not depend on how its runs are confined. It keeps workspaces in a private
// directory. Its methods are safe for concurrent use.
type Host struct {
	ending chan struct{} // closed by Close

	mu     sync.Mutex
	closed bool
	dir    string // "" until it is needed
	open   map[string]*workspace
	busy   sync.WaitGroup // runs
}

// NewHost returns a Host without workspaces. The caller closes it.
func NewHost() *Host {
	return &Host{ending: make(chan struct{}), open: map[string]*workspace{}}
}

// begin counts a run until busy.Done.
func (h *Host) begin() error {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.closed {
		return sandbox.ErrClosed
	}
	h.busy.Add(1)
	return nil
}

// Close ends every run, waits for their end, and removes the workspaces.
func (h *Host) Close() error {
	h.mu.Lock()
	again := h.closed
	if !again {
		h.closed = true
		close(h.ending)
	}
	h.mu.Unlock()
	h.busy.Wait()
	if again || h.dir == "" {
		return nil
	}
	return removeTree(h.dir)
}

// base returns the directory of the workspaces. The caller holds mu.
func (h *Host) base() (string, error) {
	if h.dir != "" {
		return h.dir, nil
	}
	made, err := os.MkdirTemp("", "cloister-sandbox-")
	if err != nil {
		return "", err
	}
	// The kernels compare paths without symbolic links, such as macOS's /var.
	h.dir, err = filepath.EvalSymlinks(made)
	return h.dir, err
}

// mkdir makes an empty directory that only this user can enter.
func (h *Host) mkdir(prefix string) (string, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.closed {
		return "", sandbox.ErrClosed
	}
	base, err := h.base()
	if err != nil {
		return "", err
	}
	return os.MkdirTemp(base, prefix)
}

// File writes text to a new file that no run can change. The caller removes it.
func (h *Host) File(text string) (name string, err error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	dir, err := h.base()
	if err != nil {
		return "", err
	}
	f, err := os.CreateTemp(dir, "file-")
	if err != nil {
		return "", err
	}
	_, err = f.WriteString(text)
	return f.Name(), errors.Join(err, f.Close())
}

// Workspace implements sandbox.Backend. The limits are enforced during runs.
func (h *Host) Workspace(_ context.Context, bytes, files int64) (sandbox.Workspace, error) {
	for _, limit := range []int64{bytes, files} {
		if limit <= 0 && limit != sandbox.Unlimited {
			return nil, fmt.Errorf("%w: a workspace of %d bytes and %d files: each must be positive or Unlimited", sandbox.ErrSpec, bytes, files)
		}
	}
	dir, err := h.mkdir("workspace-")
	if err != nil {
		return nil, fmt.Errorf("workspace: %w", err)
	}
	root, err := os.OpenRoot(dir)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("workspace: %w", err), os.Remove(dir))
	}
	w := &workspace{host: h, dir: dir, root: root, bytes: bytes, files: files}
	h.mu.Lock()
	defer h.mu.Unlock()
	h.open[dir] = w
	return w, nil
}

// workspace returns the open workspace of that name, or nil.
func (h *Host) workspace(name string) *workspace {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.open[name]
}

// A workspace is a directory on disk.
type workspace struct {
	host         *Host
	dir          string
	root         *os.Root
	bytes, files int64
}

func (w *workspace) Root() *os.Root { return w.root }
func (w *workspace) Name() string   { return w.dir }

func (w *workspace) Close() error {
	w.host.mu.Lock()
	_, open := w.host.open[w.dir]
	delete(w.host.open, w.dir)
	w.host.mu.Unlock()
	if !open {
		return nil
	}
	return errors.Join(w.root.Close(), removeTree(w.dir))
}

// removeTree removes a directory, whatever the modes and the depth of the directories in it, as the run's user can.
func removeTree(dir string) error {
	_ = os.Chmod(dir, 0o700) // RemoveAll has the error
	if root, err := os.OpenRoot(dir); err == nil {
		flatten(root)
		_ = root.Close()
	}
	return os.RemoveAll(dir)
}

// maxDepth limits the depth of trees that are left to RemoveAll, which holds a descriptor for each level.
const maxDepth = 16

// flatten makes the directories of a tree writable as far as that is possible, and moves those at maxDepth up to root,
// with what is below them.
func flatten(root *os.Root) {
	type subdirectory struct {
		name  string
		depth int
	}
	for left := []subdirectory{{".", 0}}; len(left) > 0; {
		dir := left[len(left)-1]
		left = left[:len(left)-1]
		_ = root.Chmod(dir.name, 0o700)
		if up := rand.Text(); dir.depth >= maxDepth && root.Rename(dir.name, up) == nil {
			dir = subdirectory{up, 1}
		}
		d, err := root.Open(dir.name)
		if err != nil {
			continue
		}
		entries, _ := d.ReadDir(-1) // RemoveAll reports what is left
		_ = d.Close()
		for _, e := range entries {
			if e.IsDir() {
				left = append(left, subdirectory{filepath.Join(dir.name, e.Name()), dir.depth + 1})
			}
		}
	}
}
