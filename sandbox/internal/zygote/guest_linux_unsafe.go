// SPDX-License-Identifier: Apache-2.0

//go:build linux

package zygote

import (
	"fmt"
	"unsafe"

	"golang.org/x/sys/unix"
)

// filterThread installs an encoded system call filter for this thread and its children.
func filterThread(filter []byte) error {
	if len(filter) == 0 {
		return nil
	}
	prog := unix.SockFprog{Len: uint16(len(filter) / 8), Filter: (*unix.SockFilter)(unsafe.Pointer(&filter[0]))}
	if err := unix.Prctl(unix.PR_SET_SECCOMP, unix.SECCOMP_MODE_FILTER, uintptr(unsafe.Pointer(&prog)), 0, 0); err != nil {
		return fmt.Errorf("system call filter (seccomp): %w", err)
	}
	return nil
}
