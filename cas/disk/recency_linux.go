// SPDX-License-Identifier: Apache-2.0

package disk

import (
	"os"
	"syscall"
	"time"
)

// contentTime is the modification time of every file: an action that finds a blob mounted as an input
// must not learn from it when the blob came here. It is the one that small inputs have, too.
var contentTime = time.Unix(1_000_000_000, 0)

// stampTimes returns the access and modification times of a file that is used now.
func stampTimes(now time.Time) (access, modification time.Time) { return now, contentTime }

// openQuietly opens a file without that counting as a use. Its own owner may (open(2), O_NOATIME).
func openQuietly(path string) (*os.File, error) {
	return os.OpenFile(path, os.O_RDONLY|syscall.O_NOATIME, 0)
}

// lastUse returns when a file was last used, as its access time says.
func lastUse(fi os.FileInfo) time.Time {
	if st, ok := fi.Sys().(*syscall.Stat_t); ok {
		return time.Unix(st.Atim.Unix())
	}
	return fi.ModTime()
}
