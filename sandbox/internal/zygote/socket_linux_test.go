// SPDX-License-Identifier: Apache-2.0

package zygote

import (
	"errors"
	"os"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

// TestTruncatedPacketCostsNoOther: a packet whose descriptor cannot be received, since this process has as
// many open as it may, is told apart, leaks nothing, and the next one arrives.
func TestTruncatedPacketCostsNoOther(t *testing.T) {
	sv, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(sv[0])
	defer unix.Close(sv[1])
	for _, packet := range []string{"first", "second"} {
		if err := Send(sv[0], []byte(packet), sv[0]); err != nil {
			t.Fatal(err)
		}
	}
	free, err := unix.FcntlInt(uintptr(sv[0]), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	unix.Close(free)
	var before syscall.Rlimit
	if err := syscall.Getrlimit(unix.RLIMIT_NOFILE, &before); err != nil {
		t.Fatal(err)
	}
	if err := syscall.Setrlimit(unix.RLIMIT_NOFILE, &syscall.Rlimit{Cur: uint64(free), Max: before.Max}); err != nil {
		t.Fatal(err)
	}
	_, fds, err := Receive(sv[1])
	if restoreErr := syscall.Setrlimit(unix.RLIMIT_NOFILE, &before); restoreErr != nil {
		t.Fatal(restoreErr)
	}
	if !errors.Is(err, ErrTruncated) || len(fds) > 0 {
		t.Errorf("got %v, %v, want ErrTruncated", fds, err)
	}
	packet, fds, err := Receive(sv[1])
	if err != nil || string(packet) != "second" || len(fds) != 1 {
		t.Errorf("the next packet: got %q, %v, %v", packet, fds, err)
	}
	closeAll(fds)
}

// TestReceiveAfterReset: what was sent is received, even if its sender went away with something unread.
func TestReceiveAfterReset(t *testing.T) {
	sv, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(sv[0])
	if err := Send(sv[0], []byte("kill")); err != nil {
		t.Fatal(err)
	}
	if err := Send(sv[1], []byte("last words")); err != nil {
		t.Fatal(err)
	}
	unix.Close(sv[1])
	if got, _, err := Receive(sv[0]); err != nil || string(got) != "last words" {
		t.Errorf("got %q, %v", got, err)
	}
	if got, _, err := Receive(sv[0]); !errors.Is(err, os.ErrClosed) {
		t.Errorf("after the end: got %q, %v", got, err)
	}
}
