// SPDX-License-Identifier: Apache-2.0

//go:build linux

package monitor

import (
	"unsafe"

	"golang.org/x/sys/unix"
)

// A notification is the kernel's struct seccomp_notif: a call that waits for its answer.
type notification struct {
	ID    uint64
	PID   uint32 // of the thread
	Flags uint32
	Nr    int32
	Arch  uint32
	IP    uint64
	Args  [6]uint64
}

// An answer is the kernel's struct seccomp_notif_resp.
type answer struct {
	ID    uint64
	Val   int64
	Error int32
	Flags uint32
}

// A queue is the listener of a filter.
type queue struct {
	fd int
	// buf holds a notification of this kernel, which may be larger than ours; uint64 for alignment.
	buf []uint64
}

// newQueue returns the queue of a listener.
func newQueue(fd int) *queue {
	var sizes struct{ notification, answer, data uint16 }
	// If this fails the structures are those of the first kernel that had them, as above.
	_, _, _ = unix.Syscall(unix.SYS_SECCOMP, unix.SECCOMP_GET_NOTIF_SIZES, 0, uintptr(unsafe.Pointer(&sizes)))
	size := max(int(sizes.notification), int(unsafe.Sizeof(notification{})))
	// The two processes alternate and are fastest on one processor. Kernels before 6.6 do not
	// support it.
	_, _, _ = unix.Syscall(unix.SYS_IOCTL, uintptr(fd), unix.SECCOMP_IOCTL_NOTIF_SET_FLAGS, unix.SECCOMP_USER_NOTIF_FD_SYNC_WAKE_UP)
	return &queue{fd: fd, buf: make([]uint64, (size+7)/8)}
}

// receive returns the next call. It blocks if there is none. ENOENT means that its process was killed or interrupted
// meanwhile.
func (q *queue) receive() (notification, error) {
	clear(q.buf) // required by the kernel
	n := (*notification)(unsafe.Pointer(&q.buf[0]))
	_, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(q.fd), unix.SECCOMP_IOCTL_NOTIF_RECV, uintptr(unsafe.Pointer(n)))
	if errno != 0 {
		return notification{}, errno
	}
	return *n, nil
}

// proceed lets a call continue; fail makes it return an error, value a value. They report whether the process waited in
// this call all the time. If not, what was read from it may be another process's.
func (q *queue) proceed(id uint64) bool {
	return q.send(answer{ID: id, Flags: unix.SECCOMP_USER_NOTIF_FLAG_CONTINUE})
}

func (q *queue) fail(id uint64, with unix.Errno) bool {
	return q.send(answer{ID: id, Error: -int32(with)})
}

func (q *queue) value(id uint64, v int64) bool { return q.send(answer{ID: id, Val: v}) }

func (q *queue) send(a answer) bool {
	for {
		_, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(q.fd), unix.SECCOMP_IOCTL_NOTIF_SEND, uintptr(unsafe.Pointer(&a)))
		if errno != unix.EINTR {
			return errno == 0
		}
	}
}

// sendFD answers a call with a new descriptor for fd (Linux 5.14). ENOENT means that the call no longer waits. After
// other errors it still waits.
func (q *queue) sendFD(id uint64, fd int, flags uint32) error {
	a := struct { // struct seccomp_notif_addfd
		id                         uint64
		flags, from, to, fileFlags uint32
	}{id, unix.SECCOMP_ADDFD_FLAG_SEND, uint32(fd), 0, flags}
	for {
		_, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(q.fd), unix.SECCOMP_IOCTL_NOTIF_ADDFD, uintptr(unsafe.Pointer(&a)))
		switch errno {
		case 0:
			return nil
		case unix.EINTR:
		default:
			return errno
		}
	}
}

// valid reports whether a call still waits.
func (q *queue) valid(id uint64) bool {
	_, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(q.fd), unix.SECCOMP_IOCTL_NOTIF_ID_VALID, uintptr(unsafe.Pointer(&id)))
	return errno == 0
}
