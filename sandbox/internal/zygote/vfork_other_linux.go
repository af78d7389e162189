// SPDX-License-Identifier: Apache-2.0

//go:build linux && !amd64 && !arm64

package zygote

import "golang.org/x/sys/unix"

// vfork is clone(2) of a child that calls becomeCommand, here with a copy of the memory.
//
//go:norace
//go:nosplit
func vfork(flags uintptr, l *launch) (pid, errno uintptr) {
	pid, _, e := unix.RawSyscall6(unix.SYS_CLONE, flags&^(unix.CLONE_VM|unix.CLONE_VFORK), 0, 0, 0, 0, 0)
	if pid == 0 && e == 0 {
		becomeCommand(l)
	}
	return pid, uintptr(e)
}
