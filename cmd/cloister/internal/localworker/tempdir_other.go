// SPDX-License-Identifier: Apache-2.0

//go:build !linux

package localworker

import "os"

// newDir makes a directory for temporary files, which nothing holds.
func newDir() (string, *os.File, error) {
	dir, err := os.MkdirTemp("", tempPrefix)
	return dir, nil, err
}
