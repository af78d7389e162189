// SPDX-License-Identifier: Apache-2.0

package toolchain

import (
	"io/fs"
	"slices"

	"golang.org/x/sys/unix"
)

// list returns the entries of the directory at path, sorted by name. A toolchain has 100,000 files and more, and
// package os takes twice the time for them, because it resolves the whole path of each.
func list(path string) ([]entry, error) {
	var dir int
	err := uninterrupted(func() (err error) {
		dir, err = unix.Open(path, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
		return err
	})
	if err != nil {
		return nil, &fs.PathError{Op: "open", Path: path, Err: err}
	}
	defer unix.Close(dir)
	var names []string
	b := make([]byte, 16<<10)
	for {
		var n int
		err := uninterrupted(func() (err error) {
			n, err = unix.ReadDirent(dir, b)
			return err
		})
		if err != nil {
			return nil, &fs.PathError{Op: "readdirent", Path: path, Err: err}
		}
		if n <= 0 {
			break
		}
		_, _, names = unix.ParseDirent(b[:n], -1, names)
	}
	slices.Sort(names)
	entries := make([]entry, 0, len(names))
	for _, name := range names {
		var st unix.Stat_t
		err := uninterrupted(func() error { return unix.Fstatat(dir, name, &st, unix.AT_SYMLINK_NOFOLLOW) })
		e := entry{name: name, mode: modeOf(st.Mode), size: st.Size, modified: st.Mtim.Nano()}
		if err == nil && e.mode.Type() == fs.ModeSymlink {
			err = uninterrupted(func() error {
				n, err := unix.Readlinkat(dir, name, b)
				e.link = string(b[:max(n, 0)])
				return err
			})
		}
		switch {
		case err == nil:
			entries = append(entries, e)
		case !absent(err):
			return nil, &fs.PathError{Op: "read", Path: path + "/" + name, Err: err}
		}
	}
	return entries, nil
}

// uninterrupted repeats a system call that a signal interrupts, as one of the Go runtime may on a network file system.
func uninterrupted(call func() error) error {
	for {
		if err := call(); err != unix.EINTR {
			return err
		}
	}
}

// modeOf converts a mode of stat(2) as package os does.
func modeOf(mode uint32) fs.FileMode {
	m := fs.FileMode(mode & 0o777)
	switch mode & unix.S_IFMT {
	case unix.S_IFBLK:
		m |= fs.ModeDevice
	case unix.S_IFCHR:
		m |= fs.ModeDevice | fs.ModeCharDevice
	case unix.S_IFDIR:
		m |= fs.ModeDir
	case unix.S_IFIFO:
		m |= fs.ModeNamedPipe
	case unix.S_IFLNK:
		m |= fs.ModeSymlink
	case unix.S_IFSOCK:
		m |= fs.ModeSocket
	}
	for _, b := range []struct {
		bit  uint32
		flag fs.FileMode
	}{{unix.S_ISUID, fs.ModeSetuid}, {unix.S_ISGID, fs.ModeSetgid}, {unix.S_ISVTX, fs.ModeSticky}} {
		if mode&b.bit != 0 {
			m |= b.flag
		}
	}
	return m
}

// modifiedAt returns the modification time of path in nanoseconds.
func modifiedAt(path string) (int64, error) {
	var st unix.Stat_t
	err := unix.Lstat(path, &st)
	return st.Mtim.Nano(), err
}
