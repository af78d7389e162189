// SPDX-License-Identifier: Apache-2.0

//go:build linux

package namespace

import (
	"errors"
	"time"
)

// KillZygote kills the zygote behind the backend's back, and waits for its end: a run that gets a slot before that
// is lost with it.
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
	return errors.New("the zygote does not end")
}

// Zygote is its process.
func (b *Backend) Zygote() int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.proc.Pid
}

// Slots counts those that were made.
func (b *Backend) Slots() int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.slots
}

// NewAttached is New of a backend that does as on a kernel that copies only mounts that are attached.
func NewAttached(c Config) *Backend {
	c.attached = true
	return New(c)
}

// Lost counts the runs that a slot has lost before they began.
func (b *Backend) Lost() int64 { return b.lost.Load() }

// LeaveNetwork is what ends a run, in a slot whose process is at the other end of a socket.
func LeaveNetwork(sock int) (noRoute int64, err error) { return (&slot{sock: sock}).replaceNetwork() }
