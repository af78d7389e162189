// SPDX-License-Identifier: Apache-2.0

//go:build !linux

package localworker

import "os"

// NewDir makes a temporary directory in another one, without a lock.
func NewDir(in string) (dir string, held *os.File, removed []string, err error) {
	if dir, err = os.MkdirTemp(in, tempPrefix); err == nil {
		held, err = os.Open(dir)
	}
	return dir, held, nil, err
}
