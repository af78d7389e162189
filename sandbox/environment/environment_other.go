// SPDX-License-Identifier: Apache-2.0

//go:build !linux

package environment

import (
	"context"
	"fmt"
	"os"

	"github.com/cloister-build/cloister/sandbox"
)

// An Environment is a sandbox in which commands run.
type Environment struct{}

var errSystem = fmt.Errorf("%w: environments need Linux", sandbox.ErrUnsupported)

// Start returns ErrUnsupported.
func Start(
	context.Context, *sandbox.Features, func(context.Context, sandbox.Stdio) (*sandbox.Result, error),
) (*Environment, error) {
	return nil, errSystem
}

// Exec returns ErrUnsupported.
func (*Environment) Exec(context.Context, *sandbox.Spec, sandbox.Stdio, <-chan os.Signal) (int, error) {
	return 0, errSystem
}

// Close returns ErrUnsupported.
func (*Environment) Close(context.Context) (*sandbox.Result, error) { return nil, errSystem }

// Ended returns nil.
func (*Environment) Ended() <-chan struct{} { return nil }
