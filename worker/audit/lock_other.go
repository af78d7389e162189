// SPDX-License-Identifier: Apache-2.0

//go:build !(linux || darwin || freebsd || netbsd || openbsd || dragonfly)

package audit

import (
	"errors"
	"fmt"
	"os"
)

var errHeld = errors.New("held")

// tryLock fails, because without locks two processes could append to one log. Reading and verifying needs no lock.
func tryLock(*os.File) error {
	return fmt.Errorf("this system has no file locks that end with their process: %w", errors.ErrUnsupported)
}
