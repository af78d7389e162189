// SPDX-License-Identifier: Apache-2.0

package zygote

import (
	"fmt"
	"os"
	"path"
	"strings"

	"golang.org/x/sys/unix"
)

// Where the host and the workspace are reached while the root is made. Both are gone before the
// command starts.
const (
	oldRoot   = "/.host"
	workspace = "/.workspace"
)

// name gives the run its host name and, if asked for, its loopback interface.
func name(loopback bool) error {
	if err := unix.Sethostname([]byte(Hostname)); err != nil {
		return fmt.Errorf("host name: %w", err)
	}
	if err := unix.Setdomainname([]byte("(none)")); err != nil {
		return fmt.Errorf("domain name: %w", err)
	}
	if !loopback {
		return nil
	}
	s, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("loopback interface: %w", err)
	}
	defer unix.Close(s)
	ifr, err := unix.NewIfreq("lo")
	if err != nil {
		return fmt.Errorf("loopback interface: %w", err)
	}
	ifr.SetUint16(unix.IFF_UP)
	if err := unix.IoctlIfreq(s, unix.SIOCSIFFLAGS, ifr); err != nil {
		return fmt.Errorf("loopback interface: %w", err)
	}
	return nil
}

// makeRoot makes the root that the plan describes, from nothing, and leaves no way back to the host's.
func makeRoot(plan *Plan) error {
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
	if plan.Workspace {
		if err := os.Mkdir(workspace, 0o700); err != nil {
			return err
		}
		err := unix.MoveMount(initWorkspace, "", unix.AT_FDCWD, workspace, unix.MOVE_MOUNT_F_EMPTY_PATH)
		if err != nil {
			return fmt.Errorf("attach the workspace: %w", err)
		}
	}
	for i := range plan.Ops {
		if err := plan.Ops[i].do(); err != nil {
			return fmt.Errorf("%s %s: %w", plan.Ops[i].Kind, plan.Ops[i].Target, err)
		}
	}
	detach := []string{oldRoot}
	if plan.Workspace {
		detach = append(detach, workspace)
	}
	for _, dir := range detach {
		// Detaching follows no link and removes no file: what the mounts hold is untouched.
		if err := unix.Unmount(dir, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW); err != nil {
			return fmt.Errorf("detach %s: %w", dir, err)
		}
		if err := unix.Rmdir(dir); err != nil {
			return fmt.Errorf("detach %s: %w", dir, err)
		}
	}
	if err := unix.MountSetattr(unix.AT_FDCWD, "/", 0, &unix.MountAttr{Attr_set: unix.MOUNT_ATTR_RDONLY}); err != nil {
		return fmt.Errorf("make the root read-only: %w", err)
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
		return os.WriteFile(o.Target, []byte(o.Source), 0o444)
	case OpSymlink:
		if err := closed(target(path.Dir(o.Target), true)); err != nil {
			return err
		}
		return os.Symlink(o.Source, o.Target)
	case OpTmpfs:
		if err := closed(target(o.Target, true)); err != nil {
			return err
		}
		return unix.Mount("tmp", o.Target, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, fmt.Sprintf("mode=1777,size=%d", o.Bytes))
	case OpProc:
		if err := closed(target(o.Target, true)); err != nil {
			return err
		}
		return unix.Mount("proc", o.Target, "proc", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, "subset=pid,hidepid=invisible")
	case OpBind:
		return o.bind(unix.MOUNT_ATTR_RDONLY | unix.MOUNT_ATTR_NOSUID | unix.MOUNT_ATTR_NODEV)
	case OpDevice:
		return o.bind(unix.MOUNT_ATTR_RDONLY | unix.MOUNT_ATTR_NOSUID | unix.MOUNT_ATTR_NOEXEC)
	case OpOutput:
		return o.bind(unix.MOUNT_ATTR_NOSUID | unix.MOUNT_ATTR_NODEV)
	}
	return fmt.Errorf("unknown operation")
}

// bind attaches a copy of the mount tree at the source, with attrs added to all of it.
func (o *Op) bind(attrs uint64) error {
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
	if err := unix.MountSetattr(tree, "", at, &unix.MountAttr{Attr_set: attrs}); err != nil {
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
