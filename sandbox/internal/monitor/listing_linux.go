// SPDX-License-Identifier: Apache-2.0

package monitor

import (
	"encoding/binary"
	"errors"
	"slices"

	"golang.org/x/sys/unix"
)

// The order in which a directory lists its entries depends on the file system; a tmpfs lists the newest first. In a run
// with an output order the monitor answers getdents64 in place of the kernel and permutes the entries that belong to
// the run's user. All others, such as inputs, keep their positions.

// maxListing limits the bytes that one call returns. The kernel, too, may return fewer than requested.
const maxListing = 64 << 10

// answerListing answers getdents64(2).
func (w *session) answerListing(n *notification) {
	dir, err := opened(n)
	switch {
	case errors.Is(err, unix.EBADF), errors.Is(err, unix.ESRCH):
		w.queue.proceed(n.ID) // the call fails in the kernel, too
		return
	case err != nil:
		w.cannotAnswer(n, err)
		return
	}
	defer unix.Close(dir)
	// The process shares the position, which belongs to the open file.
	position, err := unix.Seek(dir, 0, unix.SEEK_CUR)
	var of unix.Statfs_t
	if err != nil || int32(n.Args[2]) < 0 || // the call fails in the kernel, too
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
	_, _ = unix.Seek(dir, position, unix.SEEK_SET) // the process may repeat the call
	if !written {
		w.queue.fail(n.ID, unix.EFAULT)
	}
}

// Offsets in the kernel's struct linux_dirent64.
const (
	entryPosition = 8 // of the next entry
	entryLength   = 16
	entryName     = 19
)

// reordered returns the directory entries in b with those of the run's user permuted. The positions keep their order,
// so that a reader that resumes after the last entry finds the next one. A reader that resumes after another entry may
// miss some.
func (w *session) reordered(dir int, b []byte) []byte {
	var entries, own [][]byte
	var positions []uint64
	var places []int // indexes of own in entries
	for rest := b; len(rest) > entryName; {
		length := int(binary.NativeEndian.Uint16(rest[entryLength:]))
		if length <= entryName || length > len(rest) {
			return b // Linux never returns such an entry
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

// permuted returns list reversed and rotated by order-1. order is at least 1.
func permuted[T any](list []T, order int) []T {
	if len(list) == 0 {
		return list
	}
	list = slices.Clone(list)
	slices.Reverse(list)
	first := (order - 1) % len(list)
	if len(list) == 2 {
		first = 0 // rotated, it would be in the original order
	}
	return slices.Concat(list[first:], list[:first])
}
