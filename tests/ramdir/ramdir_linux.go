// SPDX-License-Identifier: Apache-2.0

package ramdir

import (
	"errors"
	"os"
	"path/filepath"
	"syscall"

	"github.com/cloister-build/cloister/tests/internal/bazelrun"
	"golang.org/x/sys/unix"
)

// available reports whether shm is in memory, has a GiB free and permits execution, since tests build programs. In
// containers it often has 64 MiB, and hardened machines forbid execution.
func available() bool {
	var st unix.Statfs_t
	err := unix.Statfs(shm, &st)
	return err == nil && st.Type == unix.TMPFS_MAGIC && st.Flags&unix.MS_NOEXEC == 0 && st.Bavail*uint64(st.Bsize) >= 1<<30
}

// create makes a directory in parent and locks it until held is closed. It first removes the directories of processes
// that were killed: a lock ends with its process, in whatever PID namespace that ran. A lock of parent keeps another
// process from removing the new directory before it is locked.
func create(parent string) (dir string, held *os.File, err error) {
	all, err := lock(parent, unix.LOCK_EX)
	if err != nil {
		return "", nil, err
	}
	defer all.Close()
	old, err := filepath.Glob(filepath.Join(parent, prefix+"*"))
	if err != nil {
		return "", nil, err
	}
	for _, name := range old {
		f, err := lock(name, unix.LOCK_EX|unix.LOCK_NB)
		if err != nil {
			continue // in use
		}
		if fi, err := f.Stat(); err == nil && int(fi.Sys().(*syscall.Stat_t).Uid) == os.Geteuid() {
			_ = bazelrun.Remove(name) // fails if something is mounted there
		}
		f.Close()
	}
	if dir, err = os.MkdirTemp(parent, prefix); err != nil {
		return "", nil, err
	}
	if held, err = lock(dir, unix.LOCK_EX|unix.LOCK_NB); err != nil {
		return "", nil, errors.Join(err, os.Remove(dir))
	}
	return dir, held, nil
}

// lock opens and locks a directory.
func lock(dir string, how int) (*os.File, error) {
	f, err := os.OpenFile(dir, os.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW, 0)
	if err != nil {
		return nil, err
	}
	for {
		if err = unix.Flock(int(f.Fd()), how); err != unix.EINTR {
			break
		}
	}
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}
