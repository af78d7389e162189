// SPDX-License-Identifier: Apache-2.0

//go:build linux

package zygote

import (
	"errors"
	"fmt"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Access rights of Landlock (landlock(7)).
const (
	landlockRead  = unix.LANDLOCK_ACCESS_FS_EXECUTE | unix.LANDLOCK_ACCESS_FS_READ_FILE | unix.LANDLOCK_ACCESS_FS_READ_DIR
	landlockFile  = unix.LANDLOCK_ACCESS_FS_WRITE_FILE | unix.LANDLOCK_ACCESS_FS_TRUNCATE | unix.LANDLOCK_ACCESS_FS_IOCTL_DEV
	landlockWrite = landlockFile | unix.LANDLOCK_ACCESS_FS_REMOVE_DIR | unix.LANDLOCK_ACCESS_FS_REMOVE_FILE |
		unix.LANDLOCK_ACCESS_FS_MAKE_DIR | unix.LANDLOCK_ACCESS_FS_MAKE_REG | unix.LANDLOCK_ACCESS_FS_MAKE_SOCK |
		unix.LANDLOCK_ACCESS_FS_MAKE_FIFO | unix.LANDLOCK_ACCESS_FS_MAKE_SYM | unix.LANDLOCK_ACCESS_FS_REFER
	landlockAll = landlockRead | landlockWrite | unix.LANDLOCK_ACCESS_FS_MAKE_CHAR | unix.LANDLOCK_ACCESS_FS_MAKE_BLOCK
)

// LandlockVersion returns the kernel's version of Landlock, or 0.
func LandlockVersion() int {
	v, _, errno := unix.RawSyscall(unix.SYS_LANDLOCK_CREATE_RULESET, 0, 0, unix.LANDLOCK_CREATE_RULESET_VERSION)
	if errno != 0 {
		return 0
	}
	return int(v)
}

// landlockRights returns the rights that a version of Landlock knows.
func landlockRights(version int) uint64 {
	known := uint64(landlockAll)
	for _, later := range []struct {
		version int
		right   uint64
	}{
		{2, unix.LANDLOCK_ACCESS_FS_REFER},
		{3, unix.LANDLOCK_ACCESS_FS_TRUNCATE},
		{5, unix.LANDLOCK_ACCESS_FS_IOCTL_DEV},
	} {
		if version < later.version {
			known &^= later.right
		}
	}
	return known
}

// ruleset returns the descriptor of Landlock rules of a version, or -1 for version 0: everything visible is readable,
// devices are writable, and signals and abstract sockets do not leave the run. It is a second layer over the mounts; it
// cannot protect inputs inside a writable directory.
func ruleset(version int) (int, error) {
	if version == 0 {
		return -1, nil
	}
	known := landlockRights(version)
	attr := unix.LandlockRulesetAttr{Access_fs: known}
	size := unsafe.Sizeof(attr.Access_fs)
	if version >= 6 {
		attr.Scoped = unix.LANDLOCK_SCOPE_ABSTRACT_UNIX_SOCKET | unix.LANDLOCK_SCOPE_SIGNAL
		size = unsafe.Sizeof(attr)
	}
	r, _, errno := unix.RawSyscall(unix.SYS_LANDLOCK_CREATE_RULESET, uintptr(unsafe.Pointer(&attr)), size, 0)
	if errno != 0 {
		return -1, fmt.Errorf("ruleset: %w", errno)
	}
	fd := int(r)
	if err := errors.Join(allow(fd, "/", landlockRead), allow(fd, "/dev", known&landlockFile)); err != nil {
		unix.Close(fd)
		return -1, err
	}
	return fd, nil
}

// allow adds a rule for everything below p.
func allow(ruleset int, p string, rights uint64) error {
	dir, err := unix.Open(p, unix.O_PATH|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("%s: %w", p, err)
	}
	defer unix.Close(dir)
	attr := unix.LandlockPathBeneathAttr{Allowed_access: rights, Parent_fd: int32(dir)}
	_, _, errno := unix.RawSyscall6(unix.SYS_LANDLOCK_ADD_RULE, uintptr(ruleset), unix.LANDLOCK_RULE_PATH_BENEATH,
		uintptr(unsafe.Pointer(&attr)), 0, 0, 0)
	if errno != 0 {
		return fmt.Errorf("%s: %w", p, errno)
	}
	return nil
}
