// SPDX-License-Identifier: Apache-2.0

//go:build linux

package namespace

import (
	"context"
	"errors"
	"time"

	"github.com/cloister-build/cloister/sandbox"
)

// KillZygote kills the zygote without the backend noticing, and waits for its end: a run that got a slot before would
// be lost with it.
func (b *Backend) KillZygote() error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if err := b.proc.Kill(); err != nil {
		return err
	}
	for range 10_000 {
		if hungUp(b.sock) {
			return nil
		}
		time.Sleep(time.Millisecond)
	}
	return errors.New("the zygote did not exit")
}

// Zygote returns its process ID.
func (b *Backend) Zygote() int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.proc.Pid
}

// Slots returns the number of slots created.
func (b *Backend) Slots() int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.slots
}

// NewAttached returns a backend that behaves as on kernels that copy attached mounts only.
func NewAttached(c Config) *Backend {
	c.attached = true
	return New(c)
}

// Lost returns how many runs were lost by a slot before they began.
func (b *Backend) Lost() int64 { return b.lost.Load() }

// Stop stops a run that has started, whose pid 1 is at the other end of a socket, and which is given an hour to end by
// itself.
func Stop(ctx context.Context, sock int) {
	r := &run{control: sock, spec: &sandbox.Spec{Grace: time.Hour}}
	r.stop(ctx, &progress{exited: make(chan struct{}), reaped: make(chan struct{})})
}

// LeaveNetwork ends a run in a slot whose process is at the other end of a socket.
func LeaveNetwork(sock int) (noRoute int64, known bool, err error) {
	return (&slot{sock: sock}).replaceNetwork()
}
