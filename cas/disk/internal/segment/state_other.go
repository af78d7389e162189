// SPDX-License-Identifier: Apache-2.0

//go:build !linux

package segment

import "os"

// stateOf returns the state of f, or the zero state on failure.
func stateOf(f *os.File) state {
	fi, err := f.Stat()
	if err != nil {
		return state{}
	}
	return state{fi.Size(), fi.ModTime().UnixNano()}
}
