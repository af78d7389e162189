// SPDX-License-Identifier: Apache-2.0

//go:build !linux

package load

import (
	"errors"
	"fmt"
	"time"
)

var errWatch = fmt.Errorf("watch a process: %w: only Linux reports the usage of other processes", errors.ErrUnsupported)

func flush() {}

// usageOf returns the usage of a process.
func usageOf(int) (usage, error) { return usage{}, errWatch }

// treeCPU returns the CPU time of processes and their descendants.
func treeCPU(pids []int) (live, exited time.Duration, err error) {
	if len(pids) > 0 {
		return 0, 0, errWatch
	}
	return 0, 0, nil
}

// machineCPU returns the busy time of all processors.
func machineCPU() (time.Duration, error) { return 0, errors.ErrUnsupported }

// ownCPU returns the CPU time of this process, and of its exited children.
func ownCPU() (self, children time.Duration) { return 0, 0 }
