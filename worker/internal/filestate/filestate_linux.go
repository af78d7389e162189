// SPDX-License-Identifier: Apache-2.0

package filestate

import (
	"os"
	"syscall"
	"time"
)

// changeTime returns when the file or its inode last changed.
func changeTime(info os.FileInfo) time.Time {
	if s, ok := info.Sys().(*syscall.Stat_t); ok {
		return time.Unix(s.Ctim.Unix())
	}
	return time.Time{}
}
