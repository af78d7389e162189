// SPDX-License-Identifier: Apache-2.0

package durable

import (
	"os"

	"golang.org/x/sys/windows"
)

// ErrLocked is the error of TryLock if the file is locked.
var ErrLocked error = windows.ERROR_LOCK_VIOLATION

// TryLock locks f until it is closed, or fails at once. The lock ends with the process. It covers a byte far beyond the
// text of f, which other processes read.
func TryLock(f *os.File) error {
	const flags = windows.LOCKFILE_EXCLUSIVE_LOCK | windows.LOCKFILE_FAIL_IMMEDIATELY
	return windows.LockFileEx(windows.Handle(f.Fd()), flags, 0, 1, 0, &windows.Overlapped{OffsetHigh: 1})
}
