// SPDX-License-Identifier: Apache-2.0

// Package limit defines the limits of runs for every backend: which are enforced, the events of those that are reached,
// and the resource limits of processes. It measures nothing.
package limit

import (
	"math"
	"slices"
	"time"

	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/sandbox/internal/cgroup"
	"github.com/cloister-build/cloister/sandbox/internal/zygote"
)

// ShmBytes bounds /dev/shm.
const ShmBytes = 1 << 30

// Enforced returns the limits that a backend enforces with these control groups, if it bounds processes and open files.
func Enforced(can cgroup.Capabilities, processes, openFiles bool) []sandbox.Limit {
	enforced := map[sandbox.Limit]bool{
		sandbox.LimitMemory: can.LimitMemory, sandbox.LimitCPU: can.CountCPU,
		sandbox.LimitProcesses: processes, sandbox.LimitOpenFiles: openFiles,
		sandbox.LimitOutputBytes: true, sandbox.LimitOutputFiles: true,
		sandbox.LimitMilliCPUs: can.LimitCPUs, sandbox.LimitDiskRate: can.LimitDisks,
	}
	return slices.DeleteFunc(slices.Clone(sandbox.AllLimits), func(l sandbox.Limit) bool { return !enforced[l] })
}

// Event returns the event for a limit that a run has hit.
func Event(l sandbox.Limit, actual, limit int64) *sandbox.Event {
	return &sandbox.Event{
		Kind: sandbox.EventLimit, Subject: string(l), Count: 1,
		Actual: l.Format(actual), Limit: l.Format(limit), ActualValue: actual, LimitValue: limit, Unit: l.Unit(),
	}
}

// FullTemp returns the event for a temporary directory that was full.
func FullTemp(t sandbox.Temp) *sandbox.Event {
	e := Event(sandbox.LimitOutputBytes, t.Bytes, t.Bytes)
	e.Subject = "room in " + t.Target
	return e
}

// ExceededBy returns the event for the limit that ends a run which has used this much, or nil.
func ExceededBy(l *sandbox.Limits, used *cgroup.Usage) *sandbox.Event {
	if used.OOMKilled {
		// The peak excludes the page cache of earlier runs and may be below the limit.
		return Event(sandbox.LimitMemory, max(used.PeakMemory, l.Memory), l.Memory)
	}
	if cpu := used.User + used.System; l.CPU != sandbox.Unlimited && cpu >= l.CPU {
		return Event(sandbox.LimitCPU, int64(cpu), int64(l.CPU))
	}
	return nil
}

// Lower returns the lower of two limits.
func Lower(a, b int64) int64 {
	if a == sandbox.Unlimited || b == sandbox.Unlimited {
		return max(a, b)
	}
	return min(a, b)
}

// Resources of getrlimit(2), with the kernel's values.
const (
	rlimitCPU     = 0
	rlimitCore    = 4
	rlimitNproc   = 6
	rlimitNofile  = 7
	rlimitMemlock = 8
	rlimitSignals = 11
	rlimitQueues  = 12
	rlimitNice    = 13
	rlimitRTPrio  = 14
)

// Rlimits returns the limits of each process of a run. Without counted, nothing else counts its processes.
func Rlimits(l *sandbox.Limits, counted bool) []zygote.Rlimit {
	// One byte, not zero: that also stops a core handler of the host, which the kernel would start
	// whatever the size (do_coredump in fs/coredump.c of Linux).
	rs := []zygote.Rlimit{{Resource: rlimitCore, Value: 1}}
	// Signals and message queues count for the user id owns the run's user namespace as well.
	rs = append(rs, zygote.Rlimit{Resource: rlimitMemlock, Value: 64 << 10}, zygote.Rlimit{Resource: rlimitSignals, Value: 1024},
		zygote.Rlimit{Resource: rlimitQueues, Value: 128 << 10}, zygote.Rlimit{Resource: rlimitNice}, zygote.Rlimit{Resource: rlimitRTPrio})
	if l.OpenFiles != sandbox.Unlimited {
		rs = append(rs, zygote.Rlimit{Resource: rlimitNofile, Value: uint64(l.OpenFiles)})
	}
	if l.Processes != sandbox.Unlimited && !counted {
		// The kernel counts per user and user namespace; each slot has its own.
		rs = append(rs, zygote.Rlimit{Resource: rlimitNproc, Value: uint64(l.Processes)})
	}
	if l.CPU != sandbox.Unlimited {
		// For a single process, and later than the backend, which counts all and reports it.
		rs = append(rs, zygote.Rlimit{Resource: rlimitCPU, Value: uint64(math.Ceil(time.Duration(l.CPU).Seconds())) + 2})
	}
	return rs
}
