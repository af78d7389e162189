// SPDX-License-Identifier: Apache-2.0

//go:build !linux

package diskctl

import (
	"context"
	"errors"
	"net"
	"os"
	"path/filepath"
)

func listen(dir string) (net.Listener, error) {
	path := filepath.Join(dir, socket)
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		return nil, err
	}
	l.SetUnlinkOnClose(false) // Server.Close removes the socket
	if err := os.Chmod(path, 0o600); err != nil {
		return nil, errors.Join(err, l.Close())
	}
	return l, nil
}

func connect(ctx context.Context, dir string) (net.Conn, error) {
	return new(net.Dialer).DialContext(ctx, "unix", filepath.Join(dir, socket))
}
