// SPDX-License-Identifier: Apache-2.0

//go:build !linux

package load

import (
	"errors"
	"fmt"
	"time"
)

var errWatch = fmt.Errorf("watch a process: %w: only Linux says what another process has used", errors.ErrUnsupported)

// usageOf returns what a process has used.
func usageOf(int) (usage, error) { return usage{}, errWatch }

// families returns the CPU time of processes and their descendants.
func families(pids []int) (living, ended time.Duration, err error) {
	if len(pids) > 0 {
		return 0, 0, errWatch
	}
	return 0, 0, nil
}

// machineCPU returns how long the processors of the machine have been busy.
func machineCPU() (time.Duration, error) { return 0, errors.ErrUnsupported }

// ownCPU returns the CPU time of this process and of its children.
func ownCPU() (self, ended time.Duration) { return 0, 0 }
