// SPDX-License-Identifier: Apache-2.0

package monitor

import (
	"bytes"
	"fmt"
	"os"
	"path"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// pageSize divides the page sizes of all processors: a read that does not cross its multiples is all there
// or not at all.
const pageSize = 4096

// readMemory copies from the memory of a process and returns how many bytes were there.
func readMemory(pid uint32, at uint64, b []byte) int {
	if len(b) == 0 {
		return 0
	}
	local := unix.Iovec{Base: &b[0]}
	local.SetLen(len(b))
	n, err := unix.ProcessVMReadv(int(pid), []unix.Iovec{local}, []unix.RemoteIovec{{Base: uintptr(at), Len: len(b)}}, 0)
	if err != nil {
		return 0
	}
	return n
}

// readString returns the C string at an address, which the kernel would take for a path. It is false if
// there is none: what it lies in is not mapped, or it is too long.
func (w *watch) readString(pid uint32, at uint64) (string, bool) {
	for n := 0; n < len(w.text); {
		// The page after the string's end may be absent.
		piece := w.text[n:min(len(w.text), n+int(pageSize-(at+uint64(n))%pageSize))]
		if readMemory(pid, at+uint64(n), piece) < len(piece) {
			return "", false
		}
		if i := bytes.IndexByte(piece, 0); i >= 0 {
			return string(w.text[:n+i]), true
		}
		n += len(piece)
	}
	return "", false
}

// path returns an operand of a call as an absolute path, or false if it is none: it cannot be read, or it is
// empty and what is meant is a file that is open already.
func (w *watch) path(n *notification, o operand) (string, bool) {
	p, ok := w.readString(n.PID, n.Args[o.path])
	if !ok || p == "" {
		return "", false
	}
	w.enter(n)
	if path.IsAbs(p) {
		return p, true
	}
	link := "cwd"
	if o.dir != none && int32(n.Args[o.dir]) != unix.AT_FDCWD {
		link = fmt.Sprintf("fd/%d", int32(n.Args[o.dir]))
	}
	dir, ok := w.open(n.PID, link)
	return join(dir, p), ok
}

// enter opens the root directory of the run once. Its processes cannot change it, so it is that of all. For
// that, it must not be of another process that has got the number of one that was killed.
func (w *watch) enter(n *notification) {
	if w.root >= 0 {
		return
	}
	fd, err := unix.Open(fmt.Sprintf("/proc/%d/root", n.PID), unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return
	}
	name, err := os.Readlink(fmt.Sprintf("/proc/self/fd/%d", fd))
	if err != nil || !w.queue.valid(n.ID) {
		unix.Close(fd)
		return
	}
	w.root, w.rootName = fd, name
}

// open returns the directory that a process has open as cwd or fd/N, or false if it is not one in the
// sandbox: a pipe has a name that is no path.
func (w *watch) open(pid uint32, link string) (string, bool) {
	name, err := os.Readlink(fmt.Sprintf("/proc/%d/%s", pid, link))
	return w.inside(name), err == nil && path.IsAbs(name)
}

// inside returns as a path inside the sandbox what readlink calls an open file of it. That begins at the
// root of the mount namespace, which is above the run's own root if the run was confined by chroot(2) alone.
func (w *watch) inside(name string) string {
	if !within(name, w.rootName) {
		return name
	}
	return join("/", strings.TrimLeft(name[len(strings.TrimSuffix(w.rootName, "/")):], "/"))
}

// A place is what a path means in a run.
type place struct {
	path   string // without links, as far as it exists
	mode   uint32 // the file type, or 0 if nothing is there or nobody knows
	absent bool   // nothing is there, for sure
}

// maxSteps is how many links, and directories that do not exist, are looked at on a path. The kernel gives
// up after as many links.
const maxSteps = 40

// resolve finds what an absolute path means to a process. Where that cannot be said the place has the path
// as it is.
func (w *watch) resolve(pid uint32, p string, follow bool) place {
	steps := maxSteps
	return w.walk(pid, p, follow, &steps)
}

func (w *watch) walk(pid uint32, p string, follow bool, steps *int) place {
	for ; *steps > 0 && w.root >= 0; *steps-- {
		p = w.unproc(pid, p)
		if quiet(p) {
			break
		}
		if at, ok := w.direct(p); ok {
			return at
		}
		name := strings.TrimRight(p, "/")
		follow = follow || len(name) < len(p)
		i := strings.LastIndexByte(name, '/') + 1
		dir, base := name[:i], name[i:]
		whole := base == "" || base == "." || base == ".."
		if whole {
			dir = p
		}
		fd, err := unix.Openat2(w.root, dir, &unix.OpenHow{
			Flags:   unix.O_PATH | unix.O_DIRECTORY | unix.O_CLOEXEC,
			Resolve: unix.RESOLVE_IN_ROOT | unix.RESOLVE_NO_MAGICLINKS,
		})
		if err != nil {
			if base == "" {
				break
			}
			*steps--
			at := join(w.walk(pid, name[:i], true, steps).path, base)
			// A link in between may have led to the process's own files, which only it can open by such names.
			if own := w.unproc(pid, at); own != at {
				p = own
				continue
			}
			return place{path: at, absent: err == unix.ENOENT || err == unix.ENOTDIR}
		}
		dir = w.nameOf(fd)
		if whole {
			unix.Close(fd)
			return place{path: dir, mode: unix.S_IFDIR}
		}
		at := join(dir, base)
		var st unix.Stat_t
		err = unix.Fstatat(fd, base, &st, unix.AT_SYMLINK_NOFOLLOW)
		link := ""
		if err == nil && st.Mode&unix.S_IFMT == unix.S_IFLNK && follow {
			link = readlinkat(fd, base)
		}
		unix.Close(fd)
		switch {
		case err != nil:
			return place{path: at, absent: err == unix.ENOENT}
		case link == "":
			return place{path: at, mode: st.Mode & unix.S_IFMT}
		case path.IsAbs(link):
			p = link
		default:
			p = join(dir, link)
		}
	}
	return place{path: path.Clean(p)}
}

// direct resolves a path on which there is no link, as is most often so, at less cost. Without links, a clean
// path is its own name as far as it exists.
func (w *watch) direct(p string) (place, bool) {
	if path.Clean(p) != p {
		return place{}, false
	}
	fd, err := unix.Openat2(w.root, p, &unix.OpenHow{
		Flags:   unix.O_PATH | unix.O_CLOEXEC,
		Resolve: unix.RESOLVE_IN_ROOT | unix.RESOLVE_NO_SYMLINKS,
	})
	if err != nil {
		absent := err == unix.ENOENT || err == unix.ENOTDIR
		return place{path: p, absent: absent}, absent
	}
	defer unix.Close(fd)
	var st unix.Stat_t
	err = unix.Fstat(fd, &st)
	return place{path: p, mode: st.Mode & unix.S_IFMT}, err == nil
}

// unproc returns a path through a link of the process in /proc with what the link means to that process; to
// us it would be another.
func (w *watch) unproc(pid uint32, p string) string {
	rest, ok := strings.CutPrefix(p, "/proc/self/")
	if !ok {
		rest, ok = strings.CutPrefix(p, "/proc/thread-self/")
	}
	link, below, _ := strings.Cut(rest, "/")
	if link == "fd" {
		number, after, _ := strings.Cut(below, "/")
		link, below = "fd/"+number, after
	} else if link != "cwd" && link != "root" {
		return p
	}
	dir, isDir := w.open(pid, link)
	if !ok || below == "" || !isDir {
		return p
	}
	return join(dir, below)
}

// nameOf returns the path inside the sandbox of a directory of it that is open here.
func (w *watch) nameOf(fd int) string {
	name, _ := os.Readlink(fmt.Sprintf("/proc/self/fd/%d", fd))
	return w.inside(name)
}

// readlinkat returns what a symbolic link holds, or "".
func readlinkat(dir int, base string) string {
	var b [unix.PathMax]byte
	n, err := unix.Readlinkat(dir, base, b[:])
	if err != nil {
		return ""
	}
	return string(b[:n])
}

// leader returns the process that a thread belongs to, or the thread itself if it is gone.
func leader(thread uint32) int {
	process, _ := lineage(thread)
	return int(process)
}

// lineage returns the process that a thread belongs to, and the parent of that; or the thread itself and 0 if it is gone.
func lineage(thread uint32) (process, parent uint32) {
	status, _ := os.ReadFile(fmt.Sprintf("/proc/%d/status", thread))
	process = thread
	for line := range strings.Lines(string(status)) {
		name, value, _ := strings.Cut(line, ":")
		if name != "Tgid" && name != "PPid" {
			continue
		}
		id, err := strconv.ParseUint(strings.TrimSpace(value), 10, 32)
		switch {
		case err != nil:
		case name == "Tgid":
			process = uint32(id)
		default:
			parent = uint32(id)
		}
	}
	return process, parent
}

// processName returns the name (comm) of the process that a thread belongs to, or "".
func processName(thread uint32) string {
	comm, _ := os.ReadFile(fmt.Sprintf("/proc/%d/comm", leader(thread)))
	return strings.TrimSuffix(string(comm), "\n")
}

// join returns the path of p in a directory, without following anything.
func join(dir, p string) string { return strings.TrimSuffix(dir, "/") + "/" + p }
