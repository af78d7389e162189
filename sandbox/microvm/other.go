// SPDX-License-Identifier: Apache-2.0

//go:build !linux

package microvm

import (
	"context"
	"fmt"
	"runtime"

	"github.com/cloister-build/cloister/sandbox"
)

// A backend runs nothing on this system.
type backend struct{ kind }

// NewQEMU returns a backend whose methods return sandbox.ErrUnsupported.
func NewQEMU(emulated bool) sandbox.Backend { return backend{kind{emulated: emulated}} }

// NewMSB returns a backend whose methods return sandbox.ErrUnsupported.
func NewMSB() sandbox.Backend { return backend{kind{msb: true}} }

func unsupported() error {
	return fmt.Errorf("%w: virtual machines do not run on %s", sandbox.ErrUnsupported, runtime.GOOS)
}

func (b backend) Probe(context.Context) (sandbox.Features, error) {
	return sandbox.Features{Backend: b.name(), Kernel: b.kind.kernel(), Tier: "none", Checks: []sandbox.Check{{
		Name: b.engine(), Detail: "this system is " + runtime.GOOS, Required: true,
	}}}, unsupported()
}

func (backend) Run(context.Context, *sandbox.Spec, sandbox.Stdio) (*sandbox.Result, error) {
	return nil, unsupported()
}

func (backend) Workspace(context.Context, int64, int64) (sandbox.Workspace, error) {
	return nil, unsupported()
}

func (backend) Close() error { return nil }
