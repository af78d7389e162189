// SPDX-License-Identifier: Apache-2.0

package monitor

import (
	"io"
	"path"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/cloister-build/cloister/sandbox"
)

// executes returns what a process executes with the file at a location: the file if it is an input, otherwise its
// interpreters, since a program may remove its own file.
func (w *session) executes(pid uint32, at location) []sandbox.Event {
	switch {
	case at.mode == unix.S_IFREG && (w.view.input(at.path) || w.view.layered(&at)):
		return []sandbox.Event{{Kind: inputExecuted, Subject: at.path}}
	case at.mode == unix.S_IFREG:
		return w.interpreters(pid, at.path)
	case at.mode == 0 && !at.absent && !strings.HasSuffix(at.path, "/exe"): // /proc/PID/exe was executed before
		return []sandbox.Event{{Kind: unnamedExecuted}}
	}
	return nil
}

// interpreters returns the inputs that interpret the file at a path without links, transitively.
func (w *session) interpreters(pid uint32, p string) []sandbox.Event {
	var seen []sandbox.Event
	for range maxInterpreters {
		name, ok := w.interpreter(p)
		if !path.IsAbs(name) {
			if !ok || name != "" { // relative to the process's directory
				seen = append(seen, sandbox.Event{Kind: unnamedExecuted})
			}
			break
		}
		at := w.resolve(pid, name, true)
		if at.mode != unix.S_IFREG {
			break // the execution fails
		}
		if p = at.path; w.view.input(p) || w.view.layered(&at) {
			seen = append(seen, sandbox.Event{Kind: inputExecuted, Subject: p})
		}
		if w.executed[p] {
			break
		}
	}
	return seen
}

// interpreter returns the interpreter that the file at a path without links names, or false if the file is unreadable.
func (w *session) interpreter(p string) (name string, ok bool) {
	fd, err := unix.Openat2(w.root, p, &unix.OpenHow{
		// Do not block on what a process may put there meanwhile.
		Flags:   unix.O_RDONLY | unix.O_NONBLOCK | unix.O_NOCTTY | unix.O_CLOEXEC,
		Resolve: unix.RESOLVE_IN_ROOT | unix.RESOLVE_NO_SYMLINKS,
	})
	if err != nil {
		return "", false
	}
	defer unix.Close(fd)
	var st unix.Stat_t
	if unix.Fstat(fd, &st) != nil || st.Mode&unix.S_IFMT != unix.S_IFREG {
		return "", false
	}
	return interpreter(descriptor(fd)), true
}

// A descriptor is an open file.
type descriptor int

// ReadAt implements io.ReaderAt.
func (d descriptor) ReadAt(b []byte, off int64) (int, error) {
	n, err := unix.Pread(int(d), b, off)
	if err == nil && n < len(b) {
		err = io.EOF
	}
	return max(0, n), err
}
