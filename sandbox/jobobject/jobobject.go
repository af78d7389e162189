// SPDX-License-Identifier: Apache-2.0

// Package jobobject runs commands in job objects of Windows. It limits runs and leaves no process of them behind, but it
// does not confine them: a run reads and writes what the worker's user may, without that user's privileges and
// administrative group, reaches every network, and may open, change or end the process of the worker, which has the same
// user. Features.Gaps lists that, so only a Spec that accepts this backend by its name runs.
//
// Everything else that the backend does not enforce is refused, including the absence of a network that a Spec asks for
// by omitting loopback. A run sees the paths of this host: Targets of outputs and temporary directories in its working
// directory, in the values of its environment and in the path of its program are replaced by those. If an input has
// another size, mode or time after the run, the run is an error.
//
// It was tested under Wine 8 on Linux and has never been run on Windows. Wine does not enforce the limits of jobs.
package jobobject

import (
	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/sandbox/internal/placement"
)

// Name is the name of this backend in Features and of --sandbox.
const Name = "jobobject"

// features returns what this backend enforces on its own operating system.
func features() sandbox.Features {
	return sandbox.Features{
		Backend: Name, Tier: "unconfined", Layers: []string{"job object", "restricted token"},
		Limits: append([]sandbox.Limit{sandbox.LimitMemory, sandbox.LimitCPU, sandbox.LimitProcesses}, placement.Limits...),
		Audits: []sandbox.Audit{sandbox.AuditOff},
		Lower:  true, SameUser: true,
		Gaps: []string{
			"reading and changing the files of this user", "reaching the network", "attacks on the worker's process",
			"processes that it starts through another process or a service",
		},
		Checks: []sandbox.Check{
			{Name: "files", Detail: "not confined: runs read and write what this user may; a run that changes its inputs has no result"},
			{Name: "network", Detail: "not confined: runs reach every network; an action that may not use loopback is refused"},
			{Name: "worker", Detail: "not protected: runs have its user, and may open, change or end its process"},
			{Name: "private paths", Detail: "runs see the paths of this host"},
			{Name: "limits", Detail: "threads are not counted; outputs are measured during the run and after it"},
			{Name: "syscall monitor", Detail: "attempts are not recorded"},
		},
	}
}
