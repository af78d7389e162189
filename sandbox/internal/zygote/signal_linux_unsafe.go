// SPDX-License-Identifier: Apache-2.0

//go:build linux

package zygote

import (
	"unsafe"

	"golang.org/x/sys/unix"
)

// sigsetSize is what the kernel wants to hear: 64 signals, a bit each.
const sigsetSize = 8

// resetLibcSignals gives the two signals that glibc keeps for itself their default disposition. The Go
// runtime leaves them as they were inherited, and GNU make starts its children with them ignored.
func resetLibcSignals() error {
	// The kernel's struct sigaction at its largest: all zero is SIG_DFL with no flags and no mask.
	var byDefault [4]uint64
	for _, signal := range []uintptr{32, 33} {
		_, _, errno := unix.RawSyscall6(unix.SYS_RT_SIGACTION, signal,
			uintptr(unsafe.Pointer(&byDefault)), 0, sigsetSize, 0, 0)
		if errno != 0 {
			return errno
		}
	}
	return nil
}
