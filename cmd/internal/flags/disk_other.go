// SPDX-License-Identifier: Apache-2.0

//go:build !linux

package flags

import "errors"

// DiskBytes is not known on this system.
func DiskBytes(string) (int64, error) {
	return 0, errors.New("the size of the disk is not known on this system; state --max-size in bytes")
}
