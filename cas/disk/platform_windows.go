// SPDX-License-Identifier: Apache-2.0

package disk

import (
	"errors"

	"golang.org/x/sys/windows"
)

// isFull reports whether err means that the file system or the user's quota is exhausted.
func isFull(err error) bool {
	return errors.Is(err, windows.ERROR_DISK_FULL) || errors.Is(err, windows.ERROR_HANDLE_DISK_FULL) ||
		errors.Is(err, windows.ERROR_DISK_QUOTA_EXCEEDED)
}

// makePrivate does nothing: the directory keeps its permissions.
func makePrivate(string) error { return nil }
