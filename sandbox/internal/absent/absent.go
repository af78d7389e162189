// SPDX-License-Identifier: Apache-2.0

// Package absent is the backend of a mechanism that this operating system lacks. It runs nothing.
package absent

import (
	"context"
	"runtime"

	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/sandbox/internal/preflight"
)

// A backend returns sandbox.ErrUnsupported.
type backend struct {
	features sandbox.Features
	err      error
}

// New returns a backend that has the features f on another operating system, with a mechanism of this name. Its methods
// return sandbox.ErrUnsupported; its own Features keep the checks of f, which report what the mechanism lacks.
func New(f *sandbox.Features, mechanism string) sandbox.Backend {
	missing := sandbox.Check{Name: mechanism, Detail: "this system is " + runtime.GOOS, Required: true}
	return &backend{
		sandbox.Features{Backend: f.Backend, Kernel: f.Kernel, Tier: "none", Checks: append([]sandbox.Check{missing}, f.Checks...)},
		preflight.Fail(preflight.WrongSystem, "%s does not run on %s", mechanism, runtime.GOOS),
	}
}

func (b *backend) Probe(context.Context) (sandbox.Features, error) { return b.features, b.err }

func (b *backend) Run(context.Context, *sandbox.Spec, sandbox.Stdio) (*sandbox.Result, error) {
	return nil, b.err
}

func (b *backend) Workspace(context.Context, int64, int64) (sandbox.Workspace, error) {
	return nil, b.err
}

func (*backend) Close() error { return nil }
