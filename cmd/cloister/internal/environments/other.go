// SPDX-License-Identifier: Apache-2.0

//go:build !linux

package environments

import (
	"context"
	"errors"
	"io"
	"os"

	"github.com/cloister-build/cloister/cmd/internal/exit"
)

// A Command is executed in a sandbox.
type Command struct {
	Args []string
	Env  []string // in addition to the sandbox's: KEY=VALUE
	Dir  string   // "" is the sandbox's working directory
	TTY  bool     // on a terminal of its own, connected to ours

	Stdin          io.Reader // nil is an empty stdin
	Stdout, Stderr *os.File
}

var errSystem = exit.New(exit.Environment, errors.New("sandboxes need Linux"))

// Create fails.
func Create(context.Context, *Config) (*State, error) { return nil, errSystem }

// Exec fails.
func Exec(context.Context, string, *Command) (int, error) { return 0, errSystem }

// Stop fails.
func Stop(context.Context, string) error { return errSystem }

// Remove fails.
func Remove(context.Context, string) error { return errSystem }

func sweep(string) error { return errSystem }

func checkPrivate(string) error { return errSystem }
