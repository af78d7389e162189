// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"syscall"

	"golang.org/x/sys/unix"
)

// machineCalls are calls of this architecture: number and three arguments.
var machineCalls = map[string][4]int{
	"iopl":          {unix.SYS_IOPL, 3, 0, 0},
	"ioperm":        {unix.SYS_IOPERM, 0x80, 1, 1},
	"modify_ldt":    {unix.SYS_MODIFY_LDT, 0, 0, 0},
	"create_module": {unix.SYS_CREATE_MODULE, 0, 0, 0},
	"nfsservctl":    {unix.SYS_NFSSERVCTL, 0, 0, 0},
}

// int80 makes a system call without arguments like a program for i386.
func int80(number uintptr) uintptr

// foreign makes calls by the numbers of other architectures, which a filter may have overlooked: getpid of x32 and of
// i386. Each is made by a child, because a filter may answer with a signal.
func foreign(r *report, _ []string) {
	for _, kind := range []string{"x32", "i386"} {
		pid, err := syscall.ForkExec(self, []string{"hostile", "child-" + kind}, &syscall.ProcAttr{Files: []uintptr{0}})
		if !r.must("start", err) {
			return
		}
		var ws unix.WaitStatus
		switch _, err := unix.Wait4(pid, &ws, 0, nil); {
		case !r.must("wait", err):
		case ws.ExitStatus() == exitEscaped:
			r.escape("getpid of %s succeeded", kind)
		case ws.ExitStatus() == 0:
			r.hold("getpid of %s failed", kind)
		default: // the Go runtime turns SIGSYS into an exit code
			r.hold("getpid of %s killed the process: %#x", kind, ws)
		}
	}
}

func x32(*report, []string) {
	if _, _, errno := unix.RawSyscall(0x40000000|unix.SYS_GETPID, 0, 0, 0); errno == 0 {
		os.Exit(exitEscaped)
	}
	os.Exit(0)
}

func i386(*report, []string) {
	const getpid = 20
	if int32(int80(getpid)) > 0 {
		os.Exit(exitEscaped)
	}
	os.Exit(0)
}

func init() {
	attacks["child-x32"], attacks["child-i386"] = x32, i386
}
