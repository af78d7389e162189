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

// A Backend runs commands in namespaces through one zygote, which it starts on first use and again if it died.
type Backend struct {
	config     Config
	rootless   bool
	landlock   int         // version in force, or 0
	exposed    atomic.Bool // Config.Hidden cannot be hidden here
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

// A slot holds one run at a time: a child of the zygote and a control group.
type slot struct {
	number     int
	sock       int // of the process; -1 if it does not run
	generation int // of the zygote that started it
	// base is what the slot has set up. networkClean means that its last run left the network unused.
	base         *zygote.Base
	networkClean bool
	ready        bool // it has reported so
	group        *cgroup.Group
	// last is the workspace of its last run, or nil. While it is open, its contents count as memory of the slot's
	// group.
	last *workspace
}

// New returns a backend. The caller closes it.
func New(c Config) *Backend {
	b := &Backend{config: c, rootless: !ownsUsers(), sock: -1, open: map[string]*workspace{}}
	b.returned = sync.NewCond(&b.mu)
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
	b.drop("the sandbox is closed")
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
	b.proc.Kill()
	b.ended = why
	if state, err := b.proc.Wait(); err == nil {
		b.ended += " (" + state.String() + ")"
	}
	b.sock = -1
	for _, s := range b.free {
		s.drop()
	}
}

// drop forgets the process, which ends.
func (s *slot) drop() {
	if s.sock >= 0 {
		unix.Close(s.sock)
	}
	s.sock, s.base, s.networkClean, s.ready = -1, nil, false, false
}

// start starts the zygote if it does not run. The caller holds b.mu.
func (b *Backend) start() error {
	if b.closed {
		return errClosed
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

// awaitReady waits until the slot is ready; errLostSlot means that it died.
func (s *slot) awaitReady() error {
	if s.ready {
		return nil
	}
	packet, _, err := zygote.Receive(s.sock)
	if isGone(err) {
		s.drop()
		return errLostSlot
	}
	if err == nil && len(packet) != 1 {
		err = fmt.Errorf("unexpected message %q", packet)
	}
	if err != nil {
		s.drop()
		return fmt.Errorf("slot: %w", err)
	}
	s.ready = true
	return nil
}

// launch hands a run and its descriptors to the slot, which is ready; errLostSlot means that it died.
func (s *slot) launch(p *zygote.Plan, control int, streams []int, more []int) error {
	base := p.Base
	if base.SingleUse {
		s.base = nil
	} else if s.base != nil && s.base.Equal(base) {
		p.Base = nil
	}
	p.SameNetwork = s.networkClean
	text, err := p.Append([]byte{zygote.ReqRun})
	if err != nil {
		return err
	}
	var fds []int
	if len(text) > zygote.MaxPacket {
		file, err := memory(text[1:])
		if err != nil {
			return err
		}
		defer unix.Close(file)
		fds, text = append(fds, file), []byte{zygote.ReqFile}
	}
	fds = append(append(append(fds, control), streams...), more...)
	err = zygote.Send(s.sock, text, fds...)
	s.base, s.networkClean, s.ready = base, false, false
	if base.SingleUse {
		s.base = nil
	}
	if isGone(err) {
		s.drop()
		return errLostSlot
	}
	if err != nil {
		s.base = nil
		return fmt.Errorf("slot: %w", err)
	}
	return nil
}

// memory returns a file in memory that holds text.
func memory(text []byte) (int, error) {
	fd, err := unix.MemfdCreate("plan", unix.MFD_CLOEXEC)
	if err != nil {
		return -1, fmt.Errorf("plan: %w", err)
	}
	for len(text) > 0 {
		n, err := unix.Write(fd, text)
		if err != nil {
			unix.Close(fd)
			return -1, fmt.Errorf("plan: %w", err)
		}
		text = text[n:]
	}
	return fd, nil
}

// isGone reports whether an error of a socket means that its peer died.
func isGone(err error) bool {
	return errors.Is(err, os.ErrClosed) || errors.Is(err, unix.EPIPE) || errors.Is(err, unix.ECONNRESET)
}

// explainLost adds how the slot ended to errLostSlot, and returns other errors unchanged.
func (b *Backend) explainLost(s *slot, err error) error {
	if !errors.Is(err, errLostSlot) {
		return err
	}
	return fmt.Errorf("%w: %s", err, b.slotEnd(s))
}

// slotEnd describes how the process of a slot ended after its socket closed.
func (b *Backend) slotEnd(s *slot) string {
	for range 100 {
		if text := b.askSlotEnd(s); text != "" {
			return text
		}
		time.Sleep(10 * time.Millisecond)
	}
	return "it closed its sockets but has not exited"
}

// askSlotEnd returns the same as slotEnd, or "" while the process lives.
func (b *Backend) askSlotEnd(s *slot) string {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.sock >= 0 && hungUp(b.sock) {
		b.drop("it died")
	}
	if b.sock < 0 || s.generation != b.generation {
		return "its zygote ended: " + b.ended
	}
	err := zygote.Send(b.sock, strconv.AppendInt([]byte{zygote.ReqSlotEnd}, int64(s.number), 10))
	var packet []byte
	if err == nil {
		packet, _, err = zygote.Receive(b.sock)
	}
	if err != nil {
		b.drop("it does not answer: " + err.Error())
		return "its zygote ended: " + b.ended
	}
	return string(packet[1:])
}

// replaceNetwork gives the slot's next run a new network and returns how many packets found no route in the old one. A
// slot that was killed since the run ended took its network and the count along: that does not fail the run.
func (s *slot) replaceNetwork() (noRoute int64, err error) {
	var packet []byte
	if err = s.awaitReady(); err == nil {
		err = zygote.Send(s.sock, []byte{zygote.ReqNetwork})
	}
	if err == nil {
		s.ready = false
		packet, _, err = zygote.Receive(s.sock)
	}
	if isGone(err) || errors.Is(err, errLostSlot) {
		s.drop()
		return 0, nil
	}
	if err == nil && len(packet) > 0 && packet[0] == '.' {
		err = errors.New(string(packet[1:]))
	}
	var t zygote.Traffic
	if err == nil {
		err = json.Unmarshal(packet, &t)
	}
	if err != nil {
		s.drop()
		return 0, fmt.Errorf("network of the run: %w", err)
	}
	s.networkClean = true
	return t.NoRoute, nil
}

var errClosed = errors.New("the sandbox is closed")

// errLostSlot means that a slot failed before the run began: another slot may run it.
var errLostSlot = errors.New("the sandbox slot died before the command was executed")

// acquire returns a slot for the caller's own use until release, preferably one that has base set up. It waits until
// one is free.
func (b *Backend) acquire(base *zygote.Base) (*slot, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if err := b.start(); err != nil {
		return nil, err
	}
	s, err := b.pickSlot(base)
	if err != nil {
		return nil, err
	}
	if s.generation != b.generation || s.sock < 0 || b.sock < 0 || hungUp(s.sock) {
		if err := b.startSlot(s); err != nil {
			b.free = append(b.free, s)
			b.returned.Signal()
			return nil, err
		}
	}
	b.busy++
	return s, nil
}

// startSlot starts the process of a slot. The caller holds b.mu.
func (b *Backend) startSlot(s *slot) error {
	s.drop()
	want := zygote.Slot{Number: s.number, Nested: !b.config.has(NoNesting), Attached: b.config.attached}
	var fds []int
	if s.group != nil {
		dir, tasks := s.group.Join()
		if want.Cgroup = dir >= 0; want.Cgroup {
			fds = append(fds, dir)
		}
		for _, f := range tasks {
			fds = append(fds, int(f.Fd()))
		}
		want.Tasks = len(tasks)
	}
	text, err := json.Marshal(want)
	if err != nil {
		return err
	}
	sock, err := b.requestLocked(append([]byte{zygote.ReqSlot}, text...), true, fds...)
	if err != nil {
		return err
	}
	// An unresponsive slot must not hang the worker.
	for _, option := range []int{unix.SO_RCVTIMEO, unix.SO_SNDTIMEO} {
		if err := unix.SetsockoptTimeval(sock, unix.SOL_SOCKET, option, &unix.Timeval{Sec: answerSeconds}); err != nil {
			unix.Close(sock)
			return fmt.Errorf("slot: %w", err)
		}
	}
	s.sock, s.generation, s.ready = sock, b.generation, true
	return nil
}

// pickSlot returns a slot in which a run has all of its memory, if possible. The caller holds b.mu.
func (b *Backend) pickSlot(base *zygote.Base) (*slot, error) {
	for len(b.free) == 0 && b.slots == zygote.MaxSlots && !b.closed {
		b.returned.Wait()
	}
	empty := func(s *slot) bool { return s.last == nil || b.open[s.last.name] != s.last }
	i := slices.IndexFunc(b.free, func(s *slot) bool { return empty(s) && s.base != nil && s.base.Equal(base) })
	if i < 0 {
		i = slices.IndexFunc(b.free, empty)
	}
	if i < 0 && b.slots < zygote.MaxSlots {
		return b.newSlot()
	}
	if len(b.free) == 0 {
		return nil, errClosed
	}
	s := b.free[max(i, 0)]
	b.free = slices.Delete(b.free, max(i, 0), max(i, 0)+1)
	return s, nil
}

// newSlot creates a slot, never without the control group that it needs. The caller holds b.mu.
func (b *Backend) newSlot() (*slot, error) {
	s := &slot{number: b.slots, sock: -1}
	if b.groups != nil && b.groups.Mode() != cgroup.None {
		var err error
		if s.group, err = b.groups.New("slot" + strconv.Itoa(s.number)); err != nil {
			return nil, fmt.Errorf("control group: %w", err)
		}
	}
	b.slots++
	return s, nil
}

// release returns a slot after a run in a workspace.
func (b *Backend) release(s *slot, workspace string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	s.last = b.open[workspace]
	if b.closed || b.sock < 0 {
		s.drop()
	}
	b.free = append(b.free, s)
	b.busy--
	b.returned.Broadcast()
}

// Workspace returns a new detached tmpfs.
func (b *Backend) Workspace(_ context.Context, bytes, files int64) (sandbox.Workspace, error) {
	room := zygote.WorkspaceSize{Bytes: bytes, Files: files}
	fd, err := b.newWorkspace(room)
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
	if b.rootless {
		return nil, fmt.Errorf("%w: an ordinary user cannot mount an EROFS image", sandbox.ErrUnsupported)
	}
	if b.config.attached || !copiesDetached() {
		// It could be attached in one run only.
		return nil, fmt.Errorf("%w: this kernel cannot copy detached mounts (needs Linux 6.15)", sandbox.ErrUnsupported)
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
	return unix.Close(m.fd)
}

// A workspace is a detached mount, reachable through its descriptors only.
type workspace struct {
	b     *Backend
	mount *os.File
	root  *os.Root
	name  string
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
	}
	return err
}
