// SPDX-License-Identifier: Apache-2.0

package zygote

import (
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"path"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// oldRoot is where the host's root is while a template is made, and in a slot's staging namespace. It is gone in what a
// run gets, and its name is unpredictable.
var oldRoot = "/." + secret()

// secret returns an unpredictable word.
func secret() string {
	var b [16]byte
	if n, err := unix.Getrandom(b[:], 0); err != nil || n != len(b) {
		panic("the kernel gives no random bytes")
	}
	return hex.EncodeToString(b[:])
}

// enterRoot moves the thread into a mount namespace with an empty root and the host's root in oldRoot. Propagation
// decides whether new mounts of the host arrive there.
func (s *slot) enterRoot(propagation uintptr) error {
	if err := unix.Setns(s.hostMounts, unix.CLONE_NEWNS); err != nil {
		return fmt.Errorf("mount namespace of the host: %w", err)
	}
	if err := unix.Unshare(unix.CLONE_NEWNS); err != nil {
		return fmt.Errorf("mount namespace: %w", err)
	}
	if err := unix.Mount("", "/", "", unix.MS_REC|propagation, ""); err != nil {
		return fmt.Errorf("make mounts private: %w", err)
	}
	// Any directory can carry the new root; /proc always exists.
	if err := unix.Mount("root", "/proc", "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, "mode=0755"); err != nil {
		return fmt.Errorf("mount the root: %w", err)
	}
	if err := os.Mkdir("/proc"+oldRoot, 0o700); err != nil {
		return err
	}
	if err := unix.PivotRoot("/proc", "/proc"+oldRoot); err != nil {
		return fmt.Errorf("pivot root: %w", err)
	}
	return os.Chdir("/")
}

// takeRoot copies the root file system of the plan's base to s.root, if it has one.
func (s *slot) takeRoot(plan *Plan, sources []int) error {
	s.closeRoot()
	o := plan.Base.Root
	if o == nil {
		return nil
	}
	if s.attached {
		return errors.New("root file system: this kernel cannot copy detached mounts (needs Linux 6.15)")
	}
	t, err := s.takeFrom(plan, o, sources)
	if err == nil && !t.dir {
		unix.Close(t.fd)
		err = unix.ENOTDIR
	}
	if err != nil {
		return fmt.Errorf("root file system: %w", err)
	}
	s.root = t
	return nil
}

// forget discards the template with everything that it has mounted.
func (s *slot) forget() error {
	s.discardPending()
	s.base = nil
	if s.template >= 0 {
		unix.Close(s.template)
		s.template = -1
	}
	if err := unix.Setns(s.hostMounts, unix.CLONE_NEWNS); err != nil {
		return fmt.Errorf("mount namespace of the host: %w", err)
	}
	return nil
}

// takeRootAgain copies the root file system of the current template to s.root, if it has its own.
func (s *slot) takeRootAgain() error {
	s.closeRoot()
	if s.base.Root == nil {
		return nil
	}
	if err := unix.Setns(s.template, unix.CLONE_NEWNS); err != nil {
		return fmt.Errorf("mount namespace of the template: %w", err)
	}
	fd, err := unix.OpenTree(unix.AT_FDCWD, "/", unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC)
	if err != nil {
		return fmt.Errorf("copy the root file system: %w", err)
	}
	s.root = tree{fd: fd, dir: true}
	return nil
}

func (s *slot) closeRoot() {
	closeAll([]int{s.root.fd})
	s.root.fd = -1
}

// newRoot is where a root file system is mounted while the template is made.
const newRoot = "/root"

// makeTemplate creates the root that runs with this base get copies of, and stays in it. It consumes s.root.
func (s *slot) makeTemplate(b *Base) error {
	defer s.closeRoot()
	if err := s.forget(); err != nil {
		return err
	}
	if err := s.enterRoot(unix.MS_PRIVATE); err != nil {
		return err
	}
	at := "" // the path of the new root
	if b.Root != nil {
		at = newRoot
		if err := s.attachRoot(); err != nil {
			return fmt.Errorf("root file system: %w", err)
		}
	}
	if err := applyOps(b.Ops, at); err != nil {
		return err
	}
	points := slices.Clone(b.MountPoints)
	for _, o := range b.Temps {
		points = append(points, o.Target)
	}
	for _, p := range append(points, "/proc") {
		if err := closeNew(target(at+p, true)); err != nil {
			return fmt.Errorf("%s: %w", p, err)
		}
	}
	if s.rootless {
		// In a user namespace the kernel mounts /proc only beside one that shows everything. Pid 1 removes this one.
		if err := applyOps([]Op{{Kind: OpBind, Target: "/proc", Source: "/proc"}}, at); err != nil {
			return err
		}
	}
	if b.Root != nil {
		if err := leaveForRoot(b); err != nil {
			return err
		}
	} else if err := leaveHost(b); err != nil {
		return err
	}
	var err error
	s.template, err = s.mounts()
	if err == nil {
		s.base = b
	}
	return err
}

// attachRoot attaches s.root at newRoot, with a new /dev.
func (s *slot) attachRoot() error {
	if err := os.Mkdir(newRoot, 0o755); err != nil {
		return err
	}
	if err := unix.MoveMount(s.root.fd, "", unix.AT_FDCWD, newRoot, unix.MOVE_MOUNT_F_EMPTY_PATH); err != nil {
		return fmt.Errorf("attach the mount: %w", err)
	}
	if err := closeNew(target(newRoot+"/dev", true)); err != nil {
		return fmt.Errorf("/dev: %w", err)
	}
	if err := unix.Mount("dev", newRoot+"/dev", "tmpfs", unix.MS_NOSUID|unix.MS_NOEXEC, "mode=0755,size=64k,nr_inodes=64"); err != nil {
		return fmt.Errorf("/dev: %w", err)
	}
	return nil
}

// leaveForRoot makes newRoot the root and detaches what contains it: the empty root with the host's.
func leaveForRoot(b *Base) error {
	if !b.WritableRoot {
		if err := lock(newRoot + "/dev"); err != nil {
			return err
		}
	}
	if err := os.Chdir(newRoot); err != nil {
		return err
	}
	// This mounts the old root over the new one, which becomes the root and working directory of this thread.
	if err := unix.PivotRoot(".", "."); err != nil {
		return fmt.Errorf("pivot root: %w", err)
	}
	if err := unix.Unmount(".", unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW); err != nil {
		return fmt.Errorf("detach the host's root: %w", err)
	}
	return os.Chdir("/")
}

// leaveHost detaches the host's root, and locks the template's.
func leaveHost(b *Base) error {
	if err := unix.Unmount(oldRoot, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW); err != nil {
		return fmt.Errorf("detach the host's root: %w", err)
	}
	if err := unix.Rmdir(oldRoot); err != nil {
		return fmt.Errorf("detach the host's root: %w", err)
	}
	if b.SingleUse {
		return nil
	}
	return lock("/")
}

// applyOps performs the operations of a template, whose sources are on the host, in the root at at. In a root file
// system it mounts files over existing ones, since nothing can be created there.
func applyOps(ops []Op, at string) error {
	host, err := unix.Open(oldRoot, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(host)
	for _, o := range ops {
		name := o.Target
		o.Target = at + o.Target
		switch {
		case o.binds():
			var t tree
			if t, err = o.take(host, strings.TrimPrefix(o.Source, "/")); err == nil {
				err = o.attach(t)
				unix.Close(t.fd)
			}
		case o.Kind == OpFile && at != "":
			err = o.replaceFile()
		default:
			err = o.do()
		}
		if err != nil {
			return fmt.Errorf("%s %s: %w", o.Kind, name, err)
		}
	}
	return nil
}

// replaceFile mounts the operation's file over one of the root file system, if that exists. Its own name, in the
// directory that contains the root file system, vanishes with that.
func (o *Op) replaceFile() error {
	dst, err := unix.Openat2(unix.AT_FDCWD, o.Target, &unix.OpenHow{Flags: unix.O_PATH | unix.O_CLOEXEC, Resolve: unix.RESOLVE_NO_SYMLINKS})
	if err == unix.ENOENT || err == unix.ENOTDIR || err == unix.ELOOP {
		return nil
	}
	if err != nil {
		return err
	}
	unix.Close(dst)
	name := "/" + path.Base(o.Target)
	if err := writeFile(name, o.Source); err != nil {
		return err
	}
	bind := Op{Kind: OpBind, Target: o.Target, Source: name, Attrs: imageAttrs}
	t, err := bind.take(unix.AT_FDCWD, path.Base(name))
	if err != nil {
		return err
	}
	defer unix.Close(t.fd)
	return bind.attach(t)
}

// lock makes the mount at dir read-only.
func lock(dir string) error {
	if err := unix.MountSetattr(unix.AT_FDCWD, dir, 0, &unix.MountAttr{Attr_set: unix.MOUNT_ATTR_RDONLY}); err != nil {
		return fmt.Errorf("make the root read-only: %w", err)
	}
	return nil
}

// A tree is a detached mount, with the type of its root and, unless it is from an image, the mode and owner of the
// root.
type tree struct {
	fd       int
	dir      bool
	mode     uint32
	uid, gid uint32
}

// writableBy reports whether a user, and the group of the same number, can create files in the root.
func (t *tree) writableBy(user int) bool {
	id := uint32(user)
	return t.mode&0o002 != 0 || t.uid == id && t.mode&0o200 != 0 || t.gid == id && t.mode&0o020 != 0
}

// applyPlan performs the plan's operations in the thread's mount namespace. Sources are descriptors of the workspace,
// which is number 0, and of the images.
func (s *slot) applyPlan(plan *Plan, sources []int) error {
	trees := make([]tree, len(plan.Ops))
	for i := range trees {
		trees[i].fd = -1
	}
	defer func() {
		for _, t := range trees {
			closeAll([]int{t.fd})
		}
	}()
	if err := s.takeTrees(plan, trees, sources); err != nil {
		return err
	}
	for i := range plan.Ops {
		o := &plan.Ops[i]
		var err error
		if o.binds() || o.fromSources() {
			if trees[i].fd < 0 {
				if trees[i], err = s.takeFrom(plan, o, sources); err != nil {
					return fmt.Errorf("%s %s: %w", o.Kind, o.Target, err)
				}
			}
			err = o.attach(trees[i])
		} else {
			err = o.do()
		}
		if err != nil {
			return fmt.Errorf("%s %s: %w", o.Kind, o.Target, err)
		}
	}
	if s.base.SingleUse && !s.base.WritableRoot && s.base.Root == nil {
		return lock("/")
	}
	return nil
}

// ownAll gives the plan's Owned paths to the command's user.
func (s *slot) ownAll(plan *Plan, sources []int) error {
	s.unwritable = nil
	for _, p := range plan.Owned {
		if err := s.own(sources[0], p); err != nil {
			return fmt.Errorf("owner of %s: %w", p, err)
		}
	}
	return nil
}

// takeTrees copies the trees that must be attached for that: those of the host, and all if the kernel copies no others.
// It returns to the thread's mount namespace.
func (s *slot) takeTrees(plan *Plan, trees []tree, sources []int) error {
	if !slices.ContainsFunc(plan.Ops, func(o Op) bool { return o.fromHost() || o.fromSources() && s.attached }) {
		return nil
	}
	here, err := s.mounts()
	if err != nil {
		return err
	}
	defer unix.Close(here)
	if s.staging >= 0 {
		err = unix.Setns(s.staging, unix.CLONE_NEWNS)
	} else if err = s.enterRoot(unix.MS_SLAVE); err == nil {
		s.staging, err = s.mounts()
	}
	if err == nil {
		err = s.takeStaged(plan, trees, sources)
	}
	if unix.Setns(here, unix.CLONE_NEWNS) != nil {
		os.Exit(1) // the slot is useless; its exit notifies the worker
	}
	return err
}

// takeStaged does the work of takeTrees in the staging namespace.
func (s *slot) takeStaged(plan *Plan, trees []tree, sources []int) error {
	for _, dir := range s.base.Hidden {
		if err := hide(dir); err != nil {
			return fmt.Errorf("hide a directory of the host: %w", err)
		}
		// Copies of a view keep it alive.
		defer unix.Unmount(oldRoot+dir, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW)
	}
	if s.attached {
		for i, fd := range sources {
			if fd < 0 {
				continue
			}
			at := "/." + strconv.Itoa(i)
			if err := os.MkdirAll(at, 0o700); err != nil {
				return err
			}
			if err := unix.MoveMount(fd, "", unix.AT_FDCWD, at, unix.MOVE_MOUNT_F_EMPTY_PATH); err != nil {
				return fmt.Errorf("attach a source: %w", err)
			}
			defer unix.Unmount(at, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW)
		}
	}
	host, err := unix.Open(oldRoot, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(host)
	for i := range plan.Ops {
		o := &plan.Ops[i]
		switch {
		case o.fromHost():
			trees[i], err = o.take(host, strings.TrimPrefix(o.Source, "/"))
		case o.fromSources() && s.attached:
			trees[i], err = s.takeFrom(plan, o, sources)
		}
		if err != nil {
			return fmt.Errorf("%s %s: %w", o.Kind, o.Target, err)
		}
	}
	return nil
}

// emptyDir is a second directory that an overlay view needs.
const emptyDir = "/.empty"

// hide covers a directory of the host with a read-only overlay of it: mounts from there show a path that begins at the
// overlay, and have locks and leases apart from the host's. A view lives as long as the run and keeps removed files.
func hide(dir string) error {
	// The mount table shows the names of the layers; these two reveal nothing.
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

// binds reports whether the operation mounts existing files, fromHost whether these are on the host, and fromSources
// whether the operation needs the workspace or images.
func (o *Op) binds() bool       { return o.Kind == OpBind || o.Kind == OpDevice }
func (o *Op) fromHost() bool    { return o.binds() && path.IsAbs(o.Source) }
func (o *Op) fromSources() bool { return o.binds() && !o.fromHost() || o.Kind == OpOverlay }

// do performs an operation that does not bind.
func (o *Op) do() error {
	switch o.Kind {
	case OpFile:
		if err := closeNew(target(path.Dir(o.Target), true)); err != nil {
			return err
		}
		return writeFile(o.Target, o.Source)
	case OpSymlink:
		if err := closeNew(target(path.Dir(o.Target), true)); err != nil {
			return err
		}
		return os.Symlink(o.Source, o.Target)
	case OpTmpfs:
		if err := closeNew(target(o.Target, true)); err != nil {
			return err
		}
		return unix.Mount("tmp", o.Target, "tmpfs", uintptr(o.Attrs), fmt.Sprintf("mode=1777,size=%d,nr_inodes=%d", o.Bytes+int64(os.Getpagesize()), o.Bytes/4096+16))
	}
	return fmt.Errorf("unknown operation")
}

// writeFile creates a readable file.
func writeFile(name, text string) error {
	fd, err := unix.Open(name, unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL|unix.O_CLOEXEC, 0o444)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	for len(text) > 0 {
		n, err := unix.Write(fd, []byte(text))
		if err != nil {
			return err
		}
		text = text[n:]
	}
	return nil
}

// imageAttrs are the attributes of an image mount (NewImage) that operations can state.
const imageAttrs = unix.MOUNT_ATTR_RDONLY | unix.MOUNT_ATTR_NOSUID | unix.MOUNT_ATTR_NODEV

// takeFrom copies the operation's source from the workspace or an image. An output that does not exist is created.
func (s *slot) takeFrom(plan *Plan, o *Op, sources []int) (tree, error) {
	if o.Image < 0 || o.Image >= len(sources) || sources[o.Image] < 0 {
		return tree{fd: -1}, fmt.Errorf("source %s: no image or workspace %d", o.Source, o.Image)
	}
	base := sources[o.Image]
	take := func() (tree, error) {
		if o.Kind == OpOverlay {
			return s.overlay(o, sources)
		}
		return o.take(base, o.Source)
	}
	t, err := take()
	if o.Image > 0 || !slices.Contains(plan.Writable, o.Target) {
		return t, err
	}
	if errors.Is(err, unix.ENOENT) {
		if err = makeOutput(base, o.Source); err == nil {
			t, err = take()
		}
	}
	if err == nil && !t.writableBy(s.command) {
		s.unwritable = append(s.unwritable, o.Target)
	}
	return t, err
}

// own gives the file at p below base to the command's user.
func (s *slot) own(base int, p string) error {
	if s.rootless {
		return nil // it has our user
	}
	dir, err := unix.Openat2(base, path.Dir(p), &unix.OpenHow{
		Flags:   unix.O_PATH | unix.O_CLOEXEC,
		Resolve: unix.RESOLVE_NO_SYMLINKS | unix.RESOLVE_BENEATH,
	})
	if err != nil {
		return err
	}
	defer unix.Close(dir)
	return unix.Fchownat(dir, path.Base(p), s.command, s.command, unix.AT_SYMLINK_NOFOLLOW)
}

// makeOutput creates a directory below base that every user can write to, and its parents. It follows no link.
func makeOutput(base int, rel string) error {
	beneath := unix.OpenHow{Flags: unix.O_PATH | unix.O_CLOEXEC, Resolve: unix.RESOLVE_NO_SYMLINKS | unix.RESOLVE_BENEATH}
	fd, err := unix.Openat2(base, path.Dir(rel), &beneath)
	if err == unix.ENOENT {
		if err = makeOutput(base, path.Dir(rel)); err == nil {
			fd, err = unix.Openat2(base, path.Dir(rel), &beneath)
		}
	}
	if err == nil {
		defer unix.Close(fd)
		if err = unix.Mkdirat(fd, path.Base(rel), 0o777); err == nil {
			err = unix.Fchmodat(fd, path.Base(rel), unix.S_ISVTX|0o777, 0) // whatever the umask
		}
	}
	if err != nil {
		return fmt.Errorf("create output directory %s: %w", rel, err)
	}
	return nil
}

// take returns a copy of the mount tree at rel below base, restricted as the operation requires.
func (o *Op) take(base int, rel string) (tree, error) {
	t := tree{fd: -1}
	if o.Image > 0 && o.Attrs == imageAttrs && o.Target != "/" {
		// An image has these attributes already and no mounts inside, and everything on the way is a directory. A root may
		// be in a workspace, which has not.
		var err error
		if t.fd, err = unix.OpenTree(base, rel, unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC|unix.AT_SYMLINK_NOFOLLOW); err != nil {
			return t, fmt.Errorf("source %s: %w", o.Source, err)
		}
		var st unix.Stat_t
		if err := unix.Fstat(t.fd, &st); err != nil {
			unix.Close(t.fd)
			t.fd = -1
			return t, fmt.Errorf("source %s: %w", o.Source, err)
		}
		t.dir = st.Mode&unix.S_IFMT == unix.S_IFDIR
		return t, nil
	}
	// Links would be resolved against the wrong root.
	src, err := unix.Openat2(base, rel, &unix.OpenHow{Flags: unix.O_PATH | unix.O_CLOEXEC, Resolve: unix.RESOLVE_NO_SYMLINKS | unix.RESOLVE_BENEATH})
	if err != nil {
		return t, fmt.Errorf("source %s: %w", o.Source, err)
	}
	defer unix.Close(src)
	var st unix.Stat_t
	if err := unix.Fstat(src, &st); err != nil {
		return t, err
	}
	t.dir, t.mode, t.uid, t.gid = st.Mode&unix.S_IFMT == unix.S_IFDIR, st.Mode, st.Uid, st.Gid
	recursive := uint(0)
	if t.dir {
		recursive = unix.AT_RECURSIVE
	}
	if t.fd, err = unix.OpenTree(src, "", unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC|unix.AT_EMPTY_PATH|recursive); err != nil {
		return t, fmt.Errorf("copy the mount: %w", err)
	}
	// Later mounts of the host must not propagate here: they would be unrestricted.
	attr := &unix.MountAttr{Attr_set: o.Attrs, Propagation: unix.MS_PRIVATE}
	if err := unix.MountSetattr(t.fd, "", unix.AT_EMPTY_PATH|recursive, attr); err != nil {
		unix.Close(t.fd)
		t.fd = -1
		return t, fmt.Errorf("restrict the mount: %w", err)
	}
	return t, nil
}

// attach attaches a tree at the operation's target.
func (o *Op) attach(t tree) error {
	dst, err := target(o.Target, t.dir)
	if err != nil {
		return err
	}
	defer unix.Close(dst)
	if err := unix.MoveMount(t.fd, "", dst, "", unix.MOVE_MOUNT_F_EMPTY_PATH|unix.MOVE_MOUNT_T_EMPTY_PATH); err != nil {
		return fmt.Errorf("attach the mount: %w", err)
	}
	return nil
}

// target returns a descriptor of the path, a directory or file, which it creates with its parents if it is missing. It
// follows no link: an input tree may contain links, and until the host is detached one could lead there.
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
	if err == unix.EROFS {
		return -1, fmt.Errorf("the root file system lacks it: %w", err)
	}
	if err != nil {
		return -1, err
	}
	return unix.Openat2(parent, path.Base(p), how)
}

// closeNew closes the descriptor of something that was opened only to create it.
func closeNew(fd int, err error) error {
	if err == nil {
		unix.Close(fd)
	}
	return err
}
