// SPDX-License-Identifier: Apache-2.0

// Package namespace runs commands in Linux namespaces. It is not a container runtime: there are no
// images, no networks to join and nothing to configure.
//
// What a run is promised, as root and as an ordinary user:
//   - a root made from nothing: what is not in the Spec does not exist;
//   - inputs on read-only mounts, which a process without capabilities cannot change, whoever owns the
//     files;
//   - its own processes, network (loopback at most), IPC objects, host name and cgroup view;
//   - one user, 1000, of a user namespace of its own, without capabilities and without new privileges;
//   - an environment of exactly the Spec's variables, an empty stdin, no descriptor but 0, 1 and 2;
//   - every process dead when Run returns.
//
// What it is not promised yet: limits on memory, processor time and the number of processes, and a
// filter of system calls.
//
// The processes that do it are described in package zygote. The worker itself mounts nothing.
package namespace

import (
	"github.com/cloister-build/cloister/sandbox"
)

// Name is what Features call this backend.
const Name = "namespace"

var _ sandbox.Backend = (*Backend)(nil)
