// SPDX-License-Identifier: Apache-2.0

package disk

import (
	"os"
	"syscall"
)

// readFlags open a blob without updating its access time, as its owner may, without following a symlink in its place,
// and without waiting for the other end of a pipe (open(2)).
const readFlags = os.O_RDONLY | syscall.O_NOATIME | syscall.O_NOFOLLOW | syscall.O_NONBLOCK
