// SPDX-License-Identifier: Apache-2.0

package microvm

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"io"
	"io/fs"
	"path"
	"slices"
	"strings"
	"unicode/utf8"

	"golang.org/x/sys/unix"
)

// An entry is a file of a tree. The entries in a directory follow it. Frames with the data of a regular file follow its
// entry: each has the byte frameData, an offset in eight bytes, and the data at that offset. Ranges in no frame are
// holes.
type entry struct {
	Path   string // relative, clean
	Mode   uint32 // as in stat
	Size   int64  // of a regular file
	Time   int64  // of the last modification, in nanoseconds since 1970
	Target string // of a symbolic link
	Same   string // path of the earlier regular file that this one is a hard link to, or ""
}

// The first bytes of frames.
const (
	frameEntry = 'E'
	frameData  = 'D'
)

// maxTree bounds the length of a file, holes included, and the data of a tree if the run has no limit.
const maxTree = 1 << 40

// how resolves the paths of a hostile tree: never outside the root, and through no link.
const how = unix.RESOLVE_BENEATH | unix.RESOLVE_NO_SYMLINKS | unix.RESOLVE_NO_MAGICLINKS

// openBeneath opens a relative path below root. The caller closes it.
func openBeneath(root int, name string, flags uint64) (int, error) {
	for {
		fd, err := unix.Openat2(root, name, &unix.OpenHow{Flags: flags | unix.O_CLOEXEC, Resolve: how})
		if err != unix.EINTR && err != unix.EAGAIN {
			return fd, err
		}
	}
}

// A sender sends trees.
type sender struct {
	p     *port
	root  int
	links map[[2]uint64]string // paths of files with several names
	buf   []byte
}

// sendTree sends what is below the directories of root, and the end. A directory that does not exist is empty.
func sendTree(p *port, root int, dirs []string) error {
	s := &sender{p: p, root: root, links: map[[2]uint64]string{}, buf: make([]byte, maxChunk-16)}
	for _, dir := range outermost(dirs) {
		if err := s.children(dir); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	return p.end()
}

// outermost returns the directories that are not inside others.
func outermost(dirs []string) []string {
	var outer []string
	for i, dir := range dirs {
		holds := func(o string) bool { return o == "." && dir != "." || strings.HasPrefix(dir, o+"/") }
		if !slices.ContainsFunc(dirs, holds) && !slices.Contains(dirs[:i], dir) {
			outer = append(outer, dir)
		}
	}
	return outer
}

// children sends what is in a directory, in the reverse of the kernel's order: tmpfs lists first what was created last,
// so the copy has the order of the original.
func (s *sender) children(dir string) error {
	fd, err := openBeneath(s.root, dir, unix.O_RDONLY|unix.O_DIRECTORY)
	if err != nil {
		return &fs.PathError{Op: "open", Path: dir, Err: err}
	}
	defer unix.Close(fd)
	names, err := list(fd)
	if err != nil {
		return &fs.PathError{Op: "list", Path: dir, Err: err}
	}
	slices.Reverse(names)
	for _, name := range names {
		if err := s.file(fd, name, path.Join(dir, name)); err != nil {
			return err
		}
	}
	return nil
}

// list returns the names in a directory in the kernel's order.
func list(fd int) ([]string, error) {
	var names []string
	buf := make([]byte, 32<<10)
	for {
		n, err := unix.ReadDirent(fd, buf)
		if err != nil || n == 0 {
			return names, err
		}
		_, _, names = unix.ParseDirent(buf[:n], -1, names)
	}
}

// file sends one file and, if it is a directory, what is in it.
func (s *sender) file(dir int, name, whole string) error {
	var st unix.Stat_t
	if err := unix.Fstatat(dir, name, &st, unix.AT_SYMLINK_NOFOLLOW); err != nil {
		return &fs.PathError{Op: "stat", Path: whole, Err: err}
	}
	if !utf8.ValidString(name) {
		return &fs.PathError{Op: "send", Path: whole, Err: errors.New("the name is not UTF-8")}
	}
	e := &entry{Path: whole, Mode: st.Mode, Time: st.Mtim.Nano()}
	switch st.Mode & unix.S_IFMT {
	case unix.S_IFDIR:
		if err := s.entry(e); err != nil {
			return err
		}
		return s.children(whole)
	case unix.S_IFLNK:
		buf := make([]byte, unix.PathMax)
		n, err := unix.Readlinkat(dir, name, buf)
		if err != nil {
			return &fs.PathError{Op: "readlink", Path: whole, Err: err}
		}
		if e.Target = string(buf[:n]); !utf8.ValidString(e.Target) {
			return &fs.PathError{Op: "send", Path: whole, Err: errors.New("the target is not UTF-8")}
		}
	case unix.S_IFREG:
		e.Size = st.Size
		key := [2]uint64{st.Dev, st.Ino}
		if e.Same = s.links[key]; e.Same == "" && st.Nlink > 1 {
			s.links[key] = whole
		}
		if err := s.entry(e); err != nil || e.Same != "" {
			return err
		}
		return s.data(dir, name, whole, st.Size)
	}
	return s.entry(e)
}

func (s *sender) entry(e *entry) error {
	text, err := json.Marshal(e)
	if err != nil {
		return err
	}
	return s.p.send([]byte{frameEntry}, text)
}

// data sends the data of a file without its holes.
func (s *sender) data(dir int, name, whole string, size int64) error {
	fd, err := openBeneath(dir, name, unix.O_RDONLY|unix.O_NONBLOCK)
	if err != nil {
		return &fs.PathError{Op: "open", Path: whole, Err: err}
	}
	defer unix.Close(fd)
	for at := int64(0); at < size; {
		from, err := unix.Seek(fd, at, unix.SEEK_DATA)
		if err == unix.ENXIO {
			return nil
		}
		to, holeErr := unix.Seek(fd, from, unix.SEEK_HOLE)
		if err != nil || holeErr != nil {
			return &fs.PathError{Op: "seek", Path: whole, Err: errors.Join(err, holeErr)}
		}
		for to = min(to, size); from < to; {
			n, err := unix.Pread(fd, s.buf[:min(int64(len(s.buf)), to-from)], from)
			if err == unix.EINTR {
				continue
			}
			if err != nil || n == 0 {
				return &fs.PathError{Op: "read", Path: whole, Err: errors.Join(err, io.ErrUnexpectedEOF)}
			}
			head := binary.LittleEndian.AppendUint64([]byte{frameData}, uint64(from))
			if err := s.p.send(head, s.buf[:n]); err != nil {
				return err
			}
			from += int64(n)
		}
		at = max(to, at+1)
	}
	return nil
}
