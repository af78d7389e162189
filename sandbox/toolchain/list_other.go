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
		switch e, err := entryAt(path + "/" + f.Name()); {
		case err == nil:
			entries = append(entries, e)
		case !absent(err):
			return nil, err
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
