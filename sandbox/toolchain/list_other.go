// SPDX-License-Identifier: Apache-2.0

//go:build !linux

package toolchain

import "os"

// list returns the entries of the directory at path, sorted by name.
func list(path string) ([]entry, error) {
	found, err := os.ReadDir(path)
	if err != nil {
		return nil, err
	}
	entries := make([]entry, 0, len(found))
	for _, f := range found {
		if e, err := entryAt(path + "/" + f.Name()); err == nil { // else it was just removed, which changes the directory
			entries = append(entries, e)
		}
	}
	return entries, nil
}

// modifiedAt returns the modification time of path in nanoseconds.
func modifiedAt(path string) (int64, error) {
	info, err := os.Lstat(path)
	if err != nil {
		return 0, err
	}
	return info.ModTime().UnixNano(), nil
}
