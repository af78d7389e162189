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
//   - every process dead when Run returns;
//   - only the system calls that actions need, and a second layer (Landlock) where the kernel has it;
//   - limits, as far as the host can enforce them; what it cannot is refused or named, never dropped;
//   - no network but the endpoints that its Spec names, each connection recorded;
//   - the Conditions that its Spec names, which no other run notices.
//
// And whoever runs it is told what it tried beyond that.
//
// The processes that do it are described in package zygote. The worker itself attaches no mount anywhere.
package namespace

import (
	"slices"

	"github.com/cloister-build/cloister/sandbox"
)

// Name is what Features call this backend.
const Name = "namespace"

// A Config says how a backend is to be made; its zero value is the strictest that the host can do.
type Config struct {
	// Without lists the layers to leave out, each by name. A backend without a layer says so in its
	// Features. It exists for hosts that cannot do better, by their operator's decision, and for tests
	// that show what each layer is for.
	Without []Layer
	// Hidden are directories of this host whose paths a run must not learn, though inputs come from
	// them: the directory of a store.
	Hidden []string
	// Source maps directories of a run to directories of this host in which, if a run is audited in full,
	// what it misses is looked for, so that it can be told where it is. Nothing there is opened.
	Source map[string]string

	attached bool // see zygote.Slot; for tests
}

func (c *Config) has(l Layer) bool { return !slices.Contains(c.Without, l) }

// A Layer is one mechanism of the sandbox.
type Layer string

// The layers that can be left out.
const (
	Seccomp      Layer = "seccomp"       // the filter of system calls
	Landlock     Layer = "landlock"      // the second layer over the file system
	Monitor      Layer = "monitor"       // the record of denied system calls
	Cgroups      Layer = "cgroups"       // limits over all processes of a run together
	Rlimits      Layer = "rlimits"       // limits of each process
	Capabilities Layer = "capabilities"  // none is left to a run
	ReadOnly     Layer = "read-only"     // inputs and root cannot be written
	NetNamespace Layer = "net namespace" // the network of the host is out of reach
	IPCNamespace Layer = "ipc namespace" // System V and POSIX IPC objects of others likewise
	NoSetuid     Layer = "nosuid"        // set-user-ID bits mean nothing
	ProcSubset   Layer = "proc subset"   // /proc shows processes of the run and nothing of the machine
	HiddenPaths  Layer = "hidden paths"  // no path of Config.Hidden shows in a mount table
	NoNesting    Layer = "no nesting"    // no user namespace can be made in that of a run
)

// NamespacesOnly are the layers to leave out where the kernel has none of them: what remains is the tier
// "namespaces".
var NamespacesOnly = []Layer{Seccomp, Landlock, Monitor}

var (
	_ sandbox.Backend      = (*Backend)(nil)
	_ sandbox.ImageMounter = (*Backend)(nil)
)
