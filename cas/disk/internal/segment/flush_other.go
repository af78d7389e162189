// SPDX-License-Identifier: Apache-2.0

//go:build !linux

package segment

import "os"

// flush syncs f.
func flush(f *os.File) error { return f.Sync() }
