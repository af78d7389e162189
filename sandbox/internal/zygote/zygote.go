// SPDX-License-Identifier: Apache-2.0

// Package zygote is the processes that stand between a worker and the commands it runs: the zygote,
// which is started once and never holds a file open for writing, and init, which is pid 1 of one run.
// It does what a Plan says and decides nothing.
//
//	worker ──socket──▶ zygote          one per backend; unprivileged: root of its own user namespace
//	                     └─ init       one per run: all other namespaces; makes the root
//	                          └─ command   a user namespace with one unprivileged user
//	worker ◀──control─── init, then zygote
//
// Both are this same executable, recognised by the first argument before flags are read or any other
// package of the program has been initialised. For that it must not depend on package net, os/exec or
// anything else that Go initialises after google.golang.org: packages are initialised in the order of
// their paths as their dependencies allow, and every run pays for what comes before this one.
//
// A run is asked for by one packet on the socket, with the descriptors in the order of the fd*
// constants. Control then carries packets in JSON: init says Started, and Exited with how the command
// ended; the zygote says Reaped once init and with it everything in its pid namespace is dead. The
// worker says "term" and "kill"; when it dies, control closes and init ends the run.
package zygote

// The names under which this executable starts itself. The zygote has one argument more, Root or Rootless:
// whether it has a user for each run, or makes do with the one that started it.
const (
	Name     = "cloister-zygote"
	Root     = "root"
	Rootless = "rootless"
	nameInit = "cloister-init"
	// NameProbe is the path of this executable inside a sandbox that is being probed.
	NameProbe = "/cloister-probe"
)

// Fixed facts of every run, so that no action can tell workers apart.
const (
	UID      = 1000 // the user that a run sees itself as
	GID      = 1000
	Hostname = "cloister"
)

// Users of the host that runs are mapped to if the zygote is Root, one for each run at a time, so that two
// never share a user. The range belongs to nobody by the table of systemd (https://systemd.io/UIDS-GIDS).
const (
	FirstUID = 60578
	LastUID  = 61183
)

// Requests to the zygote, the first byte of a packet.
const (
	ReqRun       = 'r' // with a Plan and the descriptors below
	ReqWorkspace = 'w' // answered by a packet with the descriptor of a new tmpfs
)

// Descriptors that come with ReqRun, in this order. The workspace comes only if the plan has one.
const (
	fdPlan = iota
	fdControl
	fdStdout
	fdStderr
	fdWorkspace
)

// Words from the worker on control.
const (
	WordTerm = "term" // send SIGTERM to every process of the run
	WordKill = "kill" // end the run now
)

// A Plan is what init does, in order, and then what it runs.
type Plan struct {
	Ops  []Op
	Args []string
	Env  []string
	Dir  string
	// Loopback says that the run has a loopback interface that is up.
	Loopback bool
	// Workspace says that a descriptor of a workspace comes with the plan.
	Workspace bool
}

// An OpKind is one way to make a part of the root.
type OpKind string

// The kinds of Op. Every target's parents are made if they are absent.
const (
	OpFile    OpKind = "file"    // a file with the contents of Source
	OpSymlink OpKind = "symlink" // a symbolic link to Source
	OpTmpfs   OpKind = "tmpfs"   // an empty writable tmpfs of Bytes bytes, mode 1777
	OpProc    OpKind = "proc"    // the processes of this run and nothing else
	OpBind    OpKind = "bind"    // Source read-only, no devices, no set-user-ID
	OpDevice  OpKind = "device"  // the device node Source
	OpOutput  OpKind = "output"  // Source writable, no devices, no set-user-ID
)

// An Op makes one part of the root.
type Op struct {
	Kind   OpKind
	Target string // absolute, in the new root
	// Source is a path of the host without symbolic links, a path relative to the workspace, a
	// link's target or a file's contents.
	Source string `json:",omitempty"`
	Bytes  int64  `json:",omitempty"`
}

// A Report is one packet on control from init or from the zygote; exactly one field is set.
type Report struct {
	// Started is when the command began to execute, in nanoseconds of Unix time.
	Started int64 `json:",omitempty"`
	// Failed says why the command was never started.
	Failed string  `json:",omitempty"`
	Exited *Exited `json:",omitempty"`
	Reaped *Reaped `json:",omitempty"`
}

// Exited is how the command ended.
type Exited struct {
	Code   int   // of the command, if Signal is 0
	Signal int   // that ended it
	At     int64 // nanoseconds of Unix time
}

// Reaped is how init ended, and what the run consumed.
type Reaped struct {
	UserNS, SystemNS int64 // CPU time, nanoseconds
	PeakRSS          int64 // bytes, of the largest process
}

// Facts is what the executable finds when it runs inside a sandbox as NameProbe.
type Facts struct {
	UID, GID     int
	PID          int
	Hostname     string
	Capabilities string // the effective set in hexadecimal
	NoNewPrivs   bool
	Interfaces   []string
	// RootWritable says that a file could be made in /.
	RootWritable bool
	// Processes counts the entries of /proc that are numbers.
	Processes int
	// Loopback says that a connection over loopback worked.
	Loopback bool
}
