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

// pageSize divides the page sizes of all processors: a read within such a block succeeds or fails as a whole.
const pageSize = 4096

// readMemory copies from the memory of a process and returns the number of bytes read.
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

// readString returns the C string at an address, as the kernel reads a path; false if it is not mapped or too long.
func (w *session) readString(pid uint32, at uint64) (string, bool) {
	for n := 0; n < len(w.text); {
		// The page after the string's end may be unmapped.
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

// path returns an operand of a call as an absolute path; false if it is unreadable, or empty and thus means an open
// file.
func (w *session) path(n *notification, o operand) (string, bool) {
	p, ok := w.readString(n.PID, n.Args[o.path])
	if !ok || p == "" {
		return "", false
	}
	w.openRoot(n)
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

// openRoot opens the run's root directory once. Processes cannot change it, so it is the same for all. It must not be
// that of another process that reused the ID of a killed one.
func (w *session) openRoot(n *notification) {
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

// open returns the directory that a process has open as cwd or fd/N; false if it is not a directory in the sandbox: a
// pipe's name is no path.
func (w *session) open(pid uint32, link string) (string, bool) {
	name, err := os.Readlink(fmt.Sprintf("/proc/%d/%s", pid, link))
	return w.sandboxPath(name), err == nil && path.IsAbs(name)
}

// sandboxPath converts readlink's name of an open file to a path inside the sandbox. The name begins at the root of the
// mount namespace, above the run's root if that was set by chroot(2) alone.
func (w *session) sandboxPath(name string) string {
	if !within(name, w.rootName) {
		return name
	}
	return join("/", strings.TrimLeft(name[len(strings.TrimSuffix(w.rootName, "/")):], "/"))
}

// A location is what a path resolves to in a run.
type location struct {
	path   string // without links, as far as it exists
	mode   uint32 // file type, or 0 if missing or unknown
	perm   uint32 // permission bits
	user   uint32 // the owner as this process sees it
	absent bool   // certainly missing
}

// maxSteps is how many links and missing directories are followed on a path. The kernel gives up after as many links.
const maxSteps = 40

// resolve resolves an absolute path as a process would. If that fails, the location has the unresolved path.
func (w *session) resolve(pid uint32, p string, follow bool) location {
	steps := maxSteps
	return w.walk(pid, p, follow, &steps)
}

func (w *session) walk(pid uint32, p string, follow bool, steps *int) location {
	for ; *steps > 0 && w.root >= 0; *steps-- {
		p = w.expandProc(pid, p)
		if ignored(p) {
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
			// A link may have led to the process's own files, which have these names for it alone.
			if own := w.expandProc(pid, at); own != at {
				p = own
				continue
			}
			return location{path: at, absent: err == unix.ENOENT || err == unix.ENOTDIR}
		}
		dir = w.nameOf(fd)
		var st unix.Stat_t
		if whole {
			err = unix.Fstat(fd, &st)
			unix.Close(fd)
			if err != nil {
				return location{path: dir, mode: unix.S_IFDIR}
			}
			return location{path: dir, mode: unix.S_IFDIR, perm: st.Mode & 0o7777, user: st.Uid}
		}
		at := join(dir, base)
		err = unix.Fstatat(fd, base, &st, unix.AT_SYMLINK_NOFOLLOW)
		link := ""
		if err == nil && st.Mode&unix.S_IFMT == unix.S_IFLNK && follow {
			link = readlinkat(fd, base)
		}
		unix.Close(fd)
		switch {
		case err != nil:
			return location{path: at, absent: err == unix.ENOENT}
		case link == "":
			return location{path: at, mode: st.Mode & unix.S_IFMT, perm: st.Mode & 0o7777, user: st.Uid}
		case path.IsAbs(link):
			p = link
		default:
			p = join(dir, link)
		}
	}
	return location{path: path.Clean(p)}
}

// direct resolves a path without links, the common case, at less cost. Without links, a clean path is its own name as
// far as it exists.
func (w *session) direct(p string) (location, bool) {
	if path.Clean(p) != p {
		return location{}, false
	}
	fd, err := unix.Openat2(w.root, p, &unix.OpenHow{
		Flags:   unix.O_PATH | unix.O_CLOEXEC,
		Resolve: unix.RESOLVE_IN_ROOT | unix.RESOLVE_NO_SYMLINKS,
	})
	if err != nil {
		absent := err == unix.ENOENT || err == unix.ENOTDIR
		return location{path: p, absent: absent}, absent
	}
	defer unix.Close(fd)
	var st unix.Stat_t
	err = unix.Fstat(fd, &st)
	return location{path: p, mode: st.Mode & unix.S_IFMT, perm: st.Mode & 0o7777, user: st.Uid}, err == nil
}

// expandProc replaces a link of the process in /proc by its target; for us it would mean another file.
func (w *session) expandProc(pid uint32, p string) string {
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

// nameOf returns the path inside the sandbox of a directory that is open here.
func (w *session) nameOf(fd int) string {
	name, _ := os.Readlink(fmt.Sprintf("/proc/self/fd/%d", fd))
	return w.sandboxPath(name)
}

// readlinkat returns the target of a symbolic link, or "".
func readlinkat(dir int, base string) string {
	var b [unix.PathMax]byte
	n, err := unix.Readlinkat(dir, base, b[:])
	if err != nil {
		return ""
	}
	return string(b[:n])
}

// leader returns the process of a thread, or the thread itself if it is gone.
func leader(thread uint32) int {
	process, _ := lineage(thread)
	return int(process)
}

// lineage returns the process of a thread and its parent; the thread itself and 0 if it is gone.
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

// processName returns the name (comm) of the process of a thread, or "".
func processName(thread uint32) string {
	comm, _ := os.ReadFile(fmt.Sprintf("/proc/%d/comm", leader(thread)))
	return strings.TrimSuffix(string(comm), "\n")
}

// join joins a directory and a path without resolving anything.
func join(dir, p string) string { return strings.TrimSuffix(dir, "/") + "/" + p }
