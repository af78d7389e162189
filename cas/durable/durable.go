// SPDX-License-Identifier: Apache-2.0

// Package durable writes small files that survive a crash: whole files that are replaced atomically, and append-only
// logs of lines. It locks nothing: the caller makes sure that one process at a time writes a path.
package durable

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
)

// WriteFile replaces the file at path with data. After a crash or a power failure the file has either its old or its
// new content. Concurrent calls for one path are safe; the last rename wins.
func WriteFile(path string, data []byte, perm os.FileMode) error {
	return WriteFunc(path, perm, func(f *os.File) error {
		_, err := f.Write(data)
		return err
	})
}

// WriteFunc is WriteFile with content that write produces. If write fails, the old file stays.
func WriteFunc(path string, perm os.FileMode, write func(*os.File) error) error {
	f, err := os.CreateTemp(filepath.Dir(path), "."+filepath.Base(path)+"-*.new")
	if err != nil {
		return err
	}
	err = commit(f, path, func(f *os.File) error {
		return errors.Join(write(f), f.Chmod(perm))
	})
	if err != nil {
		return err
	}
	return SyncDir(filepath.Dir(path))
}

// newSuffix ends the name of a file that will replace another one.
const newSuffix = ".new"

// Replace is WriteFunc for one writer and mode 0600. A crash may leave path+".new" behind, which the next call
// overwrites. A power failure may bring the old file back until the caller has called SyncDir.
func Replace(path string, write func(*os.File) error) error {
	f, err := OpenFile(path+newSuffix, os.O_RDWR|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	return commit(f, path, write)
}

// commit writes and closes f and renames it to path, or removes it. Without the sync, a power failure could leave an
// empty file under the new name. Windows does not rename open files.
func commit(f *os.File, path string, write func(*os.File) error) error {
	err := write(f)
	if err == nil {
		err = f.Sync()
	}
	if err = errors.Join(err, f.Close()); err == nil {
		err = os.Rename(f.Name(), path) // commit point
	}
	if err != nil {
		_ = os.Remove(f.Name())
		return fmt.Errorf("replace %s: %w", path, err)
	}
	return nil
}

// SyncDir makes the names in a directory survive a power failure, on systems that can.
func SyncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	err = d.Sync()
	if runtime.GOOS == "windows" {
		err = nil // directories cannot be synced there
	}
	return errors.Join(err, d.Close())
}
