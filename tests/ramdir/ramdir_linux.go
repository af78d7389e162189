// SPDX-License-Identifier: Apache-2.0

package ramdir

import "golang.org/x/sys/unix"

// available reports whether shm is in memory, has a GiB free and permits execution, since tests build programs. In
// containers it often has 64 MiB, and hardened machines forbid execution.
func available() bool {
	var st unix.Statfs_t
	err := unix.Statfs(shm, &st)
	return err == nil && st.Type == unix.TMPFS_MAGIC && st.Flags&unix.MS_NOEXEC == 0 && st.Bavail*uint64(st.Bsize) >= 1<<30
}
