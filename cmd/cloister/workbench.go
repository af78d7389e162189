// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"

	"github.com/cloister-build/cloister/cas/disk"
	"github.com/cloister-build/cloister/sandbox/namespace"
	"github.com/cloister-build/cloister/sandbox/policy"
	"github.com/cloister-build/cloister/worker"
)

// workbenchPrefix begins the names of the directories of workbenches.
const workbenchPrefix = "cloister-run-"

// A workbench is what a command executes actions with that serves nobody: a store that lasts as long as it does, and
// a worker over it. It is made in two steps, so that what is wrong with the inputs is told before a sandbox is made.
type workbench struct {
	// dir holds the store, and is removed by close; there is room in it for plain files of the command's own.
	dir   string
	held  *os.File // says that dir is that of a living process, where that is known
	store *disk.Cache
	// local executes actions of the store, from start on.
	local *worker.Local

	rules   *policy.Policy
	box     namespace.Config
	backend *namespace.Backend
}

// openWorkbench makes a store in a new directory for temporary files. What is wrong with the flags of box is told
// first. The caller closes the workbench, on all of its ways.
func openWorkbench(box *confinement) (*workbench, error) {
	var w workbench
	var err error
	if w.rules, err = box.rules(); err != nil {
		return nil, err
	}
	if w.box, err = box.backend(); err != nil {
		return nil, err
	}
	made, held, err := newDir()
	if err != nil {
		return nil, err
	}
	w.dir, w.held = made, held
	// Inputs are mounted by the paths of their files, and a link in them would be refused.
	real, err := filepath.EvalSymlinks(made)
	if err != nil {
		return nil, errors.Join(err, w.close())
	}
	w.dir = real
	// What is there already fits, and what is fetched is bounded before it comes.
	w.store, err = disk.Open(disk.Config{Dir: filepath.Join(w.dir, "store"), MaxBytes: math.MaxInt64, MaxFiles: math.MaxInt64})
	if err != nil {
		return nil, errors.Join(err, w.close())
	}
	return &w, nil
}

// start probes the sandbox and makes the worker. Of config it sets what the workbench knows: instances, backend,
// features, toolchain and policy; a Name must be there.
func (w *workbench) start(ctx context.Context, config worker.Config) error {
	w.box.Hidden = append(w.box.Hidden, w.dir)
	w.backend = namespace.New(w.box)
	features, err := w.backend.Probe(ctx)
	if err != nil {
		return fmt.Errorf("the command cannot be sandboxed here, and is never run without: %w", err)
	}
	toolchain, err := worker.HostToolchain()
	if err != nil {
		return err
	}
	config.Instances, config.Policy = w.store.Instance, w.rules
	config.Backend, config.Features, config.Toolchain = w.backend, features, toolchain
	w.local = worker.New(config)
	return nil
}

// close ends the sandbox and removes all that the workbench made. Nothing may execute any more.
func (w *workbench) close() error {
	var err error
	if w.backend != nil {
		err = w.backend.Close()
	}
	if w.store != nil {
		err = errors.Join(err, w.store.Close())
	}
	err = errors.Join(err, os.RemoveAll(w.dir)) // plain files of ours: nothing is ever mounted in a store
	if w.held != nil {
		err = errors.Join(err, w.held.Close())
	}
	return err
}
