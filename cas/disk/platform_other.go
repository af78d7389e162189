// SPDX-License-Identifier: Apache-2.0

//go:build !(linux || darwin || freebsd || netbsd || openbsd || dragonfly || windows)

package disk

import (
	"errors"
	"fmt"
	"os"
)

var errHeld = errors.New("held")

// tryLock refuses: without a lock two processes could hold one directory.
func tryLock(*os.File) error {
	return fmt.Errorf("this system has no lock that dies with its process: %w", errors.ErrUnsupported)
}

func isFull(error) bool { return false }

// makePrivate leaves it to the permissions that the directory has.
func makePrivate(string) error { return nil }
