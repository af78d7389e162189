// SPDX-License-Identifier: Apache-2.0

package monitor

import (
	"encoding/binary"
	"fmt"
	"path"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/cloister-build/cloister/sandbox"
)

// A deed is what a call does to a path.
type deed uint8

const (
	looks    deed = iota // asks about what is there
	opens                // as its flags say
	makes                // fails if something is there
	changes              // fails if nothing is there
	replaces             // makes or changes
	executes
)

// An operand is a path among the arguments of a call: the index of its directory's descriptor, if it has
// one, and of itself.
type operand struct {
	deed      deed
	dir, path int
	// follow says whether a link at the path itself is followed: always, never, or the index of flags, among
	// which AT_SYMLINK_NOFOLLOW forbids it.
	follow int
}

const (
	none   = -1
	always = -2
	never  = -3
)

// operands are those of each watched call that has paths, in the order in which the kernel asks for them.
var operands = map[string][]operand{
	"access":     {{looks, none, 0, always}},
	"faccessat":  {{looks, 0, 1, always}},
	"faccessat2": {{looks, 0, 1, 3}},
	"stat":       {{looks, none, 0, always}},
	"lstat":      {{looks, none, 0, never}},
	"newfstatat": {{looks, 0, 1, 3}},
	"statx":      {{looks, 0, 1, 2}},
	"readlink":   {{looks, none, 0, never}},
	"readlinkat": {{looks, 0, 1, never}},

	"creat":   {{opens, none, 0, always}},
	"open":    {{opens, none, 0, always}},
	"openat":  {{opens, 0, 1, always}},
	"openat2": {{opens, 0, 1, always}},

	"mkdir":     {{makes, none, 0, never}},
	"mkdirat":   {{makes, 0, 1, never}},
	"link":      {{makes, none, 1, never}},
	"linkat":    {{makes, 2, 3, never}},
	"symlink":   {{makes, none, 1, never}},
	"symlinkat": {{makes, 1, 2, never}},

	"unlink":    {{changes, none, 0, never}},
	"unlinkat":  {{changes, 0, 1, never}},
	"rmdir":     {{changes, none, 0, never}},
	"rename":    {{changes, none, 0, never}, {replaces, none, 1, never}},
	"renameat":  {{changes, 0, 1, never}, {replaces, 2, 3, never}},
	"renameat2": {{changes, 0, 1, never}, {replaces, 2, 3, never}},

	"truncate":     {{changes, none, 0, always}},
	"chmod":        {{changes, none, 0, always}},
	"fchmodat":     {{changes, 0, 1, always}},
	"fchmodat2":    {{changes, 0, 1, 3}},
	"chown":        {{changes, none, 0, always}},
	"lchown":       {{changes, none, 0, never}},
	"fchownat":     {{changes, 0, 1, 4}},
	"utime":        {{changes, none, 0, always}},
	"utimes":       {{changes, none, 0, always}},
	"futimesat":    {{changes, 0, 1, always}},
	"utimensat":    {{changes, 0, 1, 3}},
	"setxattr":     {{changes, none, 0, always}},
	"lsetxattr":    {{changes, none, 0, never}},
	"removexattr":  {{changes, none, 0, always}},
	"lremovexattr": {{changes, none, 0, never}},

	"execve":   {{executes, none, 0, always}},
	"execveat": {{executes, 0, 1, 4}},
}

// silent are the kinds of what is remembered without being an event.
var silent = []sandbox.EventKind{inputOpened, inputExecuted, programFound}

// look returns what a watched call is about to do, as far as it is worth recording.
func (w *watch) look(n *notification, name string) []sandbox.Event {
	var seen []sandbox.Event
	switch name {
	case "connect":
		seen = w.reach(n, n.Args[1], n.Args[2])
	case "sendto":
		seen = w.reach(n, n.Args[4], n.Args[5])
	}
	for _, o := range operands[name] {
		p, ok := w.path(n, o)
		if !ok {
			w.unnamed = w.unnamed || o.deed == executes
			break
		}
		var flags uint64
		if o.deed == opens {
			flags = openFlags(n, name)
		}
		at := w.resolve(n.PID, p, o.followed(n, flags))
		seen = append(seen, w.judge(o.deed, flags, p, at)...)
		if o.deed == executes {
			seen = append(seen, w.executes(n.PID, at)...)
		}
		if o.deed == changes && at.absent {
			break
		}
	}
	if slices.ContainsFunc(seen, func(e sandbox.Event) bool { return !slices.Contains(silent, e.Kind) }) {
		process := processName(n.PID)
		for i := range seen {
			seen[i].Syscall, seen[i].Process = name, process
		}
	}
	return seen
}

// followed reports whether the call follows a link at the end of the path.
func (o *operand) followed(n *notification, flags uint64) bool {
	switch {
	case o.deed == opens:
		return flags&unix.O_NOFOLLOW == 0 && flags&(unix.O_CREAT|unix.O_EXCL) != unix.O_CREAT|unix.O_EXCL
	case o.follow >= 0:
		return n.Args[o.follow]&unix.AT_SYMLINK_NOFOLLOW == 0
	}
	return o.follow == always
}

// openFlags returns the flags of a call that opens.
func openFlags(n *notification, name string) uint64 {
	var flags uint64
	switch name {
	case "creat":
		return unix.O_CREAT | unix.O_WRONLY | unix.O_TRUNC
	case "open":
		flags = n.Args[1]
	case "openat":
		flags = n.Args[2]
	case "openat2":
		var how [8]byte
		if readMemory(n.PID, n.Args[2], how[:]) == len(how) {
			flags = binary.NativeEndian.Uint64(how[:])
		}
	}
	if flags&unix.O_PATH != 0 { // it disables all others that matter here
		return flags & (unix.O_PATH | unix.O_NOFOLLOW)
	}
	return flags
}

// judge says what to record of a deed at a place that the process calls p.
func (w *watch) judge(d deed, flags uint64, p string, at place) []sandbox.Event {
	if quiet(at.path) {
		return nil
	}
	there := at.mode != 0
	if d == opens {
		var (
			write   = flags&(unix.O_ACCMODE|unix.O_TRUNC) != 0
			create  = flags&unix.O_CREAT != 0
			newOnly = create && flags&unix.O_EXCL != 0
			unnamed = flags&unix.O_TMPFILE == unix.O_TMPFILE
		)
		switch {
		case newOnly:
			d = makes
		case at.mode == unix.S_IFREG && write, at.mode == unix.S_IFDIR && unnamed, !there && (write || create):
			d = replaces
		case there && write: // a device or a pipe; of a directory it fails whatever is permitted
			return nil
		case there && flags&unix.O_PATH == 0:
			return w.used(at)
		default:
			d = looks
		}
	}
	switch {
	case d == executes && there:
		return append(w.used(at), sandbox.Event{Kind: programFound, Subject: p})
	case d == executes && at.absent:
		detail, _ := w.elsewhere(at)
		return []sandbox.Event{{Kind: sandbox.EventExec, Subject: path.Clean(p), Detail: detail}}
	case d == looks:
		if detail, ok := w.elsewhere(at); ok {
			return []sandbox.Event{{Kind: sandbox.EventRead, Subject: at.path, Detail: detail}}
		}
	case d == replaces, d == makes && !there, d == changes && !at.absent:
		if !w.view.writable(at.path) {
			return []sandbox.Event{{Kind: sandbox.EventWrite, Subject: at.path}}
		}
	}
	return nil
}

// used records an input that is read.
func (w *watch) used(at place) []sandbox.Event {
	if !w.view.Full || !w.view.input(at.path) {
		return nil
	}
	return []sandbox.Event{{Kind: inputOpened, Subject: at.path}}
}

// elsewhere reports whether a source tree has what a full watch sees missing in the sandbox, and what to say of it.
func (w *watch) elsewhere(at place) (detail string, ok bool) {
	if !w.view.Full || !at.absent {
		return "", false
	}
	for dir, source := range w.view.Source {
		if rest, ok := strings.CutPrefix(at.path, strings.TrimSuffix(dir, "/")+"/"); ok && exists(strings.TrimSuffix(source, "/")+"/"+rest) {
			return "in the source tree: add it to the inputs", true
		}
	}
	return "", false
}

// exists reports whether something is at a path of the host, without mounting or opening anything there.
func exists(p string) bool {
	var st unix.Statx_t
	return unix.Statx(unix.AT_FDCWD, p, unix.AT_SYMLINK_NOFOLLOW|unix.AT_NO_AUTOMOUNT, unix.STATX_TYPE, &st) == nil
}

// refusal returns the event of a call that is refused.
func refusal(n *notification, name string) sandbox.Event {
	e := sandbox.Event{Kind: sandbox.EventSyscall, Subject: name, Syscall: name, Process: processName(n.PID)}
	if name == "socket" || name == "socketpair" {
		e.Subject = fmt.Sprintf("%s(%s)", name, family(n.Args))
	}
	return e
}
