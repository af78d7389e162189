// SPDX-License-Identifier: Apache-2.0

package localworker

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// NewDir makes a temporary directory in another one, and removes those that killed processes have left there. The
// directory is locked until the returned file is closed.
func NewDir(in string) (dir string, held *os.File, removed []string, err error) {
	removed, _ = Sweep(in) // what it leaves does not prevent a new directory
	// Another process may take the new directory for an abandoned one before it is locked.
	const tries = 100
	for range tries {
		dir, err := os.MkdirTemp(in, tempPrefix)
		if err != nil {
			return "", nil, removed, err
		}
		held, err := Hold(dir, true)
		if err == nil {
			return dir, held, removed, nil
		}
		if !errors.Is(err, errNotOurs) {
			return "", nil, removed, errors.Join(err, os.RemoveAll(dir))
		}
	}
	return "", nil, removed, errors.New("temporary directories are removed as soon as they are created")
}

// Sweep removes the temporary directories that killed processes have left in another one, and returns their paths. It
// finds none in a directory that is absent or that this user may not list, as on a host that protects /tmp.
func Sweep(in string) (removed []string, err error) {
	entries, err := os.ReadDir(in)
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, fs.ErrPermission) {
		return nil, nil
	}
	for _, e := range entries {
		if !strings.HasPrefix(e.Name(), tempPrefix) {
			continue
		}
		dir := filepath.Join(in, e.Name())
		if held, holdErr := Hold(dir, false); holdErr == nil {
			removeErr := RemoveAll(dir)
			if removeErr == nil {
				removed = append(removed, dir)
			}
			err = errors.Join(err, removeErr)
			held.Close()
		}
	}
	return removed, err
}

// RemoveAll removes a directory, also with directories that only root could change, such as Go's module cache.
func RemoveAll(dir string) error {
	_ = filepath.WalkDir(dir, func(name string, e fs.DirEntry, err error) error {
		if err == nil && e.IsDir() {
			return os.Chmod(name, 0o700)
		}
		return err
	})
	return os.RemoveAll(dir) // it fails for the same reason
}

// errNotOurs means that a directory belongs to another process or user.
var errNotOurs = errors.New("not ours")

// Hold locks a directory by a file in it, if it belongs to this user and no living process has locked it. Without
// create, it fails for a directory that lacks the file. Closing the file releases the lock.
func Hold(dir string, create bool) (*os.File, error) {
	flags := unix.O_RDWR | unix.O_CLOEXEC | unix.O_NOFOLLOW | unix.O_NONBLOCK
	if create {
		flags |= unix.O_CREAT
	}
	path := filepath.Join(dir, LockFile)
	fd, err := unix.Open(path, flags, 0o600)
	if err != nil {
		return nil, errors.Join(errNotOurs, err)
	}
	f := os.NewFile(uintptr(fd), path)
	var above, file, now unix.Stat_t
	err = errors.Join(unix.Lstat(dir, &above), unix.Fstat(fd, &file))
	if uid := uint32(os.Geteuid()); err != nil || above.Mode&unix.S_IFMT != unix.S_IFDIR || above.Uid != uid || file.Uid != uid {
		return nil, errors.Join(errNotOurs, err, f.Close())
	}
	if err := unix.Flock(fd, unix.LOCK_EX|unix.LOCK_NB); err != nil {
		return nil, errors.Join(errNotOurs, err, f.Close())
	}
	if err := unix.Lstat(path, &now); err != nil || now.Ino != file.Ino || now.Dev != file.Dev {
		return nil, errors.Join(errNotOurs, err, f.Close())
	}
	return f, nil
}
