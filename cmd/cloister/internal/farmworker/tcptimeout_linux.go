// SPDX-License-Identifier: Apache-2.0

package farmworker

import (
	"errors"
	"syscall"

	"golang.org/x/sys/unix"
)

// tcpTimeout ends a connection whose data stays unacknowledged for half a minute.
func tcpTimeout(_, _ string, c syscall.RawConn) error {
	var err error
	failed := c.Control(func(fd uintptr) { err = unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT, 30_000) })
	return errors.Join(failed, err)
}
