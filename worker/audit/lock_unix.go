// SPDX-License-Identifier: Apache-2.0

//go:build linux || darwin || freebsd || netbsd || openbsd || dragonfly

package audit

import (
	"os"
	"syscall"
)

// errHeld is what tryLock fails with if another holds the lock.
var errHeld error = syscall.EWOULDBLOCK

// tryLock locks f for as long as it is open, or fails at once. The lock goes with the process, however
// it dies.
func tryLock(f *os.File) error {
	for {
		err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
		if err != syscall.EINTR {
			return err
		}
	}
}
