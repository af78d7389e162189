// SPDX-License-Identifier: Apache-2.0

package ramdir

import "golang.org/x/sys/unix"

// available reports whether shm is in memory and has a GiB free. In containers it often has 64 MiB.
func available() bool {
	var st unix.Statfs_t
	err := unix.Statfs(shm, &st)
	return err == nil && st.Type == unix.TMPFS_MAGIC && st.Bavail*uint64(st.Bsize) >= 1<<30
}
