// SPDX-License-Identifier: Apache-2.0

package segment

import (
	"os"

	"golang.org/x/sys/unix"
)

// flush writes the content of f to the disk, and of what is known of f only its size.
func flush(f *os.File) error {
	for {
		err := unix.Fdatasync(int(f.Fd()))
		if err != unix.EINTR {
			return os.NewSyscallError("fdatasync", err)
		}
	}
}
