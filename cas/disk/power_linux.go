// SPDX-License-Identifier: Apache-2.0

package disk

import (
	"os"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// syncFileSystem writes the file system that holds f to its disk.
func syncFileSystem(f *os.File) error {
	return os.NewSyscallError("syncfs", unix.Syncfs(int(f.Fd())))
}

// bootID returns what is different after each start of the machine, or "" if that is not known: until then, all that
// was written is at least in the memory of the kernel.
func bootID() string {
	b, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(b))
}

// fileSystemFiles returns how many files the file system of dir can hold, or 0 if it does not say.
func fileSystemFiles(dir string) int64 {
	var st unix.Statfs_t
	if err := unix.Statfs(dir, &st); err != nil {
		return 0
	}
	return int64(st.Files)
}

// namedAt returns when the inode of a file was changed last: its name is as old, or older.
func namedAt(fi os.FileInfo) time.Time {
	if st, ok := fi.Sys().(*syscall.Stat_t); ok {
		return time.Unix(st.Ctim.Unix())
	}
	return time.Now()
}
