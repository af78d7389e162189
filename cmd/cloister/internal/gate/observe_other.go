// SPDX-License-Identifier: Apache-2.0

//go:build !linux

package gate

import (
	"context"

	"github.com/cloister-build/cloister/sandbox"
)

// observe needs strace or ss.
func (g *gate) observe(context.Context, *step, *stepReport, *source, sandbox.Stdio) (*sandbox.Result, []byte, error) {
	return nil, nil, sandbox.ErrUnsupported
}
