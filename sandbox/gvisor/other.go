// SPDX-License-Identifier: Apache-2.0

//go:build !linux

package gvisor

import (
	"context"
	"fmt"
	"runtime"

	"github.com/cloister-build/cloister/sandbox"
)

// A backend runs nothing on this system.
type backend struct{}

// New returns a backend whose methods return sandbox.ErrUnsupported.
func New() sandbox.Backend { return backend{} }

func unsupported() error {
	return fmt.Errorf("%w: gVisor does not run on %s", sandbox.ErrUnsupported, runtime.GOOS)
}

func (backend) Probe(context.Context) (sandbox.Features, error) {
	return sandbox.Features{Backend: name, Kernel: kernelName, Tier: "none", Checks: []sandbox.Check{{
		Name: "gVisor", Detail: "this system is " + runtime.GOOS, Required: true,
	}}}, unsupported()
}

func (backend) Run(context.Context, *sandbox.Spec, sandbox.Stdio) (*sandbox.Result, error) {
	return nil, unsupported()
}

func (backend) Workspace(context.Context, int64, int64) (sandbox.Workspace, error) {
	return nil, unsupported()
}

func (backend) Close() error { return nil }
