// SPDX-License-Identifier: Apache-2.0

package worker

import (
	"io/fs"
	"syscall"
)

// An identity is that of a file with its contents: it does not come again once they change, for nobody can set ctime.
type identity struct {
	device, inode uint64
	size          int64
	mtime, ctime  syscall.Timespec
}

// identityOf returns the identity of what info is about, or false if this host knows none.
func identityOf(info fs.FileInfo) (identity, bool) {
	st, ok := info.Sys().(*syscall.Stat_t)
	if !ok {
		return identity{}, false
	}
	return identity{uint64(st.Dev), st.Ino, st.Size, st.Mtim, st.Ctim}, true
}
