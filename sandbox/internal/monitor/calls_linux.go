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

// An access is what a call does to a path.
type access uint8

const (
	lookup      access = iota // queries
	opening                   // as its flags determine
	creation                  // fails if something is there
	change                    // fails if nothing is there
	replacement               // creates or changes
	linking                   // gives what is there another name
	execution
)

// An operand is a path argument: the indexes of its directory descriptor, or none, and of the path.
type operand struct {
	access    access
	dir, path int
	// follow determines whether a link at the path itself is followed: always, never, or unless the argument with this
	// index contains AT_SYMLINK_NOFOLLOW.
	follow int
}

const (
	none   = -1
	always = -2
	never  = -3
)

// operands are the path arguments of each reported call, in the order in which the kernel reads them.
var operands = map[string][]operand{
	"access":     {{lookup, none, 0, always}},
	"faccessat":  {{lookup, 0, 1, always}},
	"faccessat2": {{lookup, 0, 1, 3}},
	"stat":       {{lookup, none, 0, always}},
	"lstat":      {{lookup, none, 0, never}},
	"newfstatat": {{lookup, 0, 1, 3}},
	"statx":      {{lookup, 0, 1, 2}},
	"readlink":   {{lookup, none, 0, never}},
	"readlinkat": {{lookup, 0, 1, never}},

	"creat":   {{opening, none, 0, always}},
	"open":    {{opening, none, 0, always}},
	"openat":  {{opening, 0, 1, always}},
	"openat2": {{opening, 0, 1, always}},

	"mkdir":     {{creation, none, 0, never}},
	"mkdirat":   {{creation, 0, 1, never}},
	"link":      {{linking, none, 0, never}, {creation, none, 1, never}},
	"linkat":    {{linking, 0, 1, never}, {creation, 2, 3, never}},
	"symlink":   {{creation, none, 1, never}},
	"symlinkat": {{creation, 1, 2, never}},

	"unlink":    {{change, none, 0, never}},
	"unlinkat":  {{change, 0, 1, never}},
	"rmdir":     {{change, none, 0, never}},
	"rename":    {{change, none, 0, never}, {replacement, none, 1, never}},
	"renameat":  {{change, 0, 1, never}, {replacement, 2, 3, never}},
	"renameat2": {{change, 0, 1, never}, {replacement, 2, 3, never}},

	"truncate":     {{change, none, 0, always}},
	"chmod":        {{change, none, 0, always}},
	"fchmodat":     {{change, 0, 1, always}},
	"fchmodat2":    {{change, 0, 1, 3}},
	"chown":        {{change, none, 0, always}},
	"lchown":       {{change, none, 0, never}},
	"fchownat":     {{change, 0, 1, 4}},
	"utime":        {{change, none, 0, always}},
	"utimes":       {{change, none, 0, always}},
	"futimesat":    {{change, 0, 1, always}},
	"utimensat":    {{change, 0, 1, 3}},
	"setxattr":     {{change, none, 0, always}},
	"lsetxattr":    {{change, none, 0, never}},
	"removexattr":  {{change, none, 0, always}},
	"lremovexattr": {{change, none, 0, never}},

	"execve":   {{execution, none, 0, always}},
	"execveat": {{execution, 0, 1, 4}},
}

// silent are the records that are not events.
var silent = []sandbox.EventKind{inputOpened, inputExecuted, unnamedExecuted, programFound}

// examine returns the records for a reported call.
func (w *session) examine(n *notification, name string) []sandbox.Event {
	var seen []sandbox.Event
	switch name {
	case "connect":
		seen = w.connects(n, n.Args[1], n.Args[2])
	case "sendto":
		seen = w.connects(n, n.Args[4], n.Args[5])
		seen = append(seen, w.asks(n, seen)...)
	}
	for _, o := range operands[name] {
		p, ok := w.path(n, o)
		if !ok {
			if o.access == execution {
				seen = append(seen, sandbox.Event{Kind: unnamedExecuted})
			}
			break
		}
		var flags uint64
		if o.access == opening {
			flags = openFlags(n, name)
		}
		if o.access == replacement && name == "renameat2" && n.Args[4]&unix.RENAME_NOREPLACE != 0 {
			o.access = creation
		}
		at := w.resolve(n.PID, p, o.followed(n, flags))
		seen = append(seen, w.classify(o.access, flags, p, at)...)
		if o.access == execution {
			seen = append(seen, w.executes(n.PID, at)...)
		}
		if (o.access == change || o.access == linking) && at.absent {
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
	case o.access == opening:
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
	if flags&unix.O_PATH != 0 { // it disables the other flags
		return flags & (unix.O_PATH | unix.O_NOFOLLOW)
	}
	return flags
}

// classify returns the records for an access to a location that the process calls p.
func (w *session) classify(d access, flags uint64, p string, at location) []sandbox.Event {
	if ignored(at.path) {
		return nil
	}
	there := at.mode != 0
	if d == opening {
		var (
			write   = flags&(unix.O_ACCMODE|unix.O_TRUNC) != 0
			create  = flags&unix.O_CREAT != 0
			newOnly = create && flags&unix.O_EXCL != 0
			unnamed = flags&unix.O_TMPFILE == unix.O_TMPFILE
		)
		switch {
		case newOnly:
			d = creation
		case at.mode == unix.S_IFREG && write, at.mode == unix.S_IFDIR && unnamed, !there && (write || create):
			d = replacement
		case there && write: // a device or a pipe; it fails for a directory
			return nil
		case there && flags&unix.O_PATH == 0:
			return w.inputOpen(at)
		default:
			d = lookup
		}
	}
	switch {
	case d == execution && there:
		return append(w.inputOpen(at), sandbox.Event{Kind: programFound, Subject: p})
	case d == execution && at.absent:
		detail, _ := w.inSource(at)
		return []sandbox.Event{{Kind: sandbox.EventExec, Subject: path.Clean(p), Detail: detail}}
	case d == lookup:
		if detail, ok := w.inSource(at); ok {
			return []sandbox.Event{{Kind: sandbox.EventRead, Subject: at.path, Detail: detail}}
		}
	case d == linking:
		if w.denied(&at) {
			return []sandbox.Event{{Kind: sandbox.EventWrite, Subject: at.path}}
		}
	case d == replacement, d == creation && !there, d == change && !at.absent:
		if !w.view.writable(at.path) || w.denied(&at) {
			return []sandbox.Event{{Kind: sandbox.EventWrite, Subject: at.path}}
		}
		if d != change && !there && slices.Contains(w.view.Unwritable, path.Dir(at.path)) {
			return []sandbox.Event{{Kind: sandbox.EventWrite, Subject: at.path, Detail: "the directory is not writable for the run's user"}}
		}
	}
	return nil
}

// layered reports whether an input is at a location in a writable directory.
func (v *Config) layered(at *location) bool {
	return at.mode != 0 && int(at.user) != v.User && longest(v.Layered, at.path) > longest(v.Inputs, at.path)
}

// denied reports whether an input is at a location in a writable directory that the kernel does not let the run change
// or remove. Private inputs, which the run may change, are writable for all, or lie in a directory that is not sticky.
func (w *session) denied(at *location) bool {
	if !w.view.layered(at) {
		return false
	}
	if at.mode == unix.S_IFREG {
		return at.perm&0o002 == 0
	}
	dir, ok := w.direct(path.Dir(at.path))
	return ok && dir.perm&unix.S_ISVTX != 0
}

// inputOpen records an input that is read.
func (w *session) inputOpen(at location) []sandbox.Event {
	if !w.view.Full || !w.view.input(at.path) && !w.view.layered(&at) {
		return nil
	}
	return []sandbox.Event{{Kind: inputOpened, Subject: at.path}}
}

// inSource reports whether a source tree has a path that the sandbox lacks, and what to report about it.
func (w *session) inSource(at location) (detail string, ok bool) {
	if !w.view.Full || !at.absent {
		return "", false
	}
	for dir, source := range w.view.Source {
		if rest, ok := strings.CutPrefix(at.path, strings.TrimSuffix(dir, "/")+"/"); ok && exists(strings.TrimSuffix(source, "/")+"/"+rest) {
			return "the source tree has it: add it to srcs, hdrs or data in BUILD", true
		}
	}
	return "", false
}

// exists reports whether a path exists on the host, without opening or mounting anything.
func exists(p string) bool {
	var st unix.Statx_t
	return unix.Statx(unix.AT_FDCWD, p, unix.AT_SYMLINK_NOFOLLOW|unix.AT_NO_AUTOMOUNT, unix.STATX_TYPE, &st) == nil
}

// refusal returns the event of a refused call.
func refusal(n *notification, name string) sandbox.Event {
	e := sandbox.Event{Kind: sandbox.EventSyscall, Subject: name, Syscall: name, Process: processName(n.PID)}
	if name == "socket" || name == "socketpair" {
		e.Subject = fmt.Sprintf("%s(%s)", name, family(n.Args))
	}
	if what := listenerOf(n, name); what != "" {
		e.Subject = name + "(" + what + ")"
	}
	return e
}
