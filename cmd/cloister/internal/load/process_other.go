// SPDX-License-Identifier: Apache-2.0

//go:build !linux

package load

import (
	"errors"
	"fmt"
)

// usageOf returns what a process has used.
func usageOf(int) (usage, error) {
	return usage{}, fmt.Errorf("watch a process: %w: only Linux says what another process has used", errors.ErrUnsupported)
}
