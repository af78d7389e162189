// SPDX-License-Identifier: Apache-2.0

package worker

import (
	"io/fs"
	"syscall"
)

// An identity identifies a file with its contents. It changes with them, since no process can set the ctime.
type identity struct {
	device, inode uint64
	size          int64
	mtime, ctime  syscall.Timespec
}

// identityOf returns the identity of the file that info describes, or false if the system provides none.
func identityOf(info fs.FileInfo) (identity, bool) {
	st, ok := info.Sys().(*syscall.Stat_t)
	if !ok {
		return identity{}, false
	}
	return identity{uint64(st.Dev), st.Ino, st.Size, st.Mtim, st.Ctim}, true
}
