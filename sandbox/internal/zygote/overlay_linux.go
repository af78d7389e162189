// SPDX-License-Identifier: Apache-2.0

package zygote

import (
	"cmp"
	"errors"
	"fmt"

	"golang.org/x/sys/unix"
)

// workSuffix is appended to the name of an upper directory to name its work directory, which overlayfs needs beside it.
const workSuffix = ".work"

// overlay makes the overlay of an operation and returns it as a detached mount.
//
// Its layers are descriptors, whose paths in the mount table begin at their own mount (Linux 6.13): they reveal
// nothing. The kernel changes the upper directory with the credentials of this process, after it has checked those of
// the command. If the command has our user ID, the lower directories are ID-mapped mounts in which everything belongs
// to nobody: the kernel lets nobody write, remove, rename, link or otherwise change such a file.
func (s *slot) overlay(o *Op, sources []int) (t tree, err error) {
	t.fd = -1
	var layers []int
	defer func() { closeAll(layers) }()
	open := func(image int, rel string) (int, error) {
		if image < 0 || image >= len(sources) || sources[image] < 0 {
			return -1, fmt.Errorf("source %s: no image or workspace %d", rel, image)
		}
		fd, err := unix.Openat2(sources[image], rel, &unix.OpenHow{
			Flags:   unix.O_PATH | unix.O_DIRECTORY | unix.O_CLOEXEC,
			Resolve: unix.RESOLVE_NO_SYMLINKS | unix.RESOLVE_BENEATH,
		})
		if err != nil {
			return -1, fmt.Errorf("source %s: %w", rel, err)
		}
		layers = append(layers, fd)
		return fd, nil
	}
	upper, err := open(0, o.Source)
	if err != nil {
		return t, err
	}
	var st unix.Stat_t
	if err := unix.Fstat(upper, &st); err != nil {
		return t, err
	}
	t.dir, t.mode, t.uid, t.gid = true, st.Mode, st.Uid, st.Gid
	// The work directory exists if an earlier slot failed with the same run.
	if err := unix.Mkdirat(sources[0], o.Source+workSuffix, 0o700); err != nil && err != unix.EEXIST {
		return t, fmt.Errorf("create the work directory: %w", err)
	}
	work, err := open(0, o.Source+workSuffix)
	if err != nil {
		return t, err
	}
	fs, err := unix.Fsopen("overlay", unix.FSOPEN_CLOEXEC)
	if err != nil {
		return t, err
	}
	defer unix.Close(fs)
	set := func(key string, fd int) error {
		if err := unix.FsconfigSetFd(fs, key, fd); err != nil {
			return fmt.Errorf("%s: %w", key, err)
		}
		return nil
	}
	err = unix.FsconfigSetString(fs, "source", "inputs")
	for _, l := range o.Lower {
		if err != nil {
			break
		}
		var dir int
		if dir, err = open(l.Image, l.Source); err == nil && s.rootless {
			dir, err = s.ownedByNobody(dir)
			layers = append(layers, dir)
		}
		if err == nil {
			err = set("lowerdir+", dir)
		}
	}
	if err = errors.Join(err, set("upperdir", upper), set("workdir", work)); err != nil {
		return t, err
	}
	if err := s.overlayOptions(fs); err != nil {
		return t, err
	}
	if err := unix.FsconfigCreate(fs); err != nil {
		return t, fmt.Errorf("create: %w", err)
	}
	if t.fd, err = unix.Fsmount(fs, unix.FSMOUNT_CLOEXEC, int(o.Attrs)); err != nil {
		return tree{fd: -1}, fmt.Errorf("mount: %w", err)
	}
	return t, nil
}

// overlayOptions sets the options whose defaults the host can change. Images may contain redirects to other images; the
// command cannot make any, since it cannot write the attributes of overlayfs.
func (s *slot) overlayOptions(fs int) error {
	options := [][2]string{{"redirect_dir", "follow"}, {"index", "off"}, {"metacopy", "off"}, {"xino", "off"}}
	if s.rootless {
		// userxattr excludes redirects and metacopy.
		options = [][2]string{{"index", "off"}, {"xino", "off"}}
		if err := unix.FsconfigSetFlag(fs, "userxattr"); err != nil {
			return fmt.Errorf("userxattr: %w", err)
		}
	}
	var err error
	for _, o := range options {
		if e := unix.FsconfigSetString(fs, o[0], o[1]); e != nil {
			err = cmp.Or(err, fmt.Errorf("%s=%s: %w", o[0], o[1], e))
		}
	}
	return err
}

// ownedByNobody returns an ID-mapped copy of the mount at dir in which every file belongs to nobody: the run's user
// namespace does not map the ID of the files' owner.
func (s *slot) ownedByNobody(dir int) (int, error) {
	fd, err := unix.OpenTree(dir, "", unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC|unix.AT_EMPTY_PATH)
	if err != nil {
		return -1, fmt.Errorf("copy the mount: %w", err)
	}
	attr := &unix.MountAttr{Attr_set: unix.MOUNT_ATTR_IDMAP | unix.MOUNT_ATTR_RDONLY, Userns_fd: uint64(s.users)}
	if err := unix.MountSetattr(fd, "", unix.AT_EMPTY_PATH, attr); err != nil {
		unix.Close(fd)
		return -1, fmt.Errorf("ID-map the mount: %w", err)
	}
	return fd, nil
}
