// SPDX-License-Identifier: Apache-2.0

package zygote

import (
	"encoding/hex"
	"fmt"
	"os"
	"path"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// Where the host and the workspace are reached while the root is made. Both are gone before the
// command starts.
//
// Nobody can guess the name of the host's root: a link of an input tree leads there at no time.
var oldRoot = "/." + secret()

const workspace = "/.workspace"

// secret returns a word that is different in each zygote.
func secret() string {
	var b [16]byte
	if n, err := unix.Getrandom(b[:], 0); err != nil || n != len(b) {
		panic("the kernel gives no random bytes")
	}
	return hex.EncodeToString(b[:])
}

// makeRoot makes the root that the plan describes, from nothing, in the calling thread's mount namespace. What is
// left for pid 1 is what it alone can do, mount /proc, and what must come after that: to detach the host's
// root and make this one read-only.
func makeRoot(plan *Plan, ws int) error {
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("make mounts private: %w", err)
	}
	// Any directory serves to carry the new root; /proc is sure to exist.
	if err := unix.Mount("root", "/proc", "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, "mode=0755"); err != nil {
		return fmt.Errorf("mount the root: %w", err)
	}
	if err := os.Mkdir("/proc"+oldRoot, 0o700); err != nil {
		return err
	}
	if err := unix.PivotRoot("/proc", "/proc"+oldRoot); err != nil {
		return fmt.Errorf("pivot root: %w", err)
	}
	if err := os.Chdir("/"); err != nil {
		return err
	}
	if ws >= 0 {
		if err := os.Mkdir(workspace, 0o700); err != nil {
			return err
		}
		err := unix.MoveMount(ws, "", unix.AT_FDCWD, workspace, unix.MOVE_MOUNT_F_EMPTY_PATH)
		if err != nil {
			return fmt.Errorf("attach the workspace: %w", err)
		}
	}
	for _, dir := range plan.Hidden {
		if err := hide(dir); err != nil {
			return fmt.Errorf("hide a directory of the host: %w", err)
		}
	}
	for i := range plan.Ops {
		if err := plan.Ops[i].do(); err != nil {
			return fmt.Errorf("%s %s: %w", plan.Ops[i].Kind, plan.Ops[i].Target, err)
		}
	}
	if err := os.Mkdir("/proc", 0o755); err != nil {
		return err
	}
	if ws >= 0 {
		// Detaching removes no file: what the mount holds is untouched.
		if err := unix.Unmount(workspace, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW); err != nil {
			return fmt.Errorf("detach the workspace: %w", err)
		}
		if err := os.Remove(workspace); err != nil {
			return fmt.Errorf("detach the workspace: %w", err)
		}
	}
	return nil
}

// emptyDir is a directory that a view needs beside the one that it shows.
const emptyDir = "/.empty"

// hide covers a directory of the host with a view of it that is a file system of its own: what is mounted from
// there has a path that begins at the view, and locks and leases that are not the host's. A view lives as long
// as the run, and with it what it holds of files that were removed meanwhile.
func hide(dir string) error {
	// The mount table shows the words that name the layers; these two tell nothing.
	if err := os.Mkdir(emptyDir, 0o755); err != nil {
		return err
	}
	defer unix.Rmdir(emptyDir)
	if err := os.Chdir(oldRoot + dir); err != nil {
		return err
	}
	defer os.Chdir("/")
	fs, err := unix.Fsopen("overlay", unix.FSOPEN_CLOEXEC)
	if err != nil {
		return fmt.Errorf("overlay: %w", err)
	}
	defer unix.Close(fs)
	if err := unix.FsconfigSetString(fs, "source", "store"); err != nil {
		return fmt.Errorf("overlay: %w", err)
	}
	if err := unix.FsconfigSetString(fs, "lowerdir", ".:"+emptyDir); err != nil {
		return fmt.Errorf("overlay: %w", err)
	}
	if err := unix.FsconfigSetFlag(fs, "userxattr"); err != nil {
		return fmt.Errorf("overlay: %w", err)
	}
	if err := unix.FsconfigCreate(fs); err != nil {
		return fmt.Errorf("overlay: %w", err)
	}
	view, err := unix.Fsmount(fs, unix.FSMOUNT_CLOEXEC, unix.MOUNT_ATTR_NOSUID|unix.MOUNT_ATTR_NODEV|unix.MOUNT_ATTR_RDONLY)
	if err != nil {
		return fmt.Errorf("overlay: %w", err)
	}
	defer unix.Close(view)
	if err := unix.MoveMount(view, "", unix.AT_FDCWD, oldRoot+dir, unix.MOVE_MOUNT_F_EMPTY_PATH); err != nil {
		return fmt.Errorf("cover it: %w", err)
	}
	return nil
}

// do makes one part of the root.
func (o *Op) do() error {
	switch o.Kind {
	case OpFile:
		if err := closed(target(path.Dir(o.Target), true)); err != nil {
			return err
		}
		// A pid 1 that is forked meanwhile would have the file open for writing until it closes what is not
		// its own, and a mount with a writer cannot be made read-only.
		syscall.ForkLock.RLock()
		defer syscall.ForkLock.RUnlock()
		return os.WriteFile(o.Target, []byte(o.Source), 0o444)
	case OpSymlink:
		if err := closed(target(path.Dir(o.Target), true)); err != nil {
			return err
		}
		return os.Symlink(o.Source, o.Target)
	case OpDir:
		return closed(target(o.Target, true))
	case OpTmpfs:
		if err := closed(target(o.Target, true)); err != nil {
			return err
		}
		return unix.Mount("tmp", o.Target, "tmpfs", uintptr(o.Attrs), fmt.Sprintf("mode=1777,size=%d,nr_inodes=%d", o.Bytes+int64(os.Getpagesize()), o.Bytes/4096+16))
	case OpBind, OpDevice:
		return o.bind()
	}
	return fmt.Errorf("unknown operation")
}

// bind attaches a copy of the mount tree at the source, restricted as the operation says.
func (o *Op) bind() error {
	from, rel := oldRoot, strings.TrimPrefix(o.Source, "/")
	if !path.IsAbs(o.Source) {
		from = workspace
	}
	base, err := unix.Open(from, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(base)
	// A link on the way would be read against the wrong root, so there may be none.
	src, err := unix.Openat2(base, rel, &unix.OpenHow{Flags: unix.O_PATH | unix.O_CLOEXEC, Resolve: unix.RESOLVE_NO_SYMLINKS | unix.RESOLVE_BENEATH})
	if err != nil {
		return fmt.Errorf("source %s: %w", o.Source, err)
	}
	defer unix.Close(src)
	var st unix.Stat_t
	if err := unix.Fstat(src, &st); err != nil {
		return err
	}
	dir := st.Mode&unix.S_IFMT == unix.S_IFDIR
	clone := uint(unix.OPEN_TREE_CLONE | unix.OPEN_TREE_CLOEXEC | unix.AT_EMPTY_PATH)
	if dir {
		clone |= unix.AT_RECURSIVE
	}
	tree, err := unix.OpenTree(src, "", clone)
	if err != nil {
		return fmt.Errorf("copy the mount: %w", err)
	}
	defer unix.Close(tree)
	at := uint(unix.AT_EMPTY_PATH)
	if dir {
		at |= unix.AT_RECURSIVE
	}
	if err := unix.MountSetattr(tree, "", at, &unix.MountAttr{Attr_set: o.Attrs}); err != nil {
		return fmt.Errorf("restrict the mount: %w", err)
	}
	dst, err := target(o.Target, dir)
	if err != nil {
		return err
	}
	defer unix.Close(dst)
	if err := unix.MoveMount(tree, "", dst, "", unix.MOVE_MOUNT_F_EMPTY_PATH|unix.MOVE_MOUNT_T_EMPTY_PATH); err != nil {
		return fmt.Errorf("attach the mount: %w", err)
	}
	return nil
}

// target returns a descriptor of the path, a directory or else a file, which is made with its parents
// if it is absent. It follows no link: an input tree may hold some, and until the host is detached one
// could lead there.
func target(p string, dir bool) (int, error) {
	how := &unix.OpenHow{Flags: unix.O_PATH | unix.O_CLOEXEC, Resolve: unix.RESOLVE_NO_SYMLINKS}
	fd, err := unix.Openat2(unix.AT_FDCWD, p, how)
	if err != unix.ENOENT {
		return fd, err
	}
	parent, err := target(path.Dir(p), true)
	if err != nil {
		return -1, err
	}
	defer unix.Close(parent)
	if dir {
		err = unix.Mkdirat(parent, path.Base(p), 0o755)
	} else {
		err = unix.Mknodat(parent, path.Base(p), unix.S_IFREG|0o444, 0)
	}
	if err != nil {
		return -1, err
	}
	return unix.Openat2(parent, path.Base(p), how)
}

// closed closes a descriptor that was wanted only for being made.
func closed(fd int, err error) error {
	if err == nil {
		unix.Close(fd)
	}
	return err
}
