// SPDX-License-Identifier: Apache-2.0

//go:build linux

package zygote

import (
	"fmt"
	"unsafe"

	"golang.org/x/sys/unix"
)

const (
	lastSignal = 64
	// sigsetSize is what the kernel wants to hear: 64 signals, a bit each.
	sigsetSize = 8
)

// resetSignals gives every signal its default disposition and unblocks it for the calling thread, for two
// reasons. What the worker's parent had ignored or blocked would pass on to the command: the Go runtime
// leaves some of it as it was inherited. And a process of the run may be of the same user as init: to
// pid 1 the kernel delivers no signal from inside that has its default disposition.
//
// The runtime keeps the handler by which it interrupts its own threads (SIGURG); a command gets the
// default of that, too, because a handler does not pass through exec.
func resetSignals() error {
	// The kernel's struct sigaction at its largest: all zero is SIG_DFL with no flags and no mask.
	var byDefault [4]uint64
	for signal := uintptr(1); signal <= lastSignal; signal++ {
		switch unix.Signal(signal) {
		case unix.SIGKILL, unix.SIGSTOP, unix.SIGURG:
			continue
		}
		_, _, errno := unix.RawSyscall6(unix.SYS_RT_SIGACTION, signal,
			uintptr(unsafe.Pointer(&byDefault)), 0, sigsetSize, 0, 0)
		if errno != 0 {
			return fmt.Errorf("reset signal %d: %w", signal, errno)
		}
	}
	if err := unix.PthreadSigmask(unix.SIG_SETMASK, new(unix.Sigset_t), nil); err != nil {
		return fmt.Errorf("unblock signals: %w", err)
	}
	return nil
}
