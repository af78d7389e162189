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
	"github.com/cloister-build/cloister/cas/tree"
	"github.com/cloister-build/cloister/cmd/cloister/internal/confinement"
	"github.com/cloister-build/cloister/cmd/cloister/internal/images"
	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/sandbox/namespace"
	"github.com/cloister-build/cloister/sandbox/policy"
	"github.com/cloister-build/cloister/worker"
)

// tempPrefix begins the names of temporary directories.
const tempPrefix = "cloister-run-"

// mountedTrees is the budget of mounted input trees in bytes: all runs of a command have the same inputs.
const mountedTrees = 1 << 30

// LockFile is the file of a temporary directory that its process has locked, if the system has such locks.
const LockFile = "lock"

// A Worker executes actions for one command, with a store that lasts as long as the command. Open and Start make it in
// two steps, so that mistakes in the inputs are reported before the sandbox is made.
type Worker struct {
	// Dir holds the store and files of the command; Close removes it.
	Dir   string
	held  *os.File // the lock that keeps other processes from removing Dir, if the system has such locks
	Store *disk.Cache
	// Local executes actions of the store, once started.
	Local    *worker.Local
	Features sandbox.Features // of the sandbox, once started

	policy        *policy.Policy
	ignoreImages  bool
	imageRules    policy.Images
	images        *images.Provider // nil before Open and with ignoreImages
	BackendConfig namespace.Config
	newBackend    func(namespace.Config) sandbox.Backend
	backend       sandbox.Backend
	stager        *tree.Stager
}

// Open makes a store in a new temporary directory. It validates the flags first. The caller closes the Worker.
func Open(box *confinement.Flags) (*Worker, error) {
	var w Worker
	var err error
	if w.policy, err = box.LoadPolicy(); err != nil {
		return nil, err
	}
	if w.BackendConfig, err = box.BackendConfig(); err != nil {
		return nil, err
	}
	w.newBackend = box.NewBackend
	if w.imageRules, err = box.Images(w.policy); err != nil {
		return nil, err
	}
	w.ignoreImages = box.IgnoreImages()
	made, held, _, err := NewDir(os.TempDir())
	if err != nil {
		return nil, err
	}
	w.Dir, w.held = made, held
	// Inputs are mounted by path, and mounts refuse symlinks.
	real, err := filepath.EvalSymlinks(made)
	if err != nil {
		return nil, errors.Join(err, w.Close())
	}
	w.Dir = real
	// Inputs of this host fit, and fetched ones are limited before they arrive.
	w.Store, err = disk.Open(disk.Config{Dir: filepath.Join(w.Dir, "store"), MaxBytes: math.MaxInt64, MaxFiles: math.MaxInt64})
	if err != nil {
		return nil, errors.Join(err, w.Close())
	}
	if !w.ignoreImages {
		w.images, err = images.Open(images.Config{Instances: w.Store.Instance, Dir: w.Dir, Rules: w.imageRules})
		if err != nil {
			return nil, errors.Join(err, w.Close())
		}
	}
	return &w, nil
}

// Start probes the sandbox and makes the worker. It fills in the instances, backend, features and policy of config, and
// adds this host's toolchain to its own.
func (w *Worker) Start(ctx context.Context, config worker.Config) error {
	w.BackendConfig.Hidden = append(w.BackendConfig.Hidden, w.Dir)
	w.backend = w.newBackend(w.BackendConfig)
	var err error
	if w.Features, err = w.backend.Probe(ctx); err != nil {
		return fmt.Errorf("this host cannot sandbox the command: %w", err)
	}
	toolchain, err := sandbox.HostToolchain()
	if err != nil {
		return err
	}
	if config.Certificates, err = sandbox.HostCertificates(); err != nil {
		return err
	}
	// Where images cannot be mounted, inputs are copied for each run, and the metadata of results says why.
	w.stager, _ = worker.NewStager(ctx, w.backend, tree.StagerConfig{Dir: w.Dir, Budget: mountedTrees})
	config.Stager = w.stager
	config.Instances, config.Policy, config.IgnoreImages = w.Store.Instance, w.policy, w.ignoreImages
	config.Backend, config.Features, config.Toolchain = w.backend, w.Features, append(toolchain, config.Toolchain...)
	config.AcceptGaps = true // who runs the command has chosen the sandbox
	if w.images != nil {
		config.Images, config.CacheUnpinned = w.images, w.imageRules.CacheUnpinned
	}
	w.Local, err = worker.New(config)
	return err
}

// Close ends the sandbox and removes Dir. No action may be running.
func (w *Worker) Close() error {
	var err error
	if w.stager != nil {
		err = w.stager.Close()
	}
	if w.backend != nil {
		err = errors.Join(err, w.backend.Close())
	}
	if w.images != nil {
		err = errors.Join(err, w.images.Close())
	}
	if w.Store != nil {
		err = errors.Join(err, w.Store.Close())
	}
	err = errors.Join(err, os.RemoveAll(w.Dir)) // plain files: nothing is ever mounted in a store
	if w.held != nil {
		err = errors.Join(err, w.held.Close())
	}
	return err
}
