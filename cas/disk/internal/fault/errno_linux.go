// SPDX-License-Identifier: Apache-2.0

package fault

import "syscall"

var unreadable = []syscall.Errno{
	// The device, or a checksum of the file system.
	syscall.EIO, syscall.EBADMSG, syscall.EUCLEAN, syscall.ENODATA, syscall.EILSEQ, syscall.EREMOTEIO, syscall.ENOKEY,
	// The permissions, or a security module. Only the owner of a file may open it with O_NOATIME.
	syscall.EACCES, syscall.EPERM,
	// Something else is in its place: a directory, a socket, a device without a driver, a symlink, or a parent that is
	// a file; or a network file system has lost it.
	syscall.EISDIR, syscall.ENXIO, syscall.ENODEV, syscall.ELOOP, syscall.ENOTDIR, syscall.ESTALE,
}

var ours = []syscall.Errno{
	syscall.EMFILE, syscall.ENFILE, syscall.ENOMEM, syscall.ENOBUFS, syscall.EAGAIN, syscall.EINTR,
}
