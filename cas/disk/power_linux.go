// SPDX-License-Identifier: Apache-2.0

package disk

import (
	"os"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// syncFileSystem syncs the file system that holds f.
func syncFileSystem(f *os.File) error {
	return os.NewSyscallError("syncfs", unix.Syncfs(int(f.Fd())))
}

// bootID returns an identifier that changes with each boot, or "" if there is none. While it is the same, everything
// that was written is at least in the page cache.
func bootID() string {
	b, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(b))
}

// fileSystemFiles returns the number of inodes of the file system of dir, or 0 if unknown.
func fileSystemFiles(dir string) int64 {
	var st unix.Statfs_t
	if err := unix.Statfs(dir, &st); err != nil {
		return 0
	}
	return int64(st.Files)
}

// changedAt returns when the inode of a file was last changed, and at the latest when it was named.
func changedAt(fi os.FileInfo) time.Time {
	if st, ok := fi.Sys().(*syscall.Stat_t); ok {
		return time.Unix(st.Ctim.Unix())
	}
	return time.Now()
}
