// SPDX-License-Identifier: Apache-2.0

// Package namespace runs commands in Linux namespaces. It is not a container runtime: it has no images to pull, no
// networks to join and nothing to configure.
//
// Guarantees for a run, as root and as an ordinary user:
//   - an initially empty root: anything not in the Spec does not exist;
//   - inputs on read-only mounts, which a process without capabilities cannot change, even if it owns the files, or in
//     lower layers of outputs, where they belong to another user or to nobody;
//   - its own processes, network (loopback at most), IPC objects, host name and cgroup view;
//   - one user, 1000, in its own user namespace, without capabilities or new privileges;
//   - exactly the Spec's environment, an empty stdin, no descriptor but 0, 1 and 2;
//   - every process dead when Run returns;
//   - only the system calls that actions need, and a second layer (Landlock) if the kernel has it;
//   - limits; those that the host cannot enforce are refused or named, never dropped;
//   - no network but the endpoints in its Spec, with each connection recorded;
//   - the Conditions in its Spec, which no other run notices.
//
// The Result lists what the run attempted beyond that.
//
// The program must call Init at the start of main. The worker itself attaches no mount.
package namespace

import (
	"slices"

	"github.com/cloister-build/cloister/sandbox"
)

// Init runs a helper process of a Backend. Helpers are this program, started again with an empty environment, as the
// same user and outside the sandbox; package zygote describes them. Programs that use a Backend call Init first in
// main, and tests first in TestMain. In a helper Init does not return; otherwise it does nothing. The init functions of
// the program run in each helper: they must need no environment and have no side effects there.
func Init() { initHelper() }

// name is this backend's name in Features.
const name = "namespace"

// A Config configures a backend; its zero value is the strictest that the host can enforce.
type Config struct {
	// Without lists layers to leave out; Features report them. It serves operators of hosts that lack them, and tests
	// that show what each layer is for.
	Without []Layer
	// Hidden are directories of this host whose paths a run must not learn although inputs come from them, such as a
	// store's directory.
	Hidden []string
	// Source maps directories of a run to directories of this host. A fully audited run's missing paths are looked up
	// there, to report where they exist. Nothing there is opened.
	Source map[string]string

	attached bool // see zygote.Slot; for tests
}

func (c *Config) has(l Layer) bool { return !slices.Contains(c.Without, l) }

// A Layer is one mechanism of the sandbox.
type Layer string

// The layers that can be left out.
const (
	Seccomp      Layer = "seccomp"       // system call filter
	Landlock     Layer = "landlock"      // second layer over the file system
	Monitor      Layer = "monitor"       // records denied system calls
	Cgroups      Layer = "cgroups"       // limits for all processes of a run together
	Rlimits      Layer = "rlimits"       // limits for each process
	Capabilities Layer = "capabilities"  // runs have none
	ReadOnly     Layer = "read-only"     // inputs and the root are read-only
	NetNamespace Layer = "net namespace" // the host's network is unreachable
	IPCNamespace Layer = "ipc namespace" // other System V and POSIX IPC objects are unreachable
	NoSetuid     Layer = "nosuid"        // set-user-ID bits have no effect
	ProcSubset   Layer = "proc subset"   // /proc shows the run's processes and nothing of the machine
	HiddenPaths  Layer = "hidden paths"  // mount tables show no path of Config.Hidden
	NoNesting    Layer = "no nesting"    // a run cannot create user namespaces
)

// NamespacesOnly are the layers to leave out for the tier "namespaces", on kernels that lack them.
var NamespacesOnly = []Layer{Seccomp, Landlock, Monitor}

var (
	_ sandbox.Backend      = (*Backend)(nil)
	_ sandbox.ImageMounter = (*Backend)(nil)
)
