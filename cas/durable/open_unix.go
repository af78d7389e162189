// SPDX-License-Identifier: Apache-2.0

//go:build unix

package durable

import "syscall"

// nonblock makes open(2) of a pipe return at once. It has no effect on regular files.
const nonblock = syscall.O_NONBLOCK
