// SPDX-License-Identifier: Apache-2.0

package zygote

import (
	"errors"
	"os"
	"sync"
	"syscall"
	"testing"

	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
	"golang.org/x/sys/unix"
)

// TestTruncatedPacketCostsNoOther: a packet whose descriptor cannot be received, since this process has too many files
// open, returns ErrTruncated, leaks nothing, and the next one arrives.
func TestTruncatedPacketCostsNoOther(t *testing.T) {
	sv, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	must.Succeed(t, err)
	defer unix.Close(sv[0])
	defer unix.Close(sv[1])
	for _, packet := range []string{"first", "second"} {
		must.Succeed(t, Send(sv[0], []byte(packet), sv[0]))
	}
	free, err := unix.FcntlInt(uintptr(sv[0]), unix.F_DUPFD_CLOEXEC, 0)
	must.Succeed(t, err)
	unix.Close(free)
	var before syscall.Rlimit
	must.Succeed(t, syscall.Getrlimit(unix.RLIMIT_NOFILE, &before))
	must.Succeed(t, syscall.Setrlimit(unix.RLIMIT_NOFILE, &syscall.Rlimit{Cur: uint64(free), Max: before.Max}))
	_, fds, err := Receive(sv[1])
	must.Succeed(t, syscall.Setrlimit(unix.RLIMIT_NOFILE, &before))
	expect.That(t, errors.Is(err, ErrTruncated) && len(fds) == 0,
		"got %v, %v, want no descriptors and ErrTruncated", fds, err)
	packet, fds, err := Receive(sv[1])
	expect.That(t, err == nil && string(packet) == "second" && len(fds) == 1,
		"next packet: got %q, %v, %v, want second with one descriptor", packet, fds, err)
	closeAll(fds)
}

// TestReceiveAfterReset: a packet is received even if its sender closed with unread data.
func TestReceiveAfterReset(t *testing.T) {
	sv := must.Get(unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0))(t)
	defer unix.Close(sv[0])
	must.Succeed(t, Send(sv[0], []byte("kill")))
	must.Succeed(t, Send(sv[1], []byte("last words")))
	unix.Close(sv[1])
	if got, _, err := Receive(sv[0]); err != nil || string(got) != "last words" {
		t.Errorf("got %q, %v, want last words", got, err)
	}
	if got, _, err := Receive(sv[0]); !errors.Is(err, os.ErrClosed) {
		t.Errorf("after the end: got %q, %v, want ErrClosed", got, err)
	}
}

// TestEndComesAfterTheLastPacket: the last packet of a sender that closes is received, whenever the receiver looks. A
// receiver that trusts the first end loses one packet in some hundreds to a thousand here.
func TestEndComesAfterTheLastPacket(t *testing.T) {
	ends := make(chan int)
	var sending sync.WaitGroup
	sending.Go(func() {
		for fd := range ends {
			expect.Error(t, Send(fd, []byte("last words")), nil)
			unix.Close(fd)
		}
	})
	defer sending.Wait()
	defer close(ends)
	for i := range 20_000 {
		sv, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
		must.Succeed(t, err)
		must.Succeed(t, unix.SetNonblock(sv[0], true))
		ends <- sv[1]
		var got []byte
		for err = unix.EAGAIN; errors.Is(err, unix.EAGAIN); {
			got, _, err = Receive(sv[0])
		}
		if err == nil {
			_, _, err = Receive(sv[0])
			for errors.Is(err, unix.EAGAIN) {
				_, _, err = Receive(sv[0])
			}
		}
		unix.Close(sv[0])
		must.Be(t, string(got) == "last words" && errors.Is(err, os.ErrClosed),
			"pair %d: got %q and then %v, want the packet and then ErrClosed", i, got, err)
	}
}
