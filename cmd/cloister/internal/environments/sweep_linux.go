// SPDX-License-Identifier: Apache-2.0

package environments

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/cloister-build/cloister/cmd/cloister/internal/localworker"
	"github.com/cloister-build/cloister/cmd/internal/exit"
	"github.com/cloister-build/cloister/sandbox/namespace"
	"golang.org/x/sys/unix"
)

// sweep removes what killed supervisors left: directories of sandboxes in dir, their temporary directories and their
// control groups. It keeps the directory of a sandbox whose end is recorded. What cannot be removed does not prevent the
// removal of the rest.
func sweep(dir string) error {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return exit.New(exit.Environment, err)
	}
	// Earlier versions used the default directory and wrote no note of it.
	died, temps, deadline := false, map[string]bool{os.TempDir(): true}, time.Now().Add(dyingTime)
	var errs []error
	for _, e := range entries {
		path := filepath.Join(dir, e.Name())
		held, err := hold(path, deadline)
		if err != nil {
			continue // it lives, or is being created
		}
		s, err := read(path)
		note := filepath.Join(path, tempFile)
		temp, noteErr := os.ReadFile(note)
		if errors.Is(err, os.ErrNotExist) || err == nil && (s.Running || noteErr == nil) {
			ended := err == nil && !s.Running // but its supervisor was killed before it had cleaned up
			err = nil
			if noteErr == nil && filepath.IsAbs(string(temp)) {
				// Sweep before the note is removed, since Sweep may fail and this process may be killed, too. Sweep again
				// below, since the kernel may release the lock of a temporary directory later than that of the sandbox.
				_, err = localworker.Sweep(string(temp))
			}
			switch {
			case err != nil:
			case ended:
				err = os.Remove(note)
			default:
				err = discard(path)
			}
			if err == nil {
				died = true
				temps[string(temp)] = filepath.IsAbs(string(temp))
			}
		}
		held.Close()
		if err != nil {
			errs = append(errs, fmt.Errorf("sandbox %s: %w", e.Name(), err))
		}
	}
	if died {
		for temp, noted := range temps {
			if noted {
				_, err := localworker.Sweep(temp)
				errs = append(errs, err)
			}
		}
		b := namespace.New(namespace.Config{})
		// Probe begins by removing the control groups of dead processes. Its result does not matter: the sandbox may have
		// used another backend.
		_, _ = b.Probe(context.Background())
		errs = append(errs, b.Close())
	}
	if err := errors.Join(errs...); err != nil {
		return exit.New(exit.Environment, fmt.Errorf("remove what a killed sandbox left: %w", err))
	}
	return nil
}

// unswept reports whether a killed supervisor left the directory of a sandbox, and a sweep could not clean up after it.
func unswept(dir string) bool {
	held, err := localworker.Hold(dir, false)
	if err != nil {
		return false // it is absent or lives
	}
	defer held.Close()
	s, err := read(dir)
	_, noteErr := os.Stat(filepath.Join(dir, tempFile))
	return err != nil || s.Running || noteErr == nil
}

// noteTemp records the temporary directory of this process, for a sweep by a process with another $TMPDIR.
func noteTemp(dir string) error {
	temp, err := filepath.Abs(os.TempDir())
	if err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(dir, tempFile), []byte(temp), 0o600)
}

// dyingTime is how long killed supervisors may take to end.
const dyingTime = 5 * time.Second

// hold locks the directory of a sandbox. It waits for a killed supervisor, which keeps its lock until the kernel has
// closed its files.
func hold(path string, deadline time.Time) (*os.File, error) {
	ended := false
	for {
		held, err := localworker.Hold(path, false)
		if err == nil || ended || time.Now().After(deadline) {
			return held, err
		}
		s, stateErr := read(path)
		if stateErr != nil || !s.Running {
			return nil, err
		}
		var dying bool
		if dying, ended = fate(s.PID); !dying && !ended {
			return nil, err
		}
		time.Sleep(5 * time.Millisecond)
	}
}

// fate reports whether a process has been killed and has not ended yet, and whether it has ended (proc_pid_status(5),
// proc_pid_stat(5)).
func fate(pid int) (dying, ended bool) {
	const exiting = 0x4 // PF_EXITING of include/linux/sched.h
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return false, true
	}
	for line := range strings.Lines(string(status)) {
		name, value, _ := strings.Cut(line, ":")
		switch value = strings.TrimSpace(value); name {
		case "State": // that of the first thread, which may end before the others
			if strings.HasPrefix(value, "Z") {
				return true, false
			}
		case "SigPnd", "ShdPnd":
			set, _ := strconv.ParseUint(value, 16, 64)
			if set&(1<<(unix.SIGKILL-1)) != 0 {
				return true, false
			}
		}
	}
	stat, _ := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	fields := strings.Fields(string(stat[bytes.LastIndexByte(stat, ')')+1:])) // the name may contain anything
	if len(fields) < 7 {
		return false, true
	}
	flags, _ := strconv.ParseUint(fields[6], 10, 64)
	return flags&exiting != 0, false
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
