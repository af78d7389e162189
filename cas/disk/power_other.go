// SPDX-License-Identifier: Apache-2.0

//go:build !linux

package disk

import (
	"errors"
	"os"
	"time"
)

// syncFileSystem is not to be had: each Open reads all that was put without Config.Sync.
func syncFileSystem(*os.File) error { return errors.ErrUnsupported }

// bootID returns "": whether there was a loss of power is not known.
func bootID() string { return "" }

// fileSystemFiles returns 0: no budget of files.
func fileSystemFiles(string) int64 { return 0 }

// namedAt returns the present: when the inode of a file was changed last is not known.
func namedAt(os.FileInfo) time.Time { return time.Now() }
