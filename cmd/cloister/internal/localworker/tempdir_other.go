// SPDX-License-Identifier: Apache-2.0

//go:build !linux

package localworker

import "os"

// NewDir makes a temporary directory, without a lock.
func NewDir() (dir string, held *os.File, removed []string, err error) {
	dir, err = os.MkdirTemp("", tempPrefix)
	return dir, nil, nil, err
}
