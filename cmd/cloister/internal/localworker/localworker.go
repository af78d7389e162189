// SPDX-License-Identifier: Apache-2.0

// Package localworker executes actions for a single command, with a temporary store and without a server. An action is
// made from a command line or fetched from a server.
package localworker

import (
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"

	"github.com/cloister-build/cloister/cas/disk"
	"github.com/cloister-build/cloister/cmd/cloister/internal/confinement"
	"github.com/cloister-build/cloister/sandbox/namespace"
	"github.com/cloister-build/cloister/sandbox/policy"
	"github.com/cloister-build/cloister/worker"
)

// tempPrefix begins the names of the directories of workbenches.
const tempPrefix = "cloister-run-"

// A workbench is what a command executes actions with that serves nobody: a store that lasts as long as it does, and
// a worker over it. It is made in two steps, so that what is wrong with the inputs is told before a sandbox is made.
type Worker struct {
	// dir holds the store, and is removed by close; there is room in it for plain files of the command's own.
	Dir   string
	held  *os.File // says that dir is that of a living process, where that is known
	Store *disk.Cache
	// local executes actions of the store, from start on.
	Local *worker.Local

	rules         *policy.Policy
	BackendConfig namespace.Config
	backend       *namespace.Backend
}

// Open makes a store in a new directory for temporary files. What is wrong with the flags of box is told
// first. The caller closes the workbench, on all of its ways.
func Open(box *confinement.Flags) (*Worker, error) {
	var w Worker
	var err error
	if w.rules, err = box.LoadPolicy(); err != nil {
		return nil, err
	}
	if w.BackendConfig, err = box.BackendConfig(); err != nil {
		return nil, err
	}
	made, held, err := newDir()
	if err != nil {
		return nil, err
	}
	w.Dir, w.held = made, held
	// Inputs are mounted by the paths of their files, and a link in them would be refused.
	real, err := filepath.EvalSymlinks(made)
	if err != nil {
		return nil, errors.Join(err, w.Close())
	}
	w.Dir = real
	// What is there already fits, and what is fetched is bounded before it comes.
	w.Store, err = disk.Open(disk.Config{Dir: filepath.Join(w.Dir, "store"), MaxBytes: math.MaxInt64, MaxFiles: math.MaxInt64})
	if err != nil {
		return nil, errors.Join(err, w.Close())
	}
	return &w, nil
}

// Start probes the sandbox and makes the worker. Of config it sets what the workbench knows: instances, backend,
// features, toolchain and policy; a Name must be there.
func (w *Worker) Start(ctx context.Context, config worker.Config) error {
	w.BackendConfig.Hidden = append(w.BackendConfig.Hidden, w.Dir)
	w.backend = namespace.New(w.BackendConfig)
	features, err := w.backend.Probe(ctx)
	if err != nil {
		return fmt.Errorf("the command cannot be sandboxed here, and is never run without: %w", err)
	}
	toolchain, err := worker.HostToolchain()
	if err != nil {
		return err
	}
	config.Instances, config.Policy = w.Store.Instance, w.rules
	config.Backend, config.Features, config.Toolchain = w.backend, features, toolchain
	w.Local = worker.New(config)
	return nil
}

// Close ends the sandbox and removes all that the workbench made. Nothing may execute any more.
func (w *Worker) Close() error {
	var err error
	if w.backend != nil {
		err = w.backend.Close()
	}
	if w.Store != nil {
		err = errors.Join(err, w.Store.Close())
	}
	err = errors.Join(err, os.RemoveAll(w.Dir)) // plain files of ours: nothing is ever mounted in a store
	if w.held != nil {
		err = errors.Join(err, w.held.Close())
	}
	return err
}
