// SPDX-License-Identifier: Apache-2.0

package namespace

import (
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/sandbox/internal/cgroup"
	"github.com/cloister-build/cloister/sandbox/internal/zygote"
	"golang.org/x/sys/unix"
)

// A Backend runs commands in namespaces through one zygote, which it starts on first use and restarts after a crash.
// New makes one; every method of a zero Backend returns an error.
type Backend struct {
	config     Config
	rootless   bool
	landlock   int         // version in force, or 0
	exposed    atomic.Bool // Config.Hidden cannot be hidden here
	noLower    atomic.Bool // Spec.Lower is not supported here
	root       atomic.Bool // Spec.Root and Spec.Superuser are supported here, as Probe found
	conditions atomic.Pointer[[]sandbox.Condition]

	mu         sync.Mutex
	sock       int // of the zygote; -1 if it does not run
	proc       *os.Process
	generation int    // number of zygotes so far
	ended      string // how the last zygote ended
	closed     bool
	groups     *cgroup.Host // nil until the first zygote starts, and without the layer Cgroups
	slots      int          // slots
	busy       int          // slots in use
	free       []*slot      // least recently used first: it has had time to prepare itself
	returned   *sync.Cond   // a slot was released
	open       map[string]*workspace

	lost    atomic.Int64 // runs that slots lost before they began
	mounted atomic.Int64 // number of images so far
	images  sync.Map     // *image by name
	filters sync.Map     // encoded filters by seccomp.Config
}

// New returns a backend. It copies c. The caller closes the backend.
func New(c Config) *Backend {
	c.Without, c.Hidden, c.Source = slices.Clone(c.Without), slices.Clone(c.Hidden), maps.Clone(c.Source)
	for i, dir := range c.Hidden {
		c.Hidden[i] = resolved(dir)
	}
	b := &Backend{config: c, rootless: !ownsUsers(), sock: -1, open: map[string]*workspace{}}
	b.returned = sync.NewCond(&b.mu)
	if c.has(Landlock) {
		b.landlock = zygote.LandlockVersion()
	}
	return b
}

// resolved returns the path of dir as sources of inputs have it: absolute, and without symbolic links if it exists.
func resolved(dir string) string {
	if abs, err := filepath.Abs(dir); err == nil {
		dir = abs
	}
	if source, err := filepath.EvalSymlinks(dir); err == nil {
		dir = source
	}
	return dir
}

// Close ends the zygote and every run.
func (b *Backend) Close() error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.returned == nil {
		return errZero
	}
	b.closed = true
	b.drop(sandbox.ErrClosed.Error())
	b.returned.Broadcast()
	// Their processes are dying; their goroutines read the groups once more.
	late := false
	patience := time.AfterFunc(answerSeconds*time.Second, func() {
		b.mu.Lock()
		defer b.mu.Unlock()
		late = true
		b.returned.Broadcast()
	})
	defer patience.Stop()
	for b.busy > 0 && !late {
		b.returned.Wait()
	}
	if b.busy > 0 {
		return fmt.Errorf("%d runs did not end", b.busy)
	}
	if b.groups == nil {
		return nil
	}
	// Processes killed with the zygote may need a moment to vanish.
	err := b.groups.Close()
	b.groups = nil
	return err
}

// drop forgets the zygote, whose runs die with it. The caller holds b.mu.
func (b *Backend) drop(why string) {
	if b.sock < 0 {
		return
	}
	unix.Close(b.sock)
	_ = b.proc.Kill() // it may have ended
	b.ended = why
	if state, err := b.proc.Wait(); err == nil {
		b.ended += " (" + state.String() + ")"
	}
	b.sock = -1
	for _, s := range b.free {
		s.drop()
	}
}

// ready is like usable, for callers that do not hold b.mu.
func (b *Backend) ready() error {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.usable()
}

// usable returns why b cannot be used, or nil. The caller holds b.mu.
func (b *Backend) usable() error {
	if b.returned == nil {
		return errZero
	}
	if b.closed {
		return sandbox.ErrClosed
	}
	return nil
}

// start starts the zygote if it does not run. The caller holds b.mu.
func (b *Backend) start() error {
	if err := b.usable(); err != nil {
		return err
	}
	if b.sock >= 0 && !hungUp(b.sock) {
		return nil
	}
	b.drop("it died")
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
	b.generation++
	return nil
}

// hungUp reports whether the other end of a socket is closed.
func hungUp(sock int) bool {
	poll := []unix.PollFd{{Fd: int32(sock)}}
	n, err := unix.Poll(poll, 0)
	return err == nil && n == 1
}

// request sends a packet to the zygote and, if answer is set, returns the descriptor in its reply, or -1.
func (b *Backend) request(req []byte, answer bool, fds ...int) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.requestLocked(req, answer, fds...)
}

func (b *Backend) requestLocked(req []byte, answer bool, fds ...int) (int, error) {
	// Twice, since a failure may show that the zygote died.
	var err error
	for range 2 {
		if err := b.start(); err != nil {
			return -1, err
		}
		err = zygote.Send(b.sock, req, fds...)
		if err != nil && !errors.Is(err, unix.EPIPE) && !errors.Is(err, unix.ECONNRESET) {
			// The zygote and all other runs live: only this request failed.
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
			b.drop("it does not answer: " + err.Error())
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

var errZero = errors.New("zero namespace.Backend: make one with New")
