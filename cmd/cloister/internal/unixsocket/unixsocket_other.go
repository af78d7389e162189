// SPDX-License-Identifier: Apache-2.0

//go:build !linux

package unixsocket

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"syscall"
)

// noSockets is WSAEAFNOSUPPORT of Wine and of Windows before version 1803. Other systems have no such error.
const noSockets = syscall.Errno(10047)

// Listen makes the socket name in dir, to which only this user can connect. The caller removes the file. The error is
// errors.ErrUnsupported on systems without Unix sockets.
func Listen(dir, name string) (net.Listener, error) {
	path := filepath.Join(dir, name)
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if errors.Is(err, noSockets) {
		err = fmt.Errorf("%w: %w", errors.ErrUnsupported, err)
	}
	if err != nil {
		return nil, err
	}
	l.SetUnlinkOnClose(false)
	if err := os.Chmod(path, 0o600); err != nil {
		return nil, errors.Join(err, l.Close())
	}
	return l, nil
}

// Dial connects to the socket name in dir.
func Dial(ctx context.Context, dir, name string) (*net.UnixConn, error) {
	conn, err := new(net.Dialer).DialContext(ctx, "unix", filepath.Join(dir, name))
	if err != nil {
		return nil, err
	}
	return conn.(*net.UnixConn), nil
}
