// SPDX-License-Identifier: Apache-2.0

//go:build !linux

package sandboxtest

import (
	"testing"

	"github.com/cloister-build/cloister/sandbox"
)

func terminal(t *testing.T, _ sandbox.Backend) { t.Skip("the test opens a pseudo-terminal of Linux") }
