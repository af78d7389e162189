// SPDX-License-Identifier: Apache-2.0

//go:build !linux

package localworker

import "os"

// newDir makes a temporary directory, without a lock.
func newDir() (string, *os.File, error) {
	dir, err := os.MkdirTemp("", tempPrefix)
	return dir, nil, err
}
