// SPDX-License-Identifier: Apache-2.0

package namespace

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"strconv"
	"sync"
	"sync/atomic"

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
	free   []*slot      // the one that was used longest ago first: it has had the time to prepare itself
	wanted *sync.Cond   // a slot was given back
}

// A slot is what one run at a time has for itself: a thread of the zygote and a control group.
type slot struct {
	number int
	life   int // of the zygote that knows it
	group  *cgroup.Group
}

// New returns a backend. The caller closes it.
func New(c Config) *Backend {
	b := &Backend{config: c, rootless: !ownsUsers(), sock: -1}
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
		return errors.New("the sandbox is closed")
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
			if req[0] == zygote.ReqRun {
				return -1, errLostSlot // the next zygote does not know the slot
			}
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

// errLostSlot says that the zygote died since it made the slot.
var errLostSlot = errors.New("the zygote died")

// take returns a slot that the caller has for itself until it gives it back. It waits if there are none left.
func (b *Backend) take() (*slot, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if err := b.start(); err != nil {
		return nil, err
	}
	for len(b.free) == 0 && b.made == zygote.MaxSlots && !b.closed {
		b.wanted.Wait()
	}
	var s *slot
	if len(b.free) > 0 {
		s, b.free = b.free[0], b.free[1:]
	} else {
		s = &slot{number: b.made}
		b.made++
		if b.groups != nil && b.groups.Mode() != cgroup.None {
			var err error
			if s.group, err = b.groups.New("slot" + strconv.Itoa(s.number)); err != nil {
				b.free = append(b.free, s)
				return nil, fmt.Errorf("control group: %w", err)
			}
		}
	}
	if s.life == b.life && b.sock >= 0 {
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
		return nil, err
	}
	s.life = b.life
	return s, nil
}

// give takes a slot back.
func (b *Backend) give(s *slot) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.free = append(b.free, s)
	b.wanted.Signal()
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
	w := &workspace{mount: os.NewFile(uintptr(fd), "workspace")}
	if w.root, err = os.OpenRoot(w.Name()); err != nil {
		w.mount.Close()
		return nil, fmt.Errorf("workspace: %w", err)
	}
	return w, nil
}

// A workspace is a detached mount: it has no path but those of the descriptors that hold it.
type workspace struct {
	mount *os.File
	root  *os.Root
}

func (w *workspace) Root() *os.Root { return w.root }
func (w *workspace) Name() string   { return fmt.Sprintf("/proc/self/fd/%d", w.mount.Fd()) }
func (w *workspace) Close() error   { return errors.Join(w.root.Close(), w.mount.Close()) }
