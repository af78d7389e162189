// SPDX-License-Identifier: Apache-2.0

//go:build !linux

package disk

import (
	"errors"
	"os"
	"time"
)

// syncFileSystem is not available: each Open reads everything that was put without Config.Sync.
func syncFileSystem(*os.File) error { return errors.ErrUnsupported }

// bootID returns "": power failures cannot be detected.
func bootID() string { return "" }

// sinceBoot and asleep return 0: this system lacks the clocks that they need.
func sinceBoot() time.Duration { return 0 }
func asleep() time.Duration    { return 0 }

// accessForWriting returns nil: the next write reveals a read-only file system.
func accessForWriting(string) error { return nil }

// fileSystemFiles returns 0: there is no budget of files.
func fileSystemFiles(string) int64 { return 0 }

// changedAt returns the current time: inode change times are not available.
func changedAt(os.FileInfo) time.Time { return time.Now() }
