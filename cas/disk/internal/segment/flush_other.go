// SPDX-License-Identifier: Apache-2.0

//go:build !linux

package segment

import "os"

// flush writes f to the disk.
func flush(f *os.File) error { return f.Sync() }
