// SPDX-License-Identifier: Apache-2.0

package durable

import (
	"errors"
	"io"
	"io/fs"
	"os"
)

// ErrNotRegular reports that a path leads to a pipe, a device, a socket or a directory instead of a regular file.
var ErrNotRegular = errors.New("not a regular file")

// OpenFile is os.OpenFile for regular files. For anything else it fails with ErrNotRegular and does not wait: opening
// a pipe would last until its other end is opened.
func OpenFile(path string, flag int, perm os.FileMode) (*os.File, error) {
	f, err := os.OpenFile(path, flag|nonblock, perm)
	if err != nil {
		return nil, err
	}
	fi, err := f.Stat()
	if err == nil && !fi.Mode().IsRegular() {
		err = &fs.PathError{Op: "open", Path: path, Err: ErrNotRegular}
	}
	if err != nil {
		_ = f.Close() // nothing was written
		return nil, err
	}
	return f, nil
}

// ReadFile is os.ReadFile for regular files; see OpenFile.
func ReadFile(path string) ([]byte, error) {
	f, err := OpenFile(path, os.O_RDONLY, 0)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return io.ReadAll(f)
}
