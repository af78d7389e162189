// SPDX-License-Identifier: Apache-2.0

//go:build linux

package zygote

import (
	"fmt"
	"unsafe"

	"golang.org/x/sys/unix"
)

// These functions wait without notifying the Go scheduler, which would hand this thread's processor to another thread
// and back. Unaware, it finds that the thread runs for too long and asks it to yield. The hooks of a fork clear that
// request and block signals.

// read is read(2).
//
//go:norace
//go:nosplit
func read(fd int, b []byte) (int, error) {
	at := unsafe.Pointer(unsafe.SliceData(b))
	beforeFork()
	n, _, errno := unix.RawSyscall(unix.SYS_READ, uintptr(fd), uintptr(at), uintptr(len(b)))
	afterFork()
	if errno != 0 {
		return 0, errno
	}
	return int(n), nil
}

// wait is wait4(2).
//
//go:norace
//go:nosplit
func wait(pid int, ws *uint32, ru *unix.Rusage) error {
	beforeFork()
	_, _, errno := unix.RawSyscall6(unix.SYS_WAIT4, uintptr(pid), uintptr(unsafe.Pointer(ws)), 0, uintptr(unsafe.Pointer(ru)), 0, 0)
	afterFork()
	if errno != 0 {
		return errno
	}
	return nil
}

// readable waits until the socket can be read.
//
//go:norace
//go:nosplit
func readable(poll *unix.PollFd) error {
	beforeFork()
	_, _, errno := unix.RawSyscall6(unix.SYS_PPOLL, uintptr(unsafe.Pointer(poll)), 1, 0, 0, 0, 0)
	afterFork()
	if errno != 0 {
		return errno
	}
	return nil
}

// receive is Receive with a wait that bypasses the scheduler.
func receive(sock int) ([]byte, []int, error) {
	for {
		err := readable(&unix.PollFd{Fd: int32(sock), Events: unix.POLLIN})
		if err == unix.EINTR {
			continue
		}
		if err != nil {
			return nil, nil, fmt.Errorf("wait for a request: %w", err)
		}
		return Receive(sock)
	}
}
