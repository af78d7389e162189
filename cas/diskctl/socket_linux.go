// SPDX-License-Identifier: Apache-2.0

package diskctl

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"syscall"

	"golang.org/x/sys/unix"
)

// short calls f with dir and with a path of the socket that fits into the 108 bytes of an address, however long that
// of dir is.
func short[T any](dir string, f func(d *os.File, path string) (T, error)) (T, error) {
	d, err := os.Open(dir)
	if err != nil {
		var none T
		return none, err
	}
	defer d.Close()
	return f(d, fmt.Sprintf("/proc/self/fd/%d/%s", d.Fd(), socket))
}

func listen(dir string) (net.Listener, error) {
	// A socket gets its name with the mode that it has by then: at no time can another user reach it.
	mode := func(_, _ string, c syscall.RawConn) error {
		var err error
		return errors.Join(c.Control(func(fd uintptr) { err = unix.Fchmod(int(fd), 0o600) }), err)
	}
	return short(dir, func(_ *os.File, path string) (net.Listener, error) {
		l, err := (&net.ListenConfig{Control: mode}).Listen(context.Background(), "unix", path)
		if err != nil {
			return nil, err
		}
		l.(*net.UnixListener).SetUnlinkOnClose(false) // by then the descriptor in path is another
		return l, nil
	})
}

func connect(ctx context.Context, dir string) (net.Conn, error) {
	return short(dir, func(d *os.File, path string) (net.Conn, error) {
		conn, err := new(net.Dialer).DialContext(ctx, "unix", path)
		if err != nil {
			return nil, err
		}
		if err := checkPeer(conn.(*net.UnixConn), d); err != nil {
			return nil, errors.Join(err, conn.Close())
		}
		return conn, nil
	})
}

// checkPeer returns an error unless the process behind conn is of the user to whom the directory d belongs: another
// one cannot hold the store.
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
	cerr := raw.Control(func(fd uintptr) { peer, err = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED) })
	if err := errors.Join(cerr, err); err != nil {
		return err
	}
	if peer.Uid != st.Uid {
		return fmt.Errorf("process %d of user %d answers there, and the store belongs to user %d", peer.Pid, peer.Uid, st.Uid)
	}
	return nil
}
