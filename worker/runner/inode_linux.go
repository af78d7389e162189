// SPDX-License-Identifier: Apache-2.0

package runner

import (
	"io/fs"
	"syscall"
)

// inode returns the number of a file in its file system, or false if this host knows none.
func inode(info fs.FileInfo) (uint64, bool) {
	st, ok := info.Sys().(*syscall.Stat_t)
	if !ok {
		return 0, false
	}
	return st.Ino, true
}
