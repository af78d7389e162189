// SPDX-License-Identifier: Apache-2.0

//go:build linux || darwin || freebsd || netbsd || openbsd || dragonfly

package durable

import (
	"os"
	"syscall"
)

// ErrLocked is the error of TryLock if the file is locked.
var ErrLocked error = syscall.EWOULDBLOCK

// TryLock locks f until it is closed, or fails at once. The lock ends with the process.
func TryLock(f *os.File) error {
	for {
		err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
		if err != syscall.EINTR {
			return err
		}
	}
}
