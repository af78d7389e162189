// SPDX-License-Identifier: Apache-2.0

//go:build !linux

package disk

import "os"

// openNoAtime opens a file. It cannot prevent an update of the access time here.
func openNoAtime(path string) (*os.File, error) { return os.Open(path) }
