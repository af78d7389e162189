// SPDX-License-Identifier: Apache-2.0

package gvisor

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"sync"
	"time"

	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/sandbox/internal/cgroup"
	"github.com/cloister-build/cloister/sandbox/internal/preflight"
	"github.com/cloister-build/cloister/sandbox/internal/zygote"
)

// A backend runs each command in a gVisor of its own. It keeps control groups, which serve one run after another, and
// nothing else: the launcher's mounts and runsc's state are in a namespace that ends with the run, also if this process
// is killed.
type backend struct {
	ending chan struct{} // closed by Close
	times  times

	mu     sync.Mutex
	closed bool
	runsc  string       // "" until it was found
	groups *cgroup.Host // set by start
	cells  int          // number of cells
	lost   int          // of them, in use forever
	free   []*cell      // not in use
	open   map[string]*workspace
	busy   sync.WaitGroup
}

// times limits how long a run may take to report its start and, after its command has exited, its end.
type times struct{ start, reap time.Duration }

// A cell has what one run at a time needs: a pair of host users, which are those of a slot of that number, and a
// control group.
type cell struct {
	number int
	group  *cgroup.Group // nil without control groups
}

// New returns a backend that finds runsc through $RUNSC_PATH or PATH. The caller closes it.
func New() sandbox.Backend {
	return &backend{
		ending: make(chan struct{}), open: map[string]*workspace{},
		times: times{start: 5 * time.Minute, reap: 30 * time.Second},
	}
}

// Close ends every run and waits for their end.
func (b *backend) Close() error {
	b.mu.Lock()
	again := b.closed
	if !again {
		b.closed = true
		close(b.ending)
	}
	b.mu.Unlock()
	b.busy.Wait()
	if again || b.groups == nil {
		return nil
	}
	return b.groups.Close()
}

// start checks that runs are possible and opens the control groups.
func (b *backend) start() error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.closed {
		return sandbox.ErrClosed
	}
	if b.runsc == "" {
		if os.Geteuid() != 0 {
			return preflight.Fail(preflight.NotRoot, "gVisor needs root here, since each run gets two users")
		}
		runsc, err := findRunsc()
		if err != nil {
			return err
		}
		if err := preflight.Static("/proc/self/exe"); err != nil {
			return preflight.Fail(preflight.ProgramDynamic, "this program is pid 1 of each run in gVisor and %w; build it with CGO_ENABLED=0", err)
		}
		if !zygote.Callable() {
			return errors.New("this program must call namespace.Init first in main")
		}
		b.runsc = runsc
	}
	if b.groups == nil {
		var err error
		if b.groups, err = cgroup.Open(); err != nil {
			return fmt.Errorf("control groups: %w", err)
		}
	}
	return nil
}

// acquire returns a cell for the caller's own use until release.
func (b *backend) acquire() (*cell, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.closed {
		return nil, sandbox.ErrClosed
	}
	if n := len(b.free); n > 0 {
		c := b.free[n-1]
		b.free = b.free[:n-1]
		b.busy.Add(1)
		return c, nil
	}
	if b.cells == zygote.MaxSlots {
		return nil, fmt.Errorf("at most %d runs at a time; %d lost ones count until the worker restarts", zygote.MaxSlots, b.lost)
	}
	c := &cell{number: b.cells}
	if b.groups.Mode() != cgroup.None {
		var err error
		if c.group, err = b.groups.New("gvisor" + strconv.Itoa(c.number)); err != nil {
			return nil, fmt.Errorf("control group: %w", err)
		}
	}
	b.cells++
	b.busy.Add(1)
	return c, nil
}

// release gives a cell to the next run, unless processes of the last one may be alive: they have its users and its
// control group.
func (b *backend) release(c *cell, alive bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if alive {
		b.lost++
	} else {
		b.free = append(b.free, c)
	}
	b.busy.Done()
}

// Workspace returns a new detached tmpfs.
func (b *backend) Workspace(_ context.Context, bytes, files int64) (sandbox.Workspace, error) {
	for _, limit := range []int64{bytes, files} {
		if limit <= 0 && limit != sandbox.Unlimited {
			return nil, fmt.Errorf("%w: a workspace of %d bytes and %d files: each must be positive or Unlimited", sandbox.ErrSpec, bytes, files)
		}
	}
	b.mu.Lock()
	closed := b.closed
	b.mu.Unlock()
	if closed {
		return nil, sandbox.ErrClosed
	}
	room := zygote.WorkspaceSize{Bytes: bytes, Files: files}
	fd, err := zygote.NewWorkspace(room)
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

// A workspace is a detached mount, reachable through its descriptors only.
type workspace struct {
	b     *backend
	mount *os.File
	root  *os.Root
	name  string
	room  zygote.WorkspaceSize
}

func (w *workspace) Root() *os.Root { return w.root }
func (w *workspace) Name() string   { return w.name }

func (w *workspace) Close() error {
	w.b.mu.Lock()
	if w.b.open[w.name] == w { // not a newer one with the same descriptor
		delete(w.b.open, w.name)
	}
	w.b.mu.Unlock()
	return errors.Join(w.root.Close(), w.mount.Close())
}

// workspace returns the open workspace of that name, or nil.
func (b *backend) workspace(name string) *workspace {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.open[name]
}
