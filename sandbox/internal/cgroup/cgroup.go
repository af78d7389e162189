// SPDX-License-Identifier: Apache-2.0

// Package cgroup limits and measures the processes of one run with Linux control groups. It creates, limits and deletes
// groups through github.com/containerd/cgroups/v3, on version 2 where memory or pids is delegated to the worker and on
// version 1 otherwise. It knows groups and files; the caller decides what reaching a limit means.
//
// Moving a running process into a group takes milliseconds at times, so a group lives long and serves one run after
// another: Reset before a run, Sample after it. On version 2 a process is born in its group (CLONE_INTO_CGROUP); on
// version 1 one thread joins once, and its children inherit the group.
//
//	the worker's group           from /proc/self/cgroup
//	  ├─ cloister-worker         version 2: the worker itself, since only leaves may hold processes
//	  └─ cloister.<pid>.<n>      locked by its worker, so that other workers see whether it is alive
//	       ├─ <name>             a Group
//	       └─ <name>
//
// The module opens every file for every read and cannot reset a peak. Reset and Sample run before and after each
// action, so this package keeps the counters open and resets the peaks itself (counters_linux.go).
package cgroup

import "time"

// A Mode is the kind of control groups in use.
type Mode string

// The modes.
const (
	V2   Mode = "cgroup2"
	V1   Mode = "hybrid-v1"
	None Mode = "none"
)

// Capabilities are what the groups of a host can do, each found by trying it.
type Capabilities struct {
	LimitMemory, LimitProcesses, LimitCPUs, LimitDisks bool
	CountCPU, CountMemory, CountIO                     bool
}

// Unlimited is the value of a limit that is not set.
const Unlimited = -1

// Limits bound the processes of a group together: bytes of memory, none of which is swapped out, processes and threads,
// thousandths of a processor, and bytes per second from and to each disk. Each is positive or Unlimited.
type Limits struct {
	Memory, Processes, MilliCPUs, DiskRate int64
}

// noLimits are the limits of a group that is not limited.
var noLimits = Limits{Unlimited, Unlimited, Unlimited, Unlimited}

// Usage is what the processes of a group used since its Reset. Counters that the host lacks are zero.
type Usage struct {
	User, System time.Duration
	// PeakMemory is the highest memory use in bytes, without the page cache left by earlier runs.
	PeakMemory int64
	// PeakProcesses is the highest number of processes and threads. The kernel keeps one peak for the lifetime of a
	// group, so it is zero unless the run exceeded every earlier run.
	PeakProcesses int64
	// ReadBytes and WrittenBytes passed between memory and disks.
	ReadBytes, WrittenBytes int64
	// OOMKilled means that the kernel killed processes because memory was exhausted. It does not count them: when it
	// kills a whole group, version 2 counts the first process twice.
	OOMKilled bool
	// ForksRefused counts the forks that failed at the process limit.
	ForksRefused int64
}
