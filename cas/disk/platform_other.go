// SPDX-License-Identifier: Apache-2.0

//go:build !(linux || darwin || freebsd || netbsd || openbsd || dragonfly || windows)

package disk

import (
	"errors"
	"fmt"
	"os"
)

var errHeld = errors.New("held")

// tryLock fails: without a lock two processes could use one directory.
func tryLock(*os.File) error {
	return fmt.Errorf("this system has no file locks that end with the process: %w", errors.ErrUnsupported)
}

func isFull(error) bool { return false }

// makePrivate does nothing: the directory keeps its permissions.
func makePrivate(string) error { return nil }
