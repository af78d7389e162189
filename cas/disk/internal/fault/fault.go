// SPDX-License-Identifier: Apache-2.0

// Package fault distinguishes errors of one file from errors of its file system or of this process.
package fault

import (
	"errors"
	"slices"
	"syscall"

	"github.com/cloister-build/cloister/cas/durable"
)

// Unreadable reports whether err, from opening, inspecting or reading a file, means that this file cannot be read: its
// sectors are bad, its metadata is damaged, its permissions were changed, or something else is in its place. Errors
// that any other file would cause as well, such as a lack of memory or descriptors, do not count.
func Unreadable(err error) bool {
	return errors.Is(err, durable.ErrNotRegular) || isOneOf(err, unreadable)
}

// Ours reports whether err is about this process or machine: it lacks descriptors or memory, or was interrupted.
func Ours(err error) bool { return isOneOf(err, ours) }

// ReadOnly reports whether err means that a file system is read-only.
func ReadOnly(err error) bool { return errors.Is(err, syscall.EROFS) }

// Reason returns err without its path, which callers add in their own form.
func Reason(err error) string {
	if errno, ok := errors.AsType[syscall.Errno](err); ok {
		return errno.Error()
	}
	if errors.Is(err, durable.ErrNotRegular) {
		return durable.ErrNotRegular.Error()
	}
	return err.Error()
}

func isOneOf(err error, errnos []syscall.Errno) bool {
	errno, ok := errors.AsType[syscall.Errno](err)
	return ok && slices.Contains(errnos, errno)
}
