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
			err = localworker.RemoveAll(path)
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
