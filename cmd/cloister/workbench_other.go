// SPDX-License-Identifier: Apache-2.0

//go:build !linux

package main

import "os"

// newDir makes a directory for temporary files, which nothing holds.
func newDir() (string, *os.File, error) {
	dir, err := os.MkdirTemp("", workbenchPrefix)
	return dir, nil, err
}
