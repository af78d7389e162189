// SPDX-License-Identifier: Apache-2.0

//go:build !linux

package microvm

import (
	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/sandbox/internal/absent"
)

// NewQEMU returns a backend whose methods return sandbox.ErrUnsupported.
func NewQEMU(emulated bool) sandbox.Backend { return kind{emulated: emulated}.absent() }

// NewMSB returns a backend whose methods return sandbox.ErrUnsupported.
func NewMSB() sandbox.Backend { return kind{msb: true}.absent() }

func (k kind) absent() sandbox.Backend {
	return absent.New(&sandbox.Features{Backend: k.name(), Kernel: k.kernel()}, k.engine())
}
