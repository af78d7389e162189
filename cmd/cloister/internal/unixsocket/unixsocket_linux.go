// SPDX-License-Identifier: Apache-2.0

package unixsocket

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"syscall"

	"golang.org/x/sys/unix"
)

// withSocketPath calls f with the open directory and a path of the socket in it that fits into the 108 bytes of a
// socket address, however long dir is.
func withSocketPath[T any](dir, name string, f func(d *os.File, path string) (T, error)) (T, error) {
	d, err := os.Open(dir)
	if err != nil {
		var none T
		return none, err
	}
	defer d.Close()
	return f(d, fmt.Sprintf("/proc/self/fd/%d/%s", d.Fd(), name))
}

// Listen makes the socket name in dir, to which only this user can connect. The caller removes the file.
func Listen(dir, name string) (net.Listener, error) {
	// bind(2) creates the file with this mode: no other user can ever connect.
	mode := func(_, _ string, c syscall.RawConn) error {
		var err error
		return errors.Join(c.Control(func(fd uintptr) { err = unix.Fchmod(int(fd), 0o600) }), err)
	}
	return withSocketPath(dir, name, func(_ *os.File, path string) (net.Listener, error) {
		l, err := (&net.ListenConfig{Control: mode}).Listen(context.Background(), "unix", path)
		if err != nil {
			return nil, err
		}
		l.(*net.UnixListener).SetUnlinkOnClose(false) // path is only valid now
		return l, nil
	})
}

// Dial connects to the socket name in dir. It refuses a process that does not belong to the owner of dir.
func Dial(ctx context.Context, dir, name string) (*net.UnixConn, error) {
	return withSocketPath(dir, name, func(d *os.File, path string) (*net.UnixConn, error) {
		conn, err := new(net.Dialer).DialContext(ctx, "unix", path)
		if err != nil {
			return nil, err
		}
		unix := conn.(*net.UnixConn)
		if err := checkPeer(unix, d); err != nil {
			return nil, errors.Join(err, conn.Close())
		}
		return unix, nil
	})
}

// checkPeer returns an error unless the process behind conn belongs to the owner of the directory d: no other user's
// process may answer there.
func checkPeer(conn *net.UnixConn, d *os.File) error {
	var st unix.Stat_t
	if err := unix.Fstat(int(d.Fd()), &st); err != nil {
		return err
	}
	raw, err := conn.SyscallConn()
	if err != nil {
		return err
	}
	var peer *unix.Ucred
	controlErr := raw.Control(func(fd uintptr) {
		peer, err = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED)
	})
	if err := errors.Join(controlErr, err); err != nil {
		return err
	}
	if peer.Uid != st.Uid {
		return fmt.Errorf("the server process %d belongs to user %d, but the directory belongs to user %d",
			peer.Pid, peer.Uid, st.Uid)
	}
	return nil
}
