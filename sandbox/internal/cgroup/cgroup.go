// SPDX-License-Identifier: Apache-2.0

// Package cgroup limits and counts what one run uses, over all its processes, by control groups of
// version 2, or of version 1 where version 2 has no useful controller. It knows groups and files; who joins
// a group, and what it means that a limit was met, is the caller's.
//
// Attaching a running process costs milliseconds now and then. So a group is long-lived and serves one run
// after another: Reset before a run, Sample after it. A process is born in a group of version 2
// (CLONE_INTO_CGROUP); on version 1 a thread joins once, and what it starts is inside.
//
//	group of the worker          found in /proc/self/cgroup, never the root's but where the worker is there
//	  ├─ cloister-worker         version 2: the worker itself, since only leaves hold processes there
//	  └─ cloister.<pid>.<n>      locked by its worker, so that another can tell that it is dead
//	       ├─ <name>             a Group
//	       └─ <name>
//
// The package never mounts a hierarchy and never moves a controller between two: they are the host's.
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

// Ability is what the groups of a host can do. Each was found out by doing it.
type Ability struct {
	LimitMemory, LimitProcesses    bool
	CountCPU, CountMemory, CountIO bool
}

// Unlimited is the value of a limit that is not one.
const Unlimited = -1

// Limits are what the processes of a group may have together: bytes of memory, of which none is swapped
// out, and processes and threads. Each may be Unlimited; zero permits none.
type Limits struct {
	Memory, Processes int64
}

// Usage is what the processes of a group used since its Reset. What cannot be counted is zero.
type Usage struct {
	User, System time.Duration
	// PeakMemory is the most bytes at once beyond those that earlier runs left cached.
	PeakMemory int64
	// PeakProcesses is the most processes and threads at once. The kernel keeps one peak for the life of
	// a group, so it is known only where it exceeds that of every earlier run, and zero otherwise.
	PeakProcesses int64
	// ReadBytes and WrittenBytes passed between memory and disks.
	ReadBytes, WrittenBytes int64
	// OOMKills counts the processes that were killed for want of memory.
	OOMKills int64
	// ForksRefused counts the processes and threads that were not started, at the limit of them.
	ForksRefused int64
}
