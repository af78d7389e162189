// SPDX-License-Identifier: Apache-2.0

//go:build !linux

package environments

import (
	"context"
	"errors"

	"github.com/cloister-build/cloister/cmd/internal/exit"
)

var errSystem = exit.New(exit.Environment, errors.New("sandboxes need Linux"))

// Create fails.
func Create(context.Context, *Config) (*State, error) { return nil, errSystem }

// Exec fails.
func Exec(context.Context, string, *Command) (int, error) { return 0, errSystem }

// Stop fails.
func Stop(context.Context, string) (*State, error) { return nil, errSystem }

// Remove fails.
func Remove(context.Context, string) (*State, error) { return nil, errSystem }

func sweep(string) error { return errSystem }

func unswept(string) bool { return true }

func checkPrivate(string) error { return errSystem }
