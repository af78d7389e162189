// SPDX-License-Identifier: Apache-2.0

package microvm

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"path"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

// errTree means that a received tree is malformed or exceeds its limits.
var errTree = errors.New("tree from the virtual machine")

// A directory is what a receiver keeps of the entry of one.
type directory struct {
	path string
	mode uint32
	time int64
}

// A receiver creates a tree. Whatever it receives, it only creates files, and only below the expected directories.
type receiver struct {
	root  int
	dirs  []string // that the tree may fill
	room  int64    // bytes of data that it may still have
	files int64    // that it may still create

	inside []directory // being filled, each in the one before it
	parent int         // an open directory, or -1
	of     string      // its path
	file   int         // being written, or -1
	open   *entry      // what it is
}

// slack is how far a tree may exceed its limits, since the file system at its origin rounds them up. The one at its
// destination enforces them.
const slack = 64 << 10

// A receipt limits what a tree may contain, apart from slack; -1 is unlimited.
type receipt struct{ bytes, files int64 }

// receiveTree creates a tree below the directories of root, which exist. After an error in the tree it discards the
// rest, so that the port can be used again. The second error is the port's.
func receiveTree(p *port, root int, dirs []string, most receipt) (treeErr, err error) {
	r := &receiver{root: root, dirs: dirs, room: most.bytes, files: most.files, parent: -1, file: -1}
	r.room, r.files = r.room+slack, r.files+slack
	if most.bytes < 0 || most.bytes > maxTree {
		r.room = maxTree
	}
	if most.files < 0 || most.files > maxFiles {
		r.files = maxFiles
	}
	for {
		b, err := p.receive(maxChunk)
		switch {
		case err != nil:
			r.close()
			return treeErr, err
		case len(b) == 0 && treeErr == nil:
			return r.finish(), nil
		case len(b) == 0:
			return treeErr, nil
		case treeErr != nil:
			continue
		}
		if treeErr = r.frame(b); treeErr != nil {
			r.close()
		}
	}
}

// maxFiles bounds the files of a tree if the run has no limit.
const maxFiles = 10_000_000

func (r *receiver) close() {
	for _, fd := range []*int{&r.file, &r.parent} {
		if *fd >= 0 {
			unix.Close(*fd)
			*fd = -1
		}
	}
}

func (r *receiver) frame(b []byte) error {
	switch {
	case b[0] == frameData && len(b) >= 9:
		return r.data(int64(binary.LittleEndian.Uint64(b[1:9])), b[9:])
	case b[0] == frameEntry:
		var e entry
		if err := json.Unmarshal(b[1:], &e); err != nil {
			return fmt.Errorf("%w: %w", errTree, err)
		}
		if err := r.endFile(); err != nil {
			return err
		}
		return r.create(&e)
	}
	return fmt.Errorf("%w: unknown frame %q of %d bytes", errTree, b[0], len(b))
}

// data writes a part of the open file.
func (r *receiver) data(at int64, b []byte) error {
	if r.file < 0 || at < 0 || at > r.open.Size-int64(len(b)) {
		return fmt.Errorf("%w: data at %d outside a file", errTree, at)
	}
	if r.room -= int64(len(b)); r.room < 0 {
		return fmt.Errorf("%w: too much data", errTree)
	}
	for len(b) > 0 {
		n, err := unix.Pwrite(r.file, b, at)
		if err == unix.EINTR {
			continue
		}
		if err != nil {
			return &fs.PathError{Op: "write", Path: r.open.Path, Err: err}
		}
		b, at = b[n:], at+int64(n)
	}
	return nil
}

// create creates a file, a directory or another entry that did not exist.
func (r *receiver) create(e *entry) error {
	dir, name := path.Split(e.Path)
	dir = path.Clean(dir)
	if !fs.ValidPath(e.Path) || e.Path == "." || !r.expects(dir) {
		return fmt.Errorf("%w: unexpected path %.200q", errTree, e.Path)
	}
	if err := r.leave(dir); err != nil {
		return err
	}
	switch kind := e.Mode & unix.S_IFMT; {
	case e.Target != "" && kind != unix.S_IFLNK, (e.Same != "" || e.Size != 0) && kind != unix.S_IFREG:
		return fmt.Errorf("%w: an entry of type %o with the size, target or link of another", errTree, kind)
	}
	if r.files--; r.files < 0 {
		return fmt.Errorf("%w: too many files", errTree)
	}
	if err := r.enter(dir); err != nil {
		return &fs.PathError{Op: "open", Path: dir, Err: err}
	}
	err := r.make(name, e)
	if err != nil {
		return &fs.PathError{Op: "create", Path: e.Path, Err: err}
	}
	switch e.Mode & unix.S_IFMT {
	case unix.S_IFDIR:
		r.inside = append(r.inside, directory{e.Path, e.Mode, e.Time})
		return nil
	case unix.S_IFREG:
		if e.Same == "" {
			return nil // endFile
		}
	}
	return r.setTime(name, e.Time)
}

// expects reports whether the next entry may be in dir: a directory that is being filled, or an expected one.
func (r *receiver) expects(dir string) bool {
	return slices.Contains(r.dirs, dir) || slices.ContainsFunc(r.inside, func(d directory) bool { return d.path == dir })
}

// leave finishes the open directories other than dir and its ancestors: they get no more entries. Memory thus grows
// with a tree's depth, not its size.
func (r *receiver) leave(dir string) error {
	for len(r.inside) > 0 {
		d := r.inside[len(r.inside)-1]
		if d.path == dir {
			return nil
		}
		if err := r.enter(path.Dir(d.path)); err != nil {
			return &fs.PathError{Op: "open", Path: path.Dir(d.path), Err: err}
		}
		name := path.Base(d.path)
		if err := errors.Join(unix.Fchmodat(r.parent, name, d.mode&0o7777, 0), r.setTime(name, d.time)); err != nil {
			return &fs.PathError{Op: "finish", Path: d.path, Err: err}
		}
		r.inside = r.inside[:len(r.inside)-1]
	}
	return nil
}

// enter opens a directory as r.parent.
func (r *receiver) enter(dir string) error {
	if r.parent >= 0 && r.of == dir {
		return nil
	}
	fd, err := openBeneath(r.root, dir, unix.O_PATH|unix.O_DIRECTORY)
	if err != nil {
		return err
	}
	if r.parent >= 0 {
		unix.Close(r.parent)
	}
	r.parent, r.of = fd, dir
	return nil
}

// make creates an entry in r.parent. Each call fails if the name exists.
func (r *receiver) make(name string, e *entry) error {
	switch e.Mode & unix.S_IFMT {
	case unix.S_IFDIR:
		return unix.Mkdirat(r.parent, name, 0o700)
	case unix.S_IFLNK:
		return unix.Symlinkat(e.Target, r.parent, name)
	case unix.S_IFIFO, unix.S_IFSOCK: // the worker reports such outputs
		return unix.Mknodat(r.parent, name, e.Mode&(unix.S_IFMT|0o777), 0)
	case unix.S_IFREG:
	default:
		return fmt.Errorf("%w: type %o", errTree, e.Mode&unix.S_IFMT)
	}
	if e.Same != "" {
		return r.link(name, e.Same)
	}
	if e.Size < 0 || e.Size > maxTree {
		return fmt.Errorf("%w: a file of %d bytes", errTree, e.Size)
	}
	fd, err := unix.Openat(r.parent, name, unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return err
	}
	r.file, r.open = fd, e
	return unix.Ftruncate(fd, e.Size)
}

// link gives a regular file of the tree another name, in r.parent.
func (r *receiver) link(name, same string) error {
	within := func(dir string) bool { return dir == "." || strings.HasPrefix(same, dir+"/") }
	if !fs.ValidPath(same) || !slices.ContainsFunc(r.dirs, within) {
		return fmt.Errorf("%w: no file %.200q", errTree, same)
	}
	from, err := openBeneath(r.root, path.Dir(same), unix.O_PATH|unix.O_DIRECTORY)
	if err != nil {
		return err
	}
	defer unix.Close(from)
	var st unix.Stat_t
	if err := unix.Fstatat(from, path.Base(same), &st, unix.AT_SYMLINK_NOFOLLOW); err != nil || st.Mode&unix.S_IFMT != unix.S_IFREG {
		return fmt.Errorf("%w: no file %.200q", errTree, same)
	}
	return unix.Linkat(from, path.Base(same), r.parent, name, 0)
}

// endFile sets the mode and time of the open file and closes it.
func (r *receiver) endFile() error {
	if r.file < 0 {
		return nil
	}
	err := errors.Join(unix.Fchmod(r.file, r.open.Mode&0o7777), r.setTime(path.Base(r.open.Path), r.open.Time), unix.Close(r.file))
	r.file = -1
	if err != nil {
		return &fs.PathError{Op: "finish", Path: r.open.Path, Err: err}
	}
	return nil
}

func (r *receiver) setTime(name string, nanoseconds int64) error {
	t := unix.NsecToTimespec(nanoseconds)
	return unix.UtimesNanoAt(r.parent, name, []unix.Timespec{t, t}, unix.AT_SYMLINK_NOFOLLOW)
}

// finish finishes the last file and the directories around it.
func (r *receiver) finish() error {
	defer r.close()
	if err := r.endFile(); err != nil {
		return err
	}
	return r.leave("")
}
