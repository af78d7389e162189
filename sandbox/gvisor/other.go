// SPDX-License-Identifier: Apache-2.0

//go:build !linux

package gvisor

import (
	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/sandbox/internal/absent"
)

// New returns a backend whose methods return sandbox.ErrUnsupported.
func New() sandbox.Backend {
	return absent.New(&sandbox.Features{Backend: name, Kernel: kernelName}, "gVisor")
}
