// SPDX-License-Identifier: Apache-2.0

// Package seatbelt runs commands under sandbox-exec, the sandbox of macOS, whose kernel checks each operation of a run
// against a profile. The profile and the way of starting it are tested on Linux. What runs them exists on macOS only,
// where it was compiled but has never been run.
//
// macOS has no mounts or process namespaces for single processes, and no control groups. So, compared with package
// namespace:
//   - a run sees the paths of this host: Targets of outputs and temporary directories in its working directory, in the
//     values of its environment and in the path of its program are replaced by those;
//   - loopback, if granted, is that of this host, with its services, such as a server of the worker;
//   - limits of memory, processor time and processes are refused; outputs are measured while the run lasts and after it;
//   - processes that leave the run's process group faster than they are counted outlive it, under their profile;
//   - attempts are not recorded; the run has the user and the host name of the worker, and can find out which processes
//     exist.
//
// Features.Gaps lists what a Spec cannot exclude, so only a Spec that accepts this backend by its name runs.
package seatbelt

import (
	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/sandbox/internal/placement"
)

// Name is the name of this backend in Features and of --sandbox.
const Name = "seatbelt"

// features returns what this backend enforces on its own operating system.
func features() sandbox.Features {
	return sandbox.Features{
		Backend: Name, Tier: "partial", Layers: []string{"sandbox-exec"},
		Limits:        append([]sandbox.Limit{sandbox.LimitOpenFiles}, placement.Limits...),
		Audits:        []sandbox.Audit{sandbox.AuditOff},
		ListenControl: true, Lower: true, SameUser: true,
		Gaps: []string{
			"services on the loopback interface of this host", "processes that leave the process group of their run",
			"which other processes exist",
		},
		Checks: []sandbox.Check{
			{Name: "private loopback", Detail: "loopback, if the policy grants it, is that of this host, with its services"},
			{Name: "private paths", Detail: "runs see the paths of this host"},
			{Name: "process namespace", Detail: "processes that leave the run's group at once may outlive it, under their profile"},
			{Name: "limits", Detail: "memory, processor time and processes are not limited; outputs are measured during the run and after it"},
			{Name: "syscall monitor", Detail: "attempts are not recorded"},
		},
	}
}
