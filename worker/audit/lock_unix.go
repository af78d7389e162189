// SPDX-License-Identifier: Apache-2.0

//go:build linux || darwin || freebsd || netbsd || openbsd || dragonfly

package audit

import (
	"os"
	"syscall"
)

// errHeld is the error of tryLock if another process holds the lock.
var errHeld error = syscall.EWOULDBLOCK

// tryLock locks f until it is closed, or fails immediately. The kernel releases the lock when the process ends.
func tryLock(f *os.File) error {
	for {
		err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
		if err != syscall.EINTR {
			return err
		}
	}
}
