// SPDX-License-Identifier: Apache-2.0

package tree

import (
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// setLinkTime sets the modification time of the symlink name in dir, which os.Root cannot do. dir must be readable.
func setLinkTime(dir *os.Root, name string, t time.Time) error {
	d, err := dir.Open(".")
	if err != nil {
		return err
	}
	defer d.Close()
	at := unix.NsecToTimespec(t.UnixNano())
	if err := unix.UtimesNanoAt(int(d.Fd()), name, []unix.Timespec{at, at}, unix.AT_SYMLINK_NOFOLLOW); err != nil {
		return &os.PathError{Op: "utimensat", Path: name, Err: err}
	}
	return nil
}
