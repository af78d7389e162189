// SPDX-License-Identifier: Apache-2.0

//go:build !linux

package farmworker

import "syscall"

// tcpTimeout leaves a connection as this system has it.
func tcpTimeout(_, _ string, _ syscall.RawConn) error { return nil }
