// SPDX-License-Identifier: Apache-2.0

//go:build linux || darwin || freebsd || netbsd || openbsd || dragonfly

package disk

import (
	"errors"
	"fmt"
	"os"
	"syscall"
)

// isFull reports whether err means that the file system or the user's quota is exhausted.
func isFull(err error) bool {
	return errors.Is(err, syscall.ENOSPC) || errors.Is(err, syscall.EDQUOT)
}

// makePrivate makes dir accessible only to this user. It refuses a directory that other users could write to: they
// could have placed links there to make this process change other files.
func makePrivate(dir string) error {
	fi, err := os.Stat(dir)
	if err != nil {
		return fmt.Errorf("open store: %w", err)
	}
	if st, ok := fi.Sys().(*syscall.Stat_t); ok && int(st.Uid) != os.Geteuid() {
		return fmt.Errorf("store directory %s belongs to user %d: run as that user, or choose another directory", dir, st.Uid)
	}
	shared := fmt.Errorf("store directory %s is writable by other users (%s): "+
		"inspect its content and chmod 700 it, or choose another directory", dir, fi.Mode())
	switch perm := fi.Mode().Perm(); {
	case perm&0o077 == 0:
		return nil
	case perm&0o002 != 0: // such as /tmp, which must not change
		return shared
	default:
		if err := os.Chmod(dir, 0o700); err != nil {
			return fmt.Errorf("open store: %w", err)
		}
		if perm&0o020 == 0 {
			return nil
		}
		// An empty directory is fine: with some umasks mkdir makes it writable for the group.
		files, err := os.ReadDir(dir)
		if err != nil || len(files) > 0 {
			return errors.Join(shared, err, os.Chmod(dir, fi.Mode()))
		}
		return nil
	}
}
