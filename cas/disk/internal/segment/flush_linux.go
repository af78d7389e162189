// SPDX-License-Identifier: Apache-2.0

package segment

import (
	"os"

	"golang.org/x/sys/unix"
)

// flush syncs the content of f, but of its metadata only the size.
func flush(f *os.File) error {
	for {
		err := unix.Fdatasync(int(f.Fd()))
		if err != unix.EINTR {
			return os.NewSyscallError("fdatasync", err)
		}
	}
}
