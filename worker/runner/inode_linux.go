// SPDX-License-Identifier: Apache-2.0

package runner

import (
	"fmt"
	"io/fs"
	"syscall"

	"github.com/cloister-build/cloister/sandbox"
)

// inode returns the inode number of a file.
func inode(info fs.FileInfo) (uint64, error) {
	st, ok := info.Sys().(*syscall.Stat_t)
	if !ok {
		return 0, fmt.Errorf("%w: files have no inode numbers", sandbox.ErrUnsupported)
	}
	return st.Ino, nil
}
