// SPDX-License-Identifier: Apache-2.0

package reproduction

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/tree"
	"github.com/cloister-build/cloister/cmd/cloister/internal/localworker"
	"github.com/cloister-build/cloister/worker/repro"
	"github.com/cloister-build/cloister/worker/repro/compare"
)

// runDiffoscope runs diffoscope on the outputs of the first run and of the first that differs.
func (c *Config) runDiffoscope(ctx context.Context, w *localworker.Worker, v *repro.Verdict, executors []repro.Executor) error {
	if !c.Diffoscope || len(v.Differences) == 0 {
		return nil
	}
	dir, err := os.MkdirTemp(w.Dir, "diffoscope-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir) // plain files of ours
	var paths [2]string
	for side, i := range v.Differences[0].Runs {
		paths[side] = filepath.Join(dir, fmt.Sprintf("run%d", i+1))
		if err := extractRun(ctx, v, i, executors, paths[side]); err != nil {
			return fmt.Errorf("--diffoscope: %w", err)
		}
	}
	v.Diffoscope, err = compare.Diffoscope(ctx, paths[0], paths[1])
	return err
}

// extractRun writes the outputs of a run to a directory, which it makes.
func extractRun(ctx context.Context, v *repro.Verdict, i int, executors []repro.Executor, dir string) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	root, err := os.OpenRoot(dir)
	if err != nil {
		return err
	}
	err = tree.Extract(ctx, executors[i%len(executors)].Store, v.Function(), v.Runs[i].Result, root)
	if err := errors.Join(err, root.Close()); err != nil {
		return fmt.Errorf("outputs of run %d: %w", i+1, err)
	}
	return nil
}

// keepRuns copies the outputs of each run to the directory of --keep.
func (c *Config) keepRuns(ctx context.Context, v *repro.Verdict, executors []repro.Executor) error {
	if c.KeepIn == "" {
		return nil
	}
	below := c.KeepIn
	if len(c.Names) > 1 || c.Which.Set() {
		d, err := cas.ParseDigest(v.Action)
		if err != nil {
			return err
		}
		below = filepath.Join(below, d.Hash()) // the whole hash, so that outputs of two actions cannot mix
	}
	for i := range v.Runs {
		if err := extractRun(ctx, v, i, executors, filepath.Join(below, fmt.Sprintf("run%d", i+1))); err != nil {
			return fmt.Errorf("--keep: %w", err)
		}
	}
	return nil
}
