// SPDX-License-Identifier: Apache-2.0

package disk

import (
	"errors"
	"os"

	"golang.org/x/sys/windows"
)

// errHeld is the error of tryLock if the file is locked.
var errHeld error = windows.ERROR_LOCK_VIOLATION

// tryLock locks f while it is open, or fails at once. The lock ends with the process. It covers a byte far beyond the
// text of f, which other processes read.
func tryLock(f *os.File) error {
	const flags = windows.LOCKFILE_EXCLUSIVE_LOCK | windows.LOCKFILE_FAIL_IMMEDIATELY
	return windows.LockFileEx(windows.Handle(f.Fd()), flags, 0, 1, 0, &windows.Overlapped{OffsetHigh: 1})
}

// isFull reports whether err means that the file system or the user's quota is exhausted.
func isFull(err error) bool {
	return errors.Is(err, windows.ERROR_DISK_FULL) || errors.Is(err, windows.ERROR_HANDLE_DISK_FULL) ||
		errors.Is(err, windows.ERROR_DISK_QUOTA_EXCEEDED)
}

// makePrivate does nothing: the directory keeps its permissions.
func makePrivate(string) error { return nil }
