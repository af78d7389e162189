// SPDX-License-Identifier: Apache-2.0

package namespace

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/sandbox/internal/cgroup"
	"github.com/cloister-build/cloister/sandbox/internal/zygote"
	"golang.org/x/sys/unix"
)

// A Backend runs commands in namespaces through one zygote, which it starts when it is first needed
// and again if it died.
type Backend struct {
	config   Config
	rootless bool
	landlock int         // the version that is in force, or 0
	exposed  atomic.Bool // views of Config.Hidden cannot be made here

	mu     sync.Mutex
	sock   int // of the zygote; -1 while there is none
	proc   *os.Process
	life   int // how many zygotes there have been
	closed bool
	groups *cgroup.Host // nil until the zygote is first started, and without control groups
	made   int          // slots
	busy   int          // those that were taken
	free   []*slot      // the one that was used longest ago first: it has had the time to prepare itself
	wanted *sync.Cond   // a slot was given back
	open   map[string]*workspace
}

// A slot is what one run at a time has for itself: a thread of the zygote and a control group.
type slot struct {
	number int
	life   int // of the zygote that knows it
	group  *cgroup.Group
	// last is the workspace of its last run, or nil. As long as it is open, what the run left there counts as
	// memory of the slot's group.
	last *workspace
}

// New returns a backend. The caller closes it.
func New(c Config) *Backend {
	b := &Backend{config: c, rootless: !ownsUsers(), sock: -1, open: map[string]*workspace{}}
	b.wanted = sync.NewCond(&b.mu)
	if c.has(Landlock) {
		b.landlock = zygote.LandlockVersion()
	}
	return b
}

// Close ends the zygote and every run.
func (b *Backend) Close() error {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.closed = true
	b.drop()
	b.wanted.Broadcast()
	// Their processes are killed; whoever runs them reads their groups once more.
	late := false
	patience := time.AfterFunc(answerTime*time.Second, func() {
		b.mu.Lock()
		defer b.mu.Unlock()
		late = true
		b.wanted.Broadcast()
	})
	defer patience.Stop()
	for b.busy > 0 && !late {
		b.wanted.Wait()
	}
	if b.busy > 0 {
		return fmt.Errorf("%d runs do not end", b.busy)
	}
	if b.groups == nil {
		return nil
	}
	// What was killed with the zygote may need a moment to be gone.
	err := b.groups.Close()
	b.groups = nil
	return err
}

// drop forgets the zygote. Its runs die with it. b.mu is held.
func (b *Backend) drop() {
	if b.sock < 0 {
		return
	}
	unix.Close(b.sock)
	b.proc.Kill()
	b.proc.Wait()
	b.sock = -1
}

// start starts the zygote if there is none. b.mu is held.
func (b *Backend) start() error {
	if b.closed {
		return errClosed
	}
	if b.sock >= 0 {
		return nil
	}
	if b.groups == nil && b.config.has(Cgroups) {
		var err error
		if b.groups, err = cgroup.Open(); err != nil {
			return fmt.Errorf("control groups: %w", err)
		}
	}
	proc, sock, err := startZygote(b.rootless)
	if err != nil {
		return err
	}
	b.proc, b.sock = proc, sock
	b.life++
	return nil
}

// request sends one packet to the zygote and, if answer, returns the descriptor of its reply, or -1.
func (b *Backend) request(req []byte, answer bool, fds ...int) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.requestLocked(req, answer, fds...)
}

func (b *Backend) requestLocked(req []byte, answer bool, fds ...int) (int, error) {
	// Twice, since a failure may be how one learns that the zygote died.
	var err error
	for range 2 {
		if err := b.start(); err != nil {
			return -1, err
		}
		err = zygote.Send(b.sock, req, fds...)
		if err != nil && !errors.Is(err, unix.EPIPE) && !errors.Is(err, unix.ECONNRESET) {
			// It lives, and with it every other run: only this request failed.
			return -1, fmt.Errorf("zygote: %w", err)
		}
		var text []byte
		var got []int
		if err == nil && answer {
			text, got, err = zygote.Receive(b.sock)
		}
		switch {
		case errors.Is(err, zygote.ErrTruncated):
			return -1, err
		case err != nil:
			b.drop()
		case !answer:
			return -1, nil
		case len(text) > 1:
			return -1, fmt.Errorf("zygote: %s", text[1:])
		case len(got) == 1:
			return got[0], nil
		default:
			return -1, nil
		}
	}
	return -1, fmt.Errorf("the zygote does not answer: %w", err)
}

// launch hands a run to its slot. It fails with errLostSlot if the zygote is not the one that knows the slot.
func (b *Backend) launch(s *slot, fds []int) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.closed {
		return errClosed
	}
	if b.sock < 0 || s.life != b.life {
		return errLostSlot
	}
	err := zygote.Send(b.sock, append([]byte{zygote.ReqRun}, strconv.Itoa(s.number)...), fds...)
	if errors.Is(err, unix.EPIPE) || errors.Is(err, unix.ECONNRESET) {
		b.drop()
		return errLostSlot
	}
	if err != nil {
		return fmt.Errorf("zygote: %w", err)
	}
	return nil
}

var errClosed = errors.New("the sandbox is closed")

// errLostSlot says that the zygote died since it made the slot.
var errLostSlot = errors.New("the zygote died")

// take returns a slot that the caller has for itself until it gives it back. It waits if there are none left.
func (b *Backend) take() (*slot, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if err := b.start(); err != nil {
		return nil, err
	}
	s, err := b.pick()
	if err != nil {
		return nil, err
	}
	if s.life == b.life && b.sock >= 0 {
		b.busy++
		return s, nil
	}
	var fds []int
	if s.group != nil {
		_, tasks := s.group.Join()
		for _, f := range tasks {
			fds = append(fds, int(f.Fd()))
		}
	}
	want, err := json.Marshal(zygote.Slot{Number: s.number, Nested: !b.config.has(NoNesting)})
	if err == nil {
		_, err = b.requestLocked(append([]byte{zygote.ReqSlot}, want...), true, fds...)
	}
	if err != nil {
		b.free = append(b.free, s)
		b.wanted.Signal()
		return nil, err
	}
	s.life = b.life
	b.busy++
	return s, nil
}

// pick returns a slot in which a run has all of its memory, if there can be one. b.mu is held.
func (b *Backend) pick() (*slot, error) {
	for len(b.free) == 0 && b.made == zygote.MaxSlots && !b.closed {
		b.wanted.Wait()
	}
	i := slices.IndexFunc(b.free, func(s *slot) bool { return s.last == nil || b.open[s.last.name] != s.last })
	if i < 0 && b.made < zygote.MaxSlots {
		return b.newSlot()
	}
	if len(b.free) == 0 {
		return nil, errClosed
	}
	s := b.free[max(i, 0)]
	b.free = slices.Delete(b.free, max(i, 0), max(i, 0)+1)
	return s, nil
}

// newSlot makes a slot, never one without the control group that it is to have. b.mu is held.
func (b *Backend) newSlot() (*slot, error) {
	s := &slot{number: b.made}
	if b.groups != nil && b.groups.Mode() != cgroup.None {
		var err error
		if s.group, err = b.groups.New("slot" + strconv.Itoa(s.number)); err != nil {
			return nil, fmt.Errorf("control group: %w", err)
		}
	}
	b.made++
	return s, nil
}

// give takes a slot back after a run in a workspace.
func (b *Backend) give(s *slot, workspace string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	s.last = b.open[workspace]
	b.free = append(b.free, s)
	b.busy--
	b.wanted.Broadcast()
}

// Workspace returns a new detached tmpfs.
func (b *Backend) Workspace(_ context.Context, bytes, files int64) (sandbox.Workspace, error) {
	room, err := json.Marshal(zygote.Room{Bytes: bytes, Files: files})
	if err != nil {
		return nil, err
	}
	fd, err := b.request(append([]byte{zygote.ReqWorkspace}, room...), true)
	if err != nil {
		return nil, fmt.Errorf("workspace: %w", err)
	}
	w := &workspace{b: b, mount: os.NewFile(uintptr(fd), "workspace"), name: fmt.Sprintf("/proc/self/fd/%d", fd)}
	if w.root, err = os.OpenRoot(w.name); err != nil {
		w.mount.Close()
		return nil, fmt.Errorf("workspace: %w", err)
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.open[w.name] = w
	return w, nil
}

// A workspace is a detached mount: it has no path but those of the descriptors that hold it.
type workspace struct {
	b     *Backend
	mount *os.File
	root  *os.Root
	name  string
}

func (w *workspace) Root() *os.Root { return w.root }
func (w *workspace) Name() string   { return w.name }

func (w *workspace) Close() error {
	// Freeing much memory takes its time.
	err := errors.Join(w.root.Close(), w.mount.Close())
	w.b.mu.Lock()
	defer w.b.mu.Unlock()
	if w.b.open[w.name] == w { // and not the next one of the same descriptor
		delete(w.b.open, w.name)
	}
	return err
}
