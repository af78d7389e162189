// SPDX-License-Identifier: Apache-2.0

//go:build !linux

package flags

import "errors"

// DiskBytes fails: the size of a disk is unknown on this system.
func DiskBytes(string) (int64, error) {
	return 0, errors.New("unknown size of the disk on this system; pass --max-size in bytes")
}
