// SPDX-License-Identifier: Apache-2.0

package disk

import (
	"os"
	"syscall"
)

// openNoAtime opens a file without updating its access time, as its owner may (open(2), O_NOATIME).
func openNoAtime(path string) (*os.File, error) {
	return os.OpenFile(path, os.O_RDONLY|syscall.O_NOATIME, 0)
}
