// SPDX-License-Identifier: Apache-2.0

package disk

import (
	"errors"
	"os"

	"golang.org/x/sys/windows"
)

// errHeld is what tryLock fails with if another holds the lock.
var errHeld error = windows.ERROR_LOCK_VIOLATION

// tryLock locks f for as long as it is open, or fails at once. The lock goes with the process, however
// it dies. It covers a byte far behind the text of f, which others are to read.
func tryLock(f *os.File) error {
	const flags = windows.LOCKFILE_EXCLUSIVE_LOCK | windows.LOCKFILE_FAIL_IMMEDIATELY
	return windows.LockFileEx(windows.Handle(f.Fd()), flags, 0, 1, 0, &windows.Overlapped{OffsetHigh: 1})
}

// isFull reports whether err says that the file system, or this user's share of it, is used up.
func isFull(err error) bool {
	return errors.Is(err, windows.ERROR_DISK_FULL) || errors.Is(err, windows.ERROR_HANDLE_DISK_FULL) ||
		errors.Is(err, windows.ERROR_DISK_QUOTA_EXCEEDED)
}

// makePrivate leaves it to the permissions that the directory has.
func makePrivate(string) error { return nil }
