// SPDX-License-Identifier: Apache-2.0

//go:build !darwin

package seatbelt

import (
	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/sandbox/internal/absent"
)

// New returns a backend whose methods return sandbox.ErrUnsupported.
func New() sandbox.Backend {
	f := features()
	return absent.New(&f, "sandbox-exec")
}
