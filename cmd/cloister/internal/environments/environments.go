// SPDX-License-Identifier: Apache-2.0

// Package environments manages sandboxes that outlive a command. Each has a supervisor, a detached process that holds
// the sandbox, and a directory below the user's state directory:
//
//	lock        held by the supervisor; a killed one releases it
//	socket      on which the supervisor takes requests, from this user only
//	state.json  what the sandbox is, and how it ended
//	log         its commands and their exit codes; renamed to log.partial once a line is missing
//	temp        the path of the supervisor's temporary directory, for the cleanup after it was killed
//
// A directory is created beside them, in "moving", and gets its name once it is locked. To be removed, it is first
// moved back.
//
// A supervisor removes the file temp once it has cleaned up. An unlocked directory with this file, or whose state
// records no end, was left by a killed one. The kernel has removed its processes and mounts; every operation first
// removes the rest.
package environments

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/cloister-build/cloister/cas/durable"
	"github.com/cloister-build/cloister/cmd/internal/exit"
	"github.com/cloister-build/cloister/sandbox/printable"
)

// Files of a sandbox's directory.
const (
	socketFile = "socket"
	stateFile  = "state.json"
	logFile    = "log"
	partialLog = "log.partial"
	tempFile   = "temp"
)

// A State describes a sandbox. It is JSON for programs.
type State struct {
	Name    string    `json:"name"`
	Running bool      `json:"running"`
	Created time.Time `json:"created"`
	Sandbox string    `json:"sandbox"` // the value of --sandbox
	// Root is the image or directory that is the root file system, "" for the host's toolchain.
	Root string `json:"root,omitempty"`
	Tier string `json:"tier"` // of the isolation
	// IdleTimeout in seconds, 0 for none, and the time at which the sandbox ends at the latest.
	IdleTimeout float64   `json:"idle_timeout_seconds"`
	Expires     time.Time `json:"expires"`
	PID         int       `json:"pid"` // of the supervisor
	// Ended is when it ended, and Reason why.
	Ended  time.Time `json:"ended,omitzero"`
	Reason string    `json:"reason,omitempty"`
}

// Dir returns the directory of all sandboxes of this user, which it creates. No other user can change it.
func Dir() (string, error) {
	state := os.Getenv("XDG_STATE_HOME")
	if !filepath.IsAbs(state) {
		home, err := os.UserHomeDir()
		if err != nil {
			return "", exit.New(exit.Environment, fmt.Errorf("no state directory for this user (%w): set XDG_STATE_HOME", err))
		}
		state = filepath.Join(home, ".local", "state")
	}
	dir := filepath.Join(state, "cloister", "sandboxes")
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return "", exit.New(exit.Environment, err)
	}
	for _, d := range []string{filepath.Dir(dir), dir} {
		if err := checkPrivate(d); err != nil {
			return "", exit.New(exit.Environment, err)
		}
	}
	return dir, nil
}

// nameSyntax matches names of sandboxes.
var nameSyntax = regexp.MustCompile(`^[a-z0-9][a-z0-9_-]{0,62}$`)

// CheckName returns an error for a name that no sandbox can have.
func CheckName(name string) error {
	if !nameSyntax.MatchString(name) {
		return exit.New(exit.Usage, fmt.Errorf("sandbox name %+.80q: write up to 63 lower-case letters, digits, - and _", name))
	}
	return nil
}

// errAbsent means that there is no sandbox of a name.
func errAbsent(name string) error {
	return exit.New(exit.Absent, fmt.Errorf("no sandbox %s; see cloister sandbox ls", name))
}

// List returns the sandboxes of this user by name, having removed what killed ones left. If it cannot remove that, it
// returns them with an error.
func List() ([]State, error) {
	dir, err := Dir()
	if err != nil {
		return nil, err
	}
	swept := sweep(dir)
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, exit.New(exit.Environment, err)
	}
	list := []State{}
	for _, e := range entries {
		s, err := read(filepath.Join(dir, e.Name()))
		if errors.Is(err, os.ErrNotExist) {
			continue // it is being created or removed
		}
		if err != nil {
			return nil, exit.New(exit.Environment, err)
		}
		if swept != nil && s.Running && unswept(filepath.Join(dir, e.Name())) {
			s.Running, s.Reason = false, "killed; its files could not be removed"
		}
		list = append(list, *s)
	}
	return list, swept
}

// Names returns the names of sandboxes that begin with a prefix, for completion.
func Names(prefix string) []string {
	list, _ := List()
	list = slices.DeleteFunc(list, func(s State) bool { return !strings.HasPrefix(s.Name, prefix) })
	names := make([]string, 0, len(list))
	for _, s := range list {
		names = append(names, s.Name)
	}
	return names
}

// read returns the state in a sandbox's directory.
func read(dir string) (*State, error) {
	b, err := os.ReadFile(filepath.Join(dir, stateFile))
	if err != nil {
		return nil, err
	}
	var s State
	if err := json.Unmarshal(b, &s); err != nil {
		return nil, fmt.Errorf("%s: %w", filepath.Join(dir, stateFile), err)
	}
	s.Running = s.Ended.IsZero()
	return &s, nil
}

// printableLines returns a text that may come from a sandbox, as lines that cannot control a terminal.
func printableLines(text string) string {
	lines := strings.Split(strings.TrimSpace(text), "\n")
	for i := range lines {
		lines[i] = printable.Text(lines[i])
	}
	return strings.Join(lines, "\n")
}

func write(dir string, s *State) error {
	b, err := json.MarshalIndent(s, "", "  ")
	if err != nil {
		return err
	}
	return durable.WriteFile(filepath.Join(dir, stateFile), append(b, '\n'), 0o600)
}

// find returns the directory of a sandbox and its state.
func find(name string) (string, *State, error) {
	if err := CheckName(name); err != nil {
		return "", nil, err
	}
	all, err := Dir()
	if err != nil {
		return "", nil, err
	}
	dir := filepath.Join(all, name)
	if err := sweep(all); err != nil && unswept(dir) {
		return "", nil, err
	}
	s, err := read(dir)
	if errors.Is(err, os.ErrNotExist) {
		return "", nil, errAbsent(name)
	}
	if err != nil {
		return "", nil, exit.New(exit.Environment, err)
	}
	return dir, s, nil
}
