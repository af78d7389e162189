// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// original is the content of every input.
const original = "original"

// inputWrite tries to change the content of each file.
func inputWrite(r *report, args []string) {
	for _, file := range args {
		for _, mode := range []struct {
			name  string
			flags int
		}{
			{"O_WRONLY", unix.O_WRONLY},
			{"O_RDWR", unix.O_RDWR},
			{"O_APPEND", unix.O_WRONLY | unix.O_APPEND},
			{"O_WRONLY|O_TRUNC", unix.O_WRONLY | unix.O_TRUNC},
			{"O_RDONLY|O_TRUNC", unix.O_RDONLY | unix.O_TRUNC},
			{"O_CREAT", unix.O_WRONLY | unix.O_CREAT},
		} {
			fd, err := unix.Open(file, mode.flags|unix.O_CLOEXEC, 0o666)
			if err == nil {
				_, _ = unix.Write(fd, []byte("changed"))
				unix.Close(fd)
			}
			r.refused("open "+file+" "+mode.name, err)
		}
		r.refused("truncate "+file, unix.Truncate(file, 0))
		fd, err := unix.Open(file, unix.O_RDONLY|unix.O_CLOEXEC, 0)
		if !r.must("open "+file, err) {
			continue
		}
		// With a read-only descriptor, the error does not show which permission is missing.
		_, err = unix.Write(fd, []byte("changed"))
		r.refused("write", err, unix.EBADF)
		r.refused("ftruncate", unix.Ftruncate(fd, 0), unix.EINVAL)
		r.refused("fallocate", unix.Fallocate(fd, 0, 0, 4096), unix.EBADF)
		_, err = unix.Mmap(fd, 0, 8, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
		r.refused("map shared and writable", err)
		if shared, err := unix.Mmap(fd, 0, 8, unix.PROT_READ, unix.MAP_SHARED); r.must("map", err) {
			r.refused("make the mapping writable", unix.Mprotect(shared, unix.PROT_READ|unix.PROT_WRITE))
			if mem, err := unix.Open("/proc/self/mem", unix.O_RDWR|unix.O_CLOEXEC, 0); err == nil {
				_, err = unix.Pwrite(mem, []byte("changed"), int64(address(shared)))
				r.refused("write the mapping by /proc/self/mem", err, unix.EIO, unix.EFAULT)
				unix.Close(mem)
			} else {
				r.refused("open /proc/self/mem", err)
			}
		}
		_, err = unix.Open(fmt.Sprintf("/proc/self/fd/%d", fd), unix.O_RDWR|unix.O_CLOEXEC, 0)
		r.refused("reopen the descriptor for writing", err)
		if at, err := unix.Open(file, unix.O_PATH|unix.O_CLOEXEC, 0); r.must("O_PATH", err) {
			_, err = unix.Open(fmt.Sprintf("/proc/self/fd/%d", at), unix.O_WRONLY|unix.O_CLOEXEC, 0)
			r.refused("open an O_PATH descriptor for writing", err)
			unix.Close(at)
		}
		unix.Close(fd)
		unchanged(r, file)
	}
}

func unchanged(r *report, file string) {
	b, err := os.ReadFile(file)
	if r.must("read "+file, err) && strings.TrimRight(string(b), "\x00") != original {
		r.escape("%s holds %q", file, b)
	}
}

// inputMetadata tries to change the metadata of each file.
func inputMetadata(r *report, args []string) {
	for _, file := range args {
		fd, err := unix.Open(file, unix.O_RDONLY|unix.O_CLOEXEC, 0)
		if !r.must("open "+file, err) {
			continue
		}
		r.refused("chmod "+file, unix.Chmod(file, 0o777))
		r.refused("fchmod", unix.Fchmod(fd, 0o777))
		_, err = call(unix.SYS_FCHMODAT2, unix.AT_FDCWD, file, 0o777, 0)
		r.refused("fchmodat2", err)
		r.refused("chown", unix.Chown(file, os.Getuid(), os.Getgid()))
		r.refused("fchown", unix.Fchown(fd, os.Getuid(), os.Getgid()))
		r.refused("utimensat", unix.UtimesNanoAt(unix.AT_FDCWD, file, []unix.Timespec{{Nsec: unix.UTIME_NOW}, {Nsec: unix.UTIME_NOW}}, 0))
		_, err = call(unix.SYS_UTIMENSAT, fd, []byte(nil), []byte(nil), 0)
		r.refused("utimensat of the descriptor", err)
		r.refused("setxattr", unix.Setxattr(file, "user.hostile", []byte("x"), 0), unix.ENOTSUP)
		r.refused("fsetxattr", unix.Fsetxattr(fd, "user.hostile", []byte("x"), 0), unix.ENOTSUP)
		r.refused("set flags of the inode", unix.IoctlSetPointerInt(fd, unix.FS_IOC_SETFLAGS, 0), unix.ENOTTY, unix.ENOTSUP)
		unix.Close(fd)
	}
}

// inputName tries to remove, replace and add names, of a file and in a directory that contains sub.
func inputName(r *report, args []string) {
	file, dir := args[0], args[1]
	if !r.must("make a file", os.WriteFile("/build/new", []byte("changed"), 0o600)) {
		return
	}
	// A mount point cannot be removed or replaced (EBUSY), and renames and links cannot cross mounts (EXDEV).
	r.refused("unlink "+file, unix.Unlink(file), unix.EBUSY)
	r.refused("rename "+file, unix.Rename(file, "/build/gone"), unix.EBUSY, unix.EXDEV)
	r.refused("replace "+file, unix.Rename("/build/new", file), unix.EBUSY, unix.EXDEV)
	r.refused("exchange "+file, unix.Renameat2(unix.AT_FDCWD, "/build/new", unix.AT_FDCWD, file, unix.RENAME_EXCHANGE), unix.EBUSY, unix.EXDEV)
	r.refused("link "+file, unix.Link(file, "/build/hard"), unix.EXDEV)
	if fd, err := unix.Open(file, unix.O_RDONLY|unix.O_CLOEXEC, 0); r.must("open "+file, err) {
		link := fmt.Sprintf("/proc/self/fd/%d", fd)
		r.refused("link the descriptor", unix.Linkat(unix.AT_FDCWD, link, unix.AT_FDCWD, "/build/hard", unix.AT_SYMLINK_FOLLOW), unix.EXDEV)
		unix.Close(fd)
	}
	if r.must("symlink", unix.Symlink(file, "/build/soft")) {
		_, err := unix.Open("/build/soft", unix.O_WRONLY|unix.O_CLOEXEC, 0)
		r.refused("open a symlink to "+file+" for writing", err)
	}
	create(r, dir)
	r.refused("rename "+dir+"/sub", unix.Rename(dir+"/sub", dir+"/other"))
	r.refused("unlink "+dir+"/sub", unix.Unlink(dir+"/sub"))
	r.refused("rmdir "+dir, unix.Rmdir(dir), unix.EBUSY)
	unchanged(r, file)
}

// inputTree attacks a file and its directory, in a tree of inputs that accepts new entries. The remaining arguments are
// empty directories of the tree. The caller passes them only if no directory of the tree belongs to the run.
func inputTree(r *report, args []string) {
	file, dir := args[0], args[1]
	own, ownDir := dir+"/hostile-file", dir+"/hostile-dir"
	var before, after unix.Statfs_t
	if !r.must("make a file", os.WriteFile(own, []byte("changed"), 0o600)) || !r.must("make a directory", unix.Mkdir(ownDir, 0o700)) ||
		!r.must("statfs", unix.Statfs(dir, &before)) {
		return
	}
	// Directories of inputs stay where they are (EXDEV), and a mount point is busy.
	no := []error{unix.EXDEV, unix.EBUSY}
	r.refused("unlink "+file, unix.Unlink(file), no...)
	r.refused("rename "+file, unix.Rename(file, own+"2"), no...)
	r.refused("replace "+file, unix.Rename(own, file), no...)
	for name, flag := range map[string]uint{"exchange": unix.RENAME_EXCHANGE, "whiteout": unix.RENAME_WHITEOUT} {
		r.refused(name+" "+file, unix.Renameat2(unix.AT_FDCWD, own, unix.AT_FDCWD, file, flag), append(no, unix.EINVAL)...)
		r.refused(name+" by "+file, unix.Renameat2(unix.AT_FDCWD, file, unix.AT_FDCWD, own, flag), append(no, unix.EINVAL)...)
		r.refused(name+" "+dir, unix.Renameat2(unix.AT_FDCWD, dir, unix.AT_FDCWD, "/build/gone", flag),
			append(no, unix.EINVAL, unix.ENOENT)...)
	}
	r.refused("link "+file, unix.Link(file, own+"2"), no...)
	if fd, err := unix.Open(file, unix.O_RDONLY|unix.O_CLOEXEC, 0); r.must("open "+file, err) {
		link := fmt.Sprintf("/proc/self/fd/%d", fd)
		r.refused("link the descriptor", unix.Linkat(unix.AT_FDCWD, link, unix.AT_FDCWD, own+"2", unix.AT_SYMLINK_FOLLOW), no...)
		if err := unix.Fsync(fd); err != nil { // has no effect
			r.stop("fsync: %v", err)
		}
		unix.Close(fd)
	}
	r.refused("rename "+dir, unix.Rename(dir, "/build/gone"), no...)
	r.refused("replace "+dir, unix.Rename(ownDir, dir), append(no, unix.EINVAL, unix.ENOTEMPTY)...)
	r.refused("rmdir "+dir, unix.Rmdir(dir), append(no, unix.ENOTEMPTY)...)
	for _, empty := range args[2:] {
		for _, d := range []string{dir, empty} {
			r.refused("chmod "+d, unix.Chmod(d, 0o700))
			r.refused("chown "+d, unix.Chown(d, os.Getuid(), os.Getgid()))
			r.refused("touch "+d, unix.UtimesNanoAt(unix.AT_FDCWD, d, []unix.Timespec{{Sec: 1}, {Sec: 1}}, 0))
		}
		r.refused("rename "+empty, unix.Rename(empty, own+"2"), no...)
		r.refused("rmdir "+empty, unix.Rmdir(empty), no...)
	}
	// A whiteout would hide an input, and so would a directory that is opaque or has a redirect.
	for _, name := range []string{own + "3", file, "/build/hostile-whiteout"} {
		r.refused("whiteout "+name, unix.Mknod(name, unix.S_IFCHR, 0), unix.EEXIST)
	}
	for _, prefix := range []string{"trusted.overlay.", "user.overlay."} {
		for _, p := range []string{file, dir, ownDir, own} {
			for attribute, value := range map[string]string{"opaque": "y", "redirect": "/", "metacopy": "", "whiteout": "y", "upper": "x"} {
				// The run may set user.overlay.* on its own files: overlayfs ignores or escapes these attributes.
				err := unix.Setxattr(p, prefix+attribute, []byte(value), 0)
				if err != nil || prefix == "trusted.overlay." || p == file {
					r.refused("set "+prefix+attribute+" of "+p, err, unix.ENOTSUP)
				}
			}
		}
	}
	if fd, err := unix.Open(dir, unix.O_TMPFILE|unix.O_RDWR|unix.O_CLOEXEC, 0o600); err == nil {
		r.refused("name an unnamed file "+file, unix.Linkat(unix.AT_FDCWD, fmt.Sprintf("/proc/self/fd/%d", fd), unix.AT_FDCWD, file,
			unix.AT_SYMLINK_FOLLOW), unix.EEXIST)
		unix.Close(fd)
	}
	// Nothing of an input may have been copied into memory that counts for the run.
	if r.must("statfs", unix.Statfs(dir, &after)) && before.Bfree > after.Bfree+8 {
		r.escape("%d blocks were used", before.Bfree-after.Bfree)
	}
	names, err := os.ReadDir(dir)
	base := file[len(dir)+1:]
	if r.must("list "+dir, err) && !slices.ContainsFunc(names, func(e os.DirEntry) bool { return e.Name() == base }) {
		r.escape("%s is hidden", file)
	}
	unchanged(r, file)
	_ = os.RemoveAll(ownDir)
}

// inputCopy tries every operation for which an overlay would copy a file. The last argument is the file's size in
// bytes.
func inputCopy(r *report, args []string) {
	file, dir := args[0], args[1]
	size, err := strconv.ParseInt(args[2], 10, 64)
	var before, after unix.Statfs_t
	if !r.must("size", err) || !r.must("statfs", unix.Statfs(dir, &before)) {
		return
	}
	for _, flags := range []int{unix.O_WRONLY, unix.O_RDWR, unix.O_WRONLY | unix.O_APPEND, unix.O_RDONLY | unix.O_TRUNC} {
		fd, err := unix.Open(file, flags|unix.O_CLOEXEC, 0)
		if err == nil {
			unix.Close(fd)
		}
		r.refused(fmt.Sprintf("open %s with %#x", file, flags), err)
	}
	r.refused("truncate", unix.Truncate(file, 1))
	r.refused("chmod", unix.Chmod(file, 0o777))
	r.refused("chown", unix.Chown(file, os.Getuid(), os.Getgid()))
	r.refused("touch", unix.UtimesNanoAt(unix.AT_FDCWD, file, []unix.Timespec{{Sec: 1}, {Sec: 1}}, 0))
	r.refused("setxattr", unix.Setxattr(file, "user.hostile", []byte("x"), 0), unix.ENOTSUP)
	r.refused("link", unix.Link(file, dir+"/hostile-link"), unix.EXDEV)
	r.refused("rename", unix.Rename(file, dir+"/hostile-name"), unix.EXDEV, unix.EBUSY)
	if r.must("statfs", unix.Statfs(dir, &after)) && before.Bfree > after.Bfree+8 {
		r.escape("%d blocks were used", before.Bfree-after.Bfree)
	}
	var st unix.Stat_t
	if r.must("stat "+file, unix.Stat(file, &st)) && st.Size != size {
		r.escape("%s has %d bytes", file, st.Size)
	}
}

// create tries to create a file of each kind in dir, and removes those that it created.
func create(r *report, dir string) {
	name := dir + "/new"
	try := func(what string, err error) {
		r.refused(what+" "+name, err, unix.ENOENT) // in /proc
		if err == nil {
			_ = os.Remove(name)
		}
	}
	fd, err := unix.Open(name, unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL|unix.O_CLOEXEC, 0o600)
	if err == nil {
		unix.Close(fd)
	}
	try("create", err)
	try("mkdir", unix.Mkdir(name, 0o700))
	try("symlink", unix.Symlink("x", name))
	try("mkfifo", unix.Mkfifo(name, 0o600))
}

// dnAccess requests a signal when a file in a directory is read (fcntl(2)).
const dnAccess = 1

// inputLease tries to observe and to block the host's use of a file.
func inputLease(r *report, args []string) {
	fd, err := unix.Open(args[0], unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if !r.must("open "+args[0], err) {
		return
	}
	_, err = unix.FcntlInt(uintptr(fd), unix.F_SETLEASE, unix.F_RDLCK)
	r.refused("lease on "+args[0], err)
	if dir, err := unix.Open(args[1], unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0); r.must("open "+args[1], err) {
		_, err = unix.FcntlInt(uintptr(dir), unix.F_NOTIFY, dnAccess)
		r.refused("notification of changes in "+args[1], err)
	}
}

// outside tries to create files in directories that are not writable.
func outside(r *report, args []string) {
	for _, dir := range args {
		if _, err := os.Stat(dir); r.must(dir, err) {
			create(r, dir)
		}
	}
}

// device tries to create device nodes in writable directories.
func device(r *report, args []string) {
	for _, dir := range args {
		for _, d := range []struct {
			name string
			kind uint32
			dev  uint64
		}{
			{"memory", unix.S_IFCHR, unix.Mkdev(1, 1)},
			{"null", unix.S_IFCHR, unix.Mkdev(1, 3)},
			{"disk", unix.S_IFBLK, unix.Mkdev(8, 0)},
			{"fuse", unix.S_IFCHR, unix.Mkdev(10, 229)},
		} {
			r.refused("mknod "+dir+"/"+d.name, unix.Mknod(dir+"/"+d.name, d.kind|0o666, int(d.dev)))
		}
	}
}

// setuid looks for a mount on which set-user-ID bits are effective, and executes a file with them.
func setuid(r *report, _ []string) {
	if on, err := unix.PrctlRetInt(unix.PR_GET_NO_NEW_PRIVS, 0, 0, 0, 0); err != nil || on != 1 {
		r.escape("no_new_privs is not set")
	}
	table, err := os.ReadFile("/proc/self/mountinfo")
	if !r.must("mount table", err) {
		return
	}
	for line := range strings.Lines(string(table)) {
		f := strings.Fields(line)
		if options := "," + f[5] + ","; !strings.Contains(options, ",nosuid,") {
			r.escape("%s is mounted without nosuid", f[4])
		}
	}
	self, err := os.ReadFile("/proc/self/exe")
	if !r.must("copy", errors.Join(err, os.WriteFile("/build/suid", self, 0o700), unix.Chmod("/build/suid", 0o6755))) {
		return
	}
	ended(r, "the set-user-ID copy", "/build/suid", "child-ids")
}

// ids is the set-user-ID program.
func ids(r *report, _ []string) {
	var ruid, euid, suid, rgid, egid, sgid int
	ruid, euid, suid = unix.Getresuid()
	rgid, egid, sgid = unix.Getresgid()
	if ruid != euid || ruid != suid || rgid != egid || rgid != sgid {
		r.escape("users %d %d %d, groups %d %d %d", ruid, euid, suid, rgid, egid, sgid)
	}
	r.hold("one user and one group")
}

// fill writes a file of a given size in MiB.
func fill(r *report, args []string) {
	want, err := strconv.Atoi(args[1])
	if !r.must("size", err) {
		return
	}
	fd, err := unix.Open(args[0], unix.O_WRONLY|unix.O_CREAT|unix.O_CLOEXEC, 0o600)
	if !r.must("create "+args[0], err) {
		return
	}
	piece := bytes.Repeat([]byte("x"), 1<<20)
	for i := range want {
		n, err := unix.Write(fd, piece)
		if err == nil && n == len(piece) {
			continue
		}
		if err == nil {
			_, err = unix.Write(fd, piece[n:])
		}
		r.refused(fmt.Sprintf("MiB %d", i), err, unix.ENOSPC, unix.EDQUOT)
		return
	}
	r.escape("%d MiB were written", want)
}

// files creates a number of files in a directory. The remaining arguments are inputs, which must not change.
func files(r *report, args []string) {
	want, err := strconv.Atoi(args[1])
	if !r.must("number", err) {
		return
	}
	defer func() {
		for _, file := range args[2:] {
			unchanged(r, file)
		}
	}()
	for i := range want {
		if err := unix.Mknod(fmt.Sprintf("%s/%d", args[0], i), unix.S_IFREG|0o600, 0); err != nil {
			r.refused(fmt.Sprintf("file %d", i), err, unix.ENOSPC, unix.EDQUOT)
			return
		}
	}
	r.escape("%d files were made", want)
}

// names creates outputs with every unusual byte in their names, with the longest names, and deeper than the longest
// path.
func names(r *report, _ []string) {
	for b := 1; b < 256; b++ {
		if b == '/' {
			continue
		}
		if !r.must("odd name", os.WriteFile("/build/odd"+string([]byte{byte(b)}), nil, 0o600)) {
			return
		}
	}
	if !r.must("long name", os.Mkdir("/build/"+strings.Repeat("n", 255), 0o700)) ||
		!r.must("directory", os.Chdir("/build")) {
		return
	}
	for range 1000 {
		if !r.must("deep directory", errors.Join(unix.Mkdir("deep", 0o700), unix.Chdir("deep"))) {
			return
		}
	}
	r.hold("created odd names")
}

// links creates symlinks out of the outputs, and special files.
func links(r *report, args []string) {
	for i, to := range append(args, "/etc/shadow", "../../../../../../etc/shadow", "/proc/self/root") {
		name := fmt.Sprintf("/build/link%d", i)
		_ = os.Remove(name) // the parent directory of a declared output
		if !r.must("symlink", unix.Symlink(to, name)) {
			return
		}
	}
	if !r.must("fifo", unix.Mkfifo("/build/fifo", 0o666)) {
		return
	}
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if r.must("socket", err) && r.must("bind", unix.Bind(fd, &unix.SockaddrUnix{Name: "/build/socket"})) {
		r.hold("created links")
	}
}

// swap leaves children that exchange a directory of outputs with links to the directory of a file while the run ends.
func swap(r *report, args []string) {
	name := "/build/swap/" + filepath.Base(args[0])
	if !r.must("outputs", errors.Join(os.MkdirAll("/build/swap", 0o700), os.WriteFile(name, []byte(original), 0o600))) {
		return
	}
	for _, to := range []string{filepath.Dir(args[0]), strings.Repeat("../", 40) + filepath.Dir(args[0])} {
		if _, err := start(self, syscall.SysProcAttr{Setsid: true}, "child-swap", to, args[1]); !r.must("start", err) {
			return
		}
	}
	for { // until the timeout of the run
		if _, err := os.Readlink("/build/swap"); err == nil {
			break
		}
	}
	r.hold("left children that exchange outputs")
}

// swapAgain exchanges a directory and a link until it is killed. Another child may interfere.
func swapAgain(_ *report, args []string) {
	away := fmt.Sprintf("/build/away%d", os.Getpid())
	for {
		_ = os.Rename("/build/swap", away)
		_ = os.Symlink(args[0], "/build/swap")
		_ = os.Remove("/build/swap")
		_ = os.Rename(away, "/build/swap")
	}
}
