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

// sinceBoot returns the time since the machine was started, including suspensions, or 0.
func sinceBoot() time.Duration { return clockTime(unix.CLOCK_BOOTTIME) }

// asleep returns the time for which the machine was suspended since it was started. Small differences are inaccuracies.
func asleep() time.Duration {
	return (clockTime(unix.CLOCK_BOOTTIME) - clockTime(unix.CLOCK_MONOTONIC)).Truncate(time.Second)
}

func clockTime(clock int32) time.Duration {
	var ts unix.Timespec
	if err := unix.ClockGettime(clock, &ts); err != nil {
		return 0
	}
	return time.Duration(ts.Nano())
}

// accessForWriting returns an error if the file system of path is known to be read-only.
func accessForWriting(path string) error {
	return os.NewSyscallError("access", unix.Access(path, unix.W_OK))
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
