// SPDX-License-Identifier: Apache-2.0

//go:build !(linux || darwin || freebsd || netbsd || openbsd || dragonfly || windows)

package durable

import (
	"errors"
	"fmt"
	"os"
)

// ErrLocked is the error of TryLock if the file is locked.
var ErrLocked = errors.New("locked")

// TryLock fails: without locks two processes could use one file.
func TryLock(*os.File) error {
	return fmt.Errorf("this system has no file locks that end with their process: %w", errors.ErrUnsupported)
}
