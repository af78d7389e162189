// SPDX-License-Identifier: Apache-2.0

//go:build !linux

package worker

import (
	"net"
	"os"

	"github.com/cloister-build/cloister/sandbox"
)

// listenIn returns ErrUnsupported.
func listenIn(*os.Root, string) (net.Listener, error) { return nil, sandbox.ErrUnsupported }
