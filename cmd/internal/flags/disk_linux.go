// SPDX-License-Identifier: Apache-2.0

package flags

import (
	"fmt"

	"golang.org/x/sys/unix"
)

// DiskBytes returns the size of the file system that holds dir.
func DiskBytes(dir string) (int64, error) {
	var st unix.Statfs_t
	if err := unix.Statfs(dir, &st); err != nil {
		return 0, fmt.Errorf("size of the disk of %s: %w", dir, err)
	}
	return int64(st.Blocks) * st.Bsize, nil
}
