// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"fmt"
	"runtime"
	"unsafe"

	"golang.org/x/sys/unix"
)

// call makes a raw system call. An argument is an int, a string, which is passed with a NUL at its end, or a []byte,
// which is passed as a pointer and may be nil.
func call(number int, args ...any) (int, error) {
	var raw [6]uintptr
	var pin runtime.Pinner
	defer pin.Unpin()
	point := func(b []byte) uintptr {
		if len(b) == 0 {
			return 0
		}
		pin.Pin(&b[0])
		return uintptr(unsafe.Pointer(&b[0]))
	}
	for i, a := range args {
		switch a := a.(type) {
		case int:
			raw[i] = uintptr(a)
		case string:
			raw[i] = point(append([]byte(a), 0))
		case []byte:
			raw[i] = point(a)
		default:
			panic(fmt.Sprintf("argument %d of system call %d is a %T", i, number, a))
		}
	}
	n, _, errno := unix.Syscall6(uintptr(number), raw[0], raw[1], raw[2], raw[3], raw[4], raw[5])
	if errno != 0 {
		return -1, errno
	}
	return int(n), nil
}

// address returns the address of b.
func address(b []byte) uintptr { return uintptr(unsafe.Pointer(&b[0])) }

// fork creates a child that only waits, and returns its process ID. The child is a copy of one thread, in which the Go
// runtime does not work, so it makes nothing but system calls.
//
//go:norace
func fork() (int, error) {
	pid, _, errno := unix.RawSyscall6(unix.SYS_CLONE, uintptr(unix.SIGCHLD), 0, 0, 0, 0, 0)
	if errno != 0 {
		return -1, errno
	}
	if pid == 0 {
		for {
			unix.RawSyscall6(unix.SYS_PPOLL, 0, 0, 0, 0, 0, 0)
		}
	}
	return int(pid), nil
}

// cloneThree creates a child with clone3(2), which exits immediately.
//
//go:norace
func cloneThree(flags uint64) error {
	args := [8]uint64{0: flags, 4: uint64(unix.SIGCHLD)}
	pid, _, errno := unix.RawSyscall(unix.SYS_CLONE3, uintptr(unsafe.Pointer(&args)), unsafe.Sizeof(args), 0)
	if errno != 0 {
		return errno
	}
	if pid == 0 {
		for {
			unix.RawSyscall(unix.SYS_EXIT_GROUP, 0, 0, 0)
		}
	}
	_, err := unix.Wait4(int(pid), nil, 0, nil)
	return err
}
