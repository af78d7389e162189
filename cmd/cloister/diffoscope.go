// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"

	"github.com/cloister-build/cloister/cas/tree"
	"github.com/cloister-build/cloister/worker/compare"
	"github.com/cloister-build/cloister/worker/repro"
)

// diffoscopeHelp is what the flag --diffoscope says of itself.
const diffoscopeHelp = "have diffoscope(1) look as well, if files differ; it runs outside of the sandbox"

// haveDiffoscope returns what is wrong with asking for it.
func haveDiffoscope(wanted bool) error {
	if !wanted {
		return nil
	}
	if _, err := exec.LookPath("diffoscope"); err != nil {
		return fmt.Errorf("--diffoscope: %w; install it, or leave the flag out", compare.ErrNoDiffoscope)
	}
	return nil
}

// lookDeeper has diffoscope compare two files or directories that differ: those of this host where they are, and blobs
// as copies.
func (c *diffConfig) lookDeeper(ctx context.Context, r *diffReport, a, b thing) error {
	if !c.diffoscope || len(r.Changes)+len(r.Differences) == 0 {
		return nil
	}
	dir, err := os.MkdirTemp("", "cloister-diff-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir) // plain files of ours
	var paths [2]string
	for i, t := range []thing{a, b} {
		if t.digest.IsZero() {
			paths[i] = t.name
			continue
		}
		if r.Kind != "blob" && r.Kind != "manifest" {
			return fmt.Errorf("--diffoscope compares files and blobs, and directories of this host: %s is none of them; "+
				"cloister run --action and cloister repro --keep write outputs to directories", quote(t.name))
		}
		paths[i] = filepath.Join(dir, []string{"a", "b"}[i])
		if err := c.copyTo(ctx, t, paths[i]); err != nil {
			return err
		}
	}
	r.Diffoscope, err = compare.Diffoscope(ctx, paths[0], paths[1])
	return err
}

// copyTo writes what a thing holds to a new file.
func (c *diffConfig) copyTo(ctx context.Context, t thing, path string) error {
	in, done, err := c.content(ctx, t)
	if err != nil {
		return err
	}
	defer done()
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	_, err = io.Copy(f, in)
	return errors.Join(err, f.Close())
}

// lookDeeper has diffoscope compare the outputs of the first run with those of the first that differs.
func (c *reproConfig) lookDeeper(ctx context.Context, bench *workbench, v *repro.Verdict, places []repro.Place) error {
	if !c.diffoscope || len(v.Differences) == 0 {
		return nil
	}
	dir, err := os.MkdirTemp(bench.dir, "diffoscope-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir) // plain files of ours
	var paths [2]string
	for side, i := range v.Differences[0].Runs {
		paths[side] = filepath.Join(dir, fmt.Sprintf("run%d", i+1))
		if err := extractRun(ctx, v, i, places, paths[side]); err != nil {
			return fmt.Errorf("--diffoscope: %w", err)
		}
	}
	v.Diffoscope, err = compare.Diffoscope(ctx, paths[0], paths[1])
	return err
}

// extractRun writes the outputs of a run to a directory, which it makes.
func extractRun(ctx context.Context, v *repro.Verdict, i int, places []repro.Place, dir string) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	root, err := os.OpenRoot(dir)
	if err != nil {
		return err
	}
	err = tree.Extract(ctx, places[i%len(places)].Store, v.Function(), v.Runs[i].Result, root)
	if err := errors.Join(err, root.Close()); err != nil {
		return fmt.Errorf("outputs of run %d: %w", i+1, err)
	}
	return nil
}
