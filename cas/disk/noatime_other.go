// SPDX-License-Identifier: Apache-2.0

//go:build !linux

package disk

import "os"

// readFlags open a blob. They cannot prevent an update of the access time here.
const readFlags = os.O_RDONLY
