// SPDX-License-Identifier: Apache-2.0

//go:build !linux

package runner

import (
	"io/fs"

	"github.com/cloister-build/cloister/sandbox"
)

// inode fails: nothing is executed on this system.
func inode(fs.FileInfo) (uint64, error) { return 0, sandbox.ErrUnsupported }
