// SPDX-License-Identifier: Apache-2.0

// Package gvisor runs commands in gVisor, a kernel in user space: the host's kernel sees only the few system calls of
// gVisor itself. The package starts runsc, a separate program that "make gvisor" builds, and does not link gVisor.
//
// A run has the guarantees of package namespace, with these differences:
//   - its kernel is gVisor's (platform systrap), so bugs of the host's kernel are out of its reach; gVisor itself, its
//     file server (the gofer) and pid 1 of the run have a host user that owns nothing;
//   - attempts are not recorded, since the kernel that sees them is not this host's: only AuditOff is supported;
//   - it reaches no endpoint outside the sandbox, and has no terminal, no root file system of its own and no superuser;
//   - limits of memory and processor time include what gVisor itself uses, about 40 MiB for each run, for which the
//     limit of memory is higher;
//   - the limit of processes is gVisor's: it permits a few more, and a fork that fails is not reported. A higher one
//     bounds gVisor's own processes and threads.
//
// Features reports what is not supported, and Run refuses it. The backend needs root, since each run gets two users.
//
// The program must call namespace.Init at the start of main, since a run starts this program as a helper. The program
// must be statically linked, because it is also pid 1 of the run.
package gvisor

// Names of this backend and its kernel in Features.
const (
	name       = "gvisor"
	kernelName = "gVisor"
)
