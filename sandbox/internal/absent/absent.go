// SPDX-License-Identifier: Apache-2.0

// Package absent is the backend of a mechanism that this operating system lacks. It runs nothing.
package absent

import (
	"context"
	"fmt"
	"runtime"

	"github.com/cloister-build/cloister/sandbox"
)

// A backend returns sandbox.ErrUnsupported.
type backend struct {
	features sandbox.Features
	err      error
}

// New returns a backend with the name and kernel of f, whose mechanism has this name. Its methods return
// sandbox.ErrUnsupported.
func New(f sandbox.Features, mechanism string) sandbox.Backend {
	f.Tier = "none"
	f.Checks = []sandbox.Check{{Name: mechanism, Detail: "this system is " + runtime.GOOS, Required: true}}
	return &backend{f, fmt.Errorf("%w: %s does not run on %s", sandbox.ErrUnsupported, mechanism, runtime.GOOS)}
}

func (b *backend) Probe(context.Context) (sandbox.Features, error) { return b.features, b.err }

func (b *backend) Run(context.Context, *sandbox.Spec, sandbox.Stdio) (*sandbox.Result, error) {
	return nil, b.err
}

func (b *backend) Workspace(context.Context, int64, int64) (sandbox.Workspace, error) {
	return nil, b.err
}

func (*backend) Close() error { return nil }
