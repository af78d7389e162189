// SPDX-License-Identifier: Apache-2.0

package environments

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/cloister-build/cloister/cmd/cloister/internal/localworker"
	"github.com/cloister-build/cloister/cmd/internal/exit"
	"github.com/cloister-build/cloister/sandbox/namespace"
	"golang.org/x/sys/unix"
)

// sweep removes what killed supervisors left: directories of sandboxes in dir, their temporary directories and their
// control groups.
func sweep(dir string) error {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return exit.New(exit.Environment, err)
	}
	died := false
	for _, e := range entries {
		path := filepath.Join(dir, e.Name())
		held, err := localworker.Hold(path, false)
		if err != nil {
			continue // it lives, or is being created
		}
		s, err := read(path)
		if errors.Is(err, os.ErrNotExist) || err == nil && s.Running {
			died = true
			err = discard(path)
		}
		held.Close()
		if err != nil {
			return exit.New(exit.Environment, fmt.Errorf("remove what a killed sandbox left: %w", err))
		}
	}
	if !died {
		return nil
	}
	localworker.Sweep(os.TempDir())
	b := namespace.New(namespace.Config{})
	_, err = b.Probe(context.Background()) // it removes control groups of dead processes
	if err = errors.Join(err, b.Close()); err != nil {
		return exit.New(exit.Environment, fmt.Errorf("remove what a killed sandbox left: %w", err))
	}
	return nil
}

// move creates and locks a directory beside dir, for a sandbox that does not have its name yet or no longer has it. It
// removes what killed processes left there.
func move(dir string) (string, *os.File, error) {
	moving := filepath.Join(filepath.Dir(dir), "moving")
	if err := os.MkdirAll(moving, 0o700); err != nil {
		return "", nil, err
	}
	made, held, _, err := localworker.NewDir(moving)
	return made, held, err
}

// discard removes the directory of a sandbox, which the caller has locked. It renames it first, so that no other
// process finds it half removed.
func discard(dir string) error {
	away, held, err := move(filepath.Dir(dir))
	if err != nil {
		return err
	}
	defer held.Close()
	return errors.Join(os.Rename(dir, filepath.Join(away, "sandbox")), localworker.RemoveAll(away))
}

// checkPrivate returns an error unless a directory belongs to this user and no other can change it: they could replace
// sandboxes in it.
func checkPrivate(dir string) error {
	var st unix.Stat_t
	if err := unix.Stat(dir, &st); err != nil {
		return fmt.Errorf("state directory %s: %w", dir, err)
	}
	switch {
	case int(st.Uid) != os.Geteuid():
		return fmt.Errorf("state directory %s belongs to user %d: run as that user, or set XDG_STATE_HOME", dir, st.Uid)
	case st.Mode&0o022 != 0:
		return fmt.Errorf("state directory %s is writable by other users (mode %#o): inspect its content and chmod 700 it, or set XDG_STATE_HOME",
			dir, st.Mode&0o7777)
	}
	return nil
}
