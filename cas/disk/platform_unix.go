// SPDX-License-Identifier: Apache-2.0

//go:build linux || darwin || freebsd || netbsd || openbsd || dragonfly

package disk

import (
	"errors"
	"fmt"
	"os"
	"syscall"
)

// errHeld is what tryLock fails with if another holds the lock.
var errHeld error = syscall.EWOULDBLOCK

// tryLock locks f for as long as it is open, or fails at once. The lock goes with the process, however
// it dies.
func tryLock(f *os.File) error {
	for {
		err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
		if err != syscall.EINTR {
			return err
		}
	}
}

// isFull reports whether err says that the file system, or this user's share of it, is used up.
func isFull(err error) bool {
	return errors.Is(err, syscall.ENOSPC) || errors.Is(err, syscall.EDQUOT)
}

// makePrivate lets nobody but this user into dir. It refuses what others may have written: they could have put
// links there, to have this process change what they cannot.
func makePrivate(dir string) error {
	fi, err := os.Stat(dir)
	if err != nil {
		return fmt.Errorf("open store: %w", err)
	}
	if st, ok := fi.Sys().(*syscall.Stat_t); ok && int(st.Uid) != os.Geteuid() {
		return fmt.Errorf("store directory %s belongs to user %d: use it as that user, or choose another directory, or a new one in it", dir, st.Uid)
	}
	shared := fmt.Errorf("store directory %s can be written by others (%s): look at what is in it and chmod 700 it, or choose another directory, or a new one in it", dir, fi.Mode())
	switch perm := fi.Mode().Perm(); {
	case perm&0o077 == 0:
		return nil
	case perm&0o002 != 0: // also the likes of /tmp, which must stay as they are
		return shared
	default:
		if err := os.Chmod(dir, 0o700); err != nil {
			return fmt.Errorf("open store: %w", err)
		}
		if perm&0o020 == 0 {
			return nil
		}
		// One that is empty is as many users' mkdir makes it.
		files, err := os.ReadDir(dir)
		if err != nil || len(files) > 0 {
			return errors.Join(shared, err, os.Chmod(dir, fi.Mode()))
		}
		return nil
	}
}
