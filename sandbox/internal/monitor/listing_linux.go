// SPDX-License-Identifier: Apache-2.0

package monitor

import (
	"encoding/binary"
	"errors"
	"slices"

	"golang.org/x/sys/unix"
)

// A tmpfs lists its newest entry first, other file systems list theirs in other orders. In a run with an output order
// the monitor lists directories in place of the kernel and reorders the entries that belong to the run's user. All
// others, such as inputs, keep their places.

// maxListing is the most that one call gets. The kernel may return less than requested as well.
const maxListing = 64 << 10

// answerListing answers getdents64(2).
func (w *session) answerListing(n *notification) {
	dir, err := opened(n)
	switch {
	case errors.Is(err, unix.EBADF), errors.Is(err, unix.ESRCH):
		w.queue.proceed(n.ID) // fails
		return
	case err != nil:
		w.cannotAnswer(n, err)
		return
	}
	defer unix.Close(dir)
	// The position belongs to the open file and so is the process's.
	position, err := unix.Seek(dir, 0, unix.SEEK_CUR)
	var of unix.Statfs_t
	if err != nil || int32(n.Args[2]) < 0 || // fails
		unix.Fstatfs(dir, &of) != nil || of.Type == unix.PROC_SUPER_MAGIC {
		w.queue.proceed(n.ID)
		return
	}
	m, err := w.memory(n)
	if err != nil {
		w.cannotAnswer(n, err)
		return
	}
	defer m.close()
	b := make([]byte, min(uint32(n.Args[2]), maxListing))
	length, err := unix.Getdents(dir, b)
	if refused, ok := errors.AsType[unix.Errno](err); ok {
		w.queue.fail(n.ID, refused)
		return
	}
	written := m.write(n.Args[1], w.reordered(dir, b[:max(length, 0)]))
	if written && w.queue.value(n.ID, int64(length)) {
		return
	}
	_, _ = unix.Seek(dir, position, unix.SEEK_SET) // the call may be repeated
	if !written {
		w.queue.fail(n.ID, unix.EFAULT)
	}
}

// Offsets in the kernel's struct linux_dirent64.
const (
	entryPosition = 8 // where the next entry is
	entryLength   = 16
	entryName     = 19
)

// reordered returns entries of a directory with those of the run's user in another order. Positions stay, so that a
// reader who resumes after the last entry finds the next one; one who resumes after another may miss entries.
func (w *session) reordered(dir int, b []byte) []byte {
	var entries, own [][]byte
	var positions []uint64
	var places []int // of own
	for rest := b; len(rest) > entryName; {
		length := int(binary.NativeEndian.Uint16(rest[entryLength:]))
		if length <= entryName || length > len(rest) {
			return b // never on Linux
		}
		e := rest[:length]
		rest = rest[length:]
		var st unix.Stat_t
		name := unix.ByteSliceToString(e[entryName:])
		if name != "." && name != ".." && unix.Fstatat(dir, name, &st, unix.AT_SYMLINK_NOFOLLOW) == nil &&
			int(st.Uid) == w.view.User {
			places, own = append(places, len(entries)), append(own, e)
		}
		entries, positions = append(entries, e), append(positions, binary.NativeEndian.Uint64(e[entryPosition:]))
	}
	for i, e := range permuted(own, w.view.Conditions.OutputOrder) {
		entries[places[i]] = e
	}
	all := make([]byte, 0, len(b))
	for i, e := range entries {
		all = append(all, e...)
		binary.NativeEndian.PutUint64(all[len(all)-len(e)+entryPosition:], positions[i])
	}
	return all
}

// permuted returns list in the order of a number, counted from 1: backwards, and from another place for each number.
func permuted[T any](list []T, order int) []T {
	if len(list) == 0 {
		return list
	}
	list = slices.Clone(list)
	slices.Reverse(list)
	first := (order - 1) % len(list)
	if len(list) == 2 {
		first = 0 // the other order is the usual one
	}
	return slices.Concat(list[first:], list[:first])
}
