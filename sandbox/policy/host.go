// SPDX-License-Identifier: Apache-2.0

package policy

import "github.com/cloister-build/cloister/sandbox"

// A Host describes the machine on which actions run, as far as built-in values depend on it. Zero fields change
// nothing.
type Host struct {
	// CPUs is the number of processors. The built-in limit of processes and threads grows with it: 64 for each in profile
	// build and 256 in profile test, but at least 128 and 1024.
	CPUs int
	// Memory is the memory in bytes, and Threads and OpenFiles are the most threads that can exist and the most files that
	// a process can open. Without a policy file, these bound what properties may request.
	Memory, Threads, OpenFiles int64
	// Audit is the built-in audit level. Actions may still request the level of their profile.
	Audit sandbox.Audit
}

// On returns p with the built-in values of a host. What a policy file sets is unchanged, and so are Text and Hash. If p
// is Default, properties may request up to what the host has.
func (p *Policy) On(h Host) *Policy {
	on := *p
	on.host = h
	return &on
}

// builtinAmount returns the built-in value v of a profile's quantity on this host, without exceeding most.
func (h *Host) builtinAmount(o *profile, q *quantity, v, most int64) int64 {
	if q.limit != sandbox.LimitProcesses {
		return v
	}
	scaled := min(o.processesPerCPU*int64(h.CPUs), q.max)
	if most > 0 {
		scaled = min(scaled, most)
	}
	return max(v, scaled)
}

// most returns how much of a quantity a property may request on this host, or 0 if that is unknown.
func (h *Host) most(q *quantity) int64 {
	switch q.limit {
	case sandbox.LimitMemory, sandbox.LimitOutputBytes, "": // outputs and /tmp are in memory, too
		return h.Memory
	case sandbox.LimitProcesses:
		return h.Threads
	case sandbox.LimitOpenFiles:
		return h.OpenFiles
	}
	if *h == (Host{}) {
		return 0
	}
	return q.max // time and number of files do not run out
}
