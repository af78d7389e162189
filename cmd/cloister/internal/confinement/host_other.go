// SPDX-License-Identifier: Apache-2.0

//go:build !linux

package confinement

import (
	"runtime"

	"github.com/cloister-build/cloister/sandbox/policy"
)

// thisHost describes this machine, where no sandbox is available.
func thisHost() policy.Host { return policy.Host{CPUs: runtime.NumCPU()} }
