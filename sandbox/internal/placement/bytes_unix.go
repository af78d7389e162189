// SPDX-License-Identifier: Apache-2.0

//go:build !windows

package placement

import (
	"errors"
	"io/fs"
	"os"
	"strings"

	"golang.org/x/sys/unix"
)

// verbatim returns dir: only Windows changes names in paths.
func verbatim(dir string) string { return dir }

// fileBytes returns the size of a file with its extended attributes, one of which is the resource fork of macOS.
func fileBytes(name string) (int64, error) {
	info, err := os.Lstat(name)
	if err != nil {
		return 0, err
	}
	n := int64(0)
	switch m := info.Mode(); {
	case m.IsRegular():
		n = info.Size()
	case m&(fs.ModeDir|fs.ModeSymlink) == 0:
		return 0, nil // macOS gives no attributes to sockets, pipes and devices
	}
	length, err := unix.Llistxattr(name, nil)
	if errors.Is(err, unix.ENOTSUP) || errors.Is(err, fs.ErrPermission) { // macOS lists those of readable files only
		return n, nil
	}
	if err != nil || length == 0 {
		return n, err
	}
	names := make([]byte, length+1024)
	if length, err = unix.Llistxattr(name, names); err != nil {
		return n, err
	}
	for attribute := range strings.SplitSeq(string(names[:length]), "\x00") {
		if strings.HasPrefix(attribute, "security.") {
			continue // a label of the system
		}
		if size, err := unix.Lgetxattr(name, attribute, nil); err == nil { // or it was removed meanwhile
			n += int64(size)
		}
	}
	return n, nil
}
