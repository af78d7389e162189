// SPDX-License-Identifier: Apache-2.0

package localworker

import (
	"errors"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// newDir makes a directory for temporary files that nobody else has, and removes those of workbenches whose process was
// killed. The file that it returns holds the directory until it is closed.
func newDir() (string, *os.File, error) {
	dead, _ := filepath.Glob(filepath.Join(os.TempDir(), tempPrefix+"*"))
	for _, dir := range dead {
		if held, err := hold(dir, 0); err == nil {
			_ = os.RemoveAll(dir) // plain files; what remains is left to the next
			held.Close()
		}
	}
	// Between a file and its lock another process may take it for a dead one's.
	const tries = 100
	for range tries {
		dir, err := os.MkdirTemp("", tempPrefix)
		if err != nil {
			return "", nil, err
		}
		held, err := hold(dir, unix.O_CREAT)
		if err == nil {
			return dir, held, nil
		}
		if !errors.Is(err, errNotOurs) {
			return "", nil, errors.Join(err, os.RemoveAll(dir))
		}
	}
	return "", nil, errors.New("directories for temporary files are taken away as soon as they are made")
}

// errNotOurs says that a directory is another process's, or another user's.
var errNotOurs = errors.New("not ours")

// hold locks the directory of a workbench, by a file in it, if no living process has it and it is this user's. Directories
// without this file are nobody's business.
func hold(dir string, create int) (*os.File, error) {
	path := filepath.Join(dir, "lock")
	fd, err := unix.Open(path, unix.O_RDWR|unix.O_CLOEXEC|unix.O_NOFOLLOW|unix.O_NONBLOCK|create, 0o600)
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
