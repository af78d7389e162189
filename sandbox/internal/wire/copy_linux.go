// SPDX-License-Identifier: Apache-2.0

package wire

import (
	"errors"
	"io"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// CopyInput copies what is read from the descriptor in to w until its end, an error, or the end of wake, a pipe. It does
// not change the state of in, which may be shared with other processes. If one of them takes what there is to read, it
// waits for more in spite of wake, unless in is a pipe or socket and the kernel can read it without waiting.
func CopyInput(w io.Writer, in int, wake *os.File) {
	buf := make([]byte, maxData)
	read := reader(in)
	for {
		poll := []unix.PollFd{{Fd: int32(in), Events: unix.POLLIN}, {Fd: int32(wake.Fd()), Events: unix.POLLIN}}
		if _, err := unix.Poll(poll, -1); err != nil && err != unix.EINTR {
			return
		}
		if poll[1].Revents != 0 {
			return
		}
		if poll[0].Revents == 0 {
			continue
		}
		n, err := read(buf)
		if err == unix.EINTR || err == unix.EAGAIN {
			continue
		}
		if err != nil || n == 0 {
			return
		}
		if _, err := w.Write(buf[:n]); err != nil {
			return
		}
	}
}

// reader returns a function that reads from a descriptor, if possible without waiting (preadv2(2)). Files always have
// something to read, and would only say that it is not in memory.
func reader(in int) func([]byte) (int, error) {
	var st unix.Stat_t
	if err := unix.Fstat(in, &st); err != nil || st.Mode&unix.S_IFMT != unix.S_IFIFO && st.Mode&unix.S_IFMT != unix.S_IFSOCK {
		return func(b []byte) (int, error) { return unix.Read(in, b) }
	}
	return func(b []byte) (int, error) {
		n, err := unix.Preadv2(in, [][]byte{b}, -1, unix.RWF_NOWAIT)
		if err == unix.EOPNOTSUPP || err == unix.ENOSYS {
			n, err = unix.Read(in, b)
		}
		return n, err
	}
}

// CopyOutput copies a pipe to w until all writers have closed it or, after a read deadline, until nothing is left in it.
// It closes the pipe, so that later writers get SIGPIPE instead of waiting forever.
func CopyOutput(w io.Writer, r *os.File) error {
	defer r.Close()
	_, err := io.Copy(w, struct{ io.Reader }{r}) // without ReadFrom, so that a deadline applies to r only
	if errors.Is(err, os.ErrDeadlineExceeded) {
		err = drain(w, r)
	}
	return err
}

// maxPipe is the maximum size of a pipe (F_SETPIPE_SZ) for users without privileges.
const maxPipe = 1 << 20

// drain copies what is in a pipe.
func drain(w io.Writer, r *os.File) error {
	if err := r.SetReadDeadline(time.Time{}); err != nil {
		return err
	}
	conn, err := r.SyscallConn()
	if err != nil {
		return err
	}
	b := make([]byte, 32<<10)
	for total := 0; total < maxPipe; {
		n := 0
		waited := conn.Read(func(fd uintptr) bool {
			n, err = unix.Read(int(fd), b)
			return true
		})
		switch {
		case waited != nil:
			return waited
		case err == unix.EINTR:
			continue
		case err == unix.EAGAIN, n <= 0:
			return nil
		}
		if _, err := w.Write(b[:n]); err != nil {
			return err
		}
		total += n
	}
	return nil
}
