// SPDX-License-Identifier: Apache-2.0

//go:build !linux

package namespace

import (
	"context"
	"os"
	"runtime"

	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/sandbox/internal/preflight"
)

// A Backend runs nothing on this system.
type Backend struct{}

// New returns a backend whose methods return sandbox.ErrUnsupported.
func New(Config) *Backend { return &Backend{} }

func initHelper() {}

func unsupported() error {
	return preflight.Fail(preflight.WrongSystem, "Linux namespaces do not exist on %s", runtime.GOOS)
}

// Probe returns ErrUnsupported.
func (*Backend) Probe(context.Context) (sandbox.Features, error) {
	return sandbox.Features{Backend: name, Tier: "none", Checks: []sandbox.Check{{
		Name: "Linux namespaces", Detail: "this system is " + runtime.GOOS, Required: true,
	}}}, unsupported()
}

// Run returns ErrUnsupported.
func (*Backend) Run(context.Context, *sandbox.Spec, sandbox.Stdio) (*sandbox.Result, error) {
	return nil, unsupported()
}

// Workspace returns ErrUnsupported.
func (*Backend) Workspace(context.Context, int64, int64) (sandbox.Workspace, error) {
	return nil, unsupported()
}

// Mount returns ErrUnsupported.
func (*Backend) Mount(context.Context, *os.File, []*os.File) (sandbox.Mount, error) {
	return nil, unsupported()
}

// Close does nothing.
func (*Backend) Close() error { return nil }
