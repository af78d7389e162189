// SPDX-License-Identifier: Apache-2.0

//go:build !linux && !plan9

package fault

import "syscall"

var unreadable = []syscall.Errno{
	syscall.EIO, syscall.EBADMSG, syscall.EACCES, syscall.EPERM, syscall.EISDIR, syscall.ENXIO, syscall.ENODEV,
	syscall.ELOOP, syscall.ENOTDIR, syscall.ESTALE,
}

var ours = []syscall.Errno{
	syscall.EMFILE, syscall.ENFILE, syscall.ENOMEM, syscall.ENOBUFS, syscall.EAGAIN, syscall.EINTR,
}
