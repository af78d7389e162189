// SPDX-License-Identifier: Apache-2.0

//go:build !linux

package farmworker

import "syscall"

// tcpTimeout keeps the defaults of this system.
func tcpTimeout(_, _ string, _ syscall.RawConn) error { return nil }
