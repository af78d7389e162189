// SPDX-License-Identifier: Apache-2.0

package namespace

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"
	"time"

	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/sandbox/internal/cgroup"
	"github.com/cloister-build/cloister/sandbox/internal/zygote"
	"golang.org/x/sys/unix"
)

// A slot holds one run at a time: a child of the zygote and a control group.
type slot struct {
	number     int
	sock       int // of the process; -1 if it does not run
	generation int // of the zygote that started it
	// base is what the slot has set up. networkClean means that its last run left the network unused.
	base         *zygote.Base
	networkClean bool
	// resolver and sockets are those of zygote.Report.Resolving, nil if its network has none.
	resolver, sockets *os.File
	ready             bool // it has reported so
	group             *cgroup.Group
	// last is the workspace of its last run, or nil. While it is open, its contents count as memory of the slot's
	// group.
	last *workspace
}

// drop forgets the process, which ends.
func (s *slot) drop() {
	if s.sock >= 0 {
		unix.Close(s.sock)
	}
	s.sock, s.base, s.networkClean, s.ready = -1, nil, false, false
	s.setResolver(nil, nil)
}

// setResolver replaces the resolver and sockets, which it closes.
func (s *slot) setResolver(resolver, sockets *os.File) {
	for _, f := range []*os.File{s.resolver, s.sockets} {
		if f != nil {
			f.Close()
		}
	}
	s.resolver, s.sockets = resolver, sockets
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
	if !s.networkClean || !base.Notify || !base.Loopback {
		s.setResolver(nil, nil) // of a network that this run does not get
	}
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
// slot that was killed since the run ended took its network and the count along: the run does not fail, but the count
// is unknown.
func (s *slot) replaceNetwork() (noRoute int64, known bool, err error) {
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
		return 0, false, nil
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
		return 0, false, fmt.Errorf("network of the run: %w", err)
	}
	s.networkClean = true
	s.setResolver(nil, nil)
	return t.NoRoute, true, nil
}

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
		return nil, sandbox.ErrClosed
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
	if b.closed || b.sock < 0 || !b.rootOpen(s) {
		s.drop()
	}
	b.free = append(b.free, s)
	b.busy--
	b.returned.Broadcast()
}
