// SPDX-License-Identifier: Apache-2.0

// Package zygote is the processes that stand between a worker and the commands it runs: the zygote,
// which is started once and never holds a file open for writing, its slots, and pid 1 of each run. They do
// what a Plan says and decide nothing.
//
//	worker ──socket──▶ zygote        one per backend; unprivileged: root of its own user namespace
//	worker ──socket──▶  └─ slot      has one run at a time: network, control groups, and the part of the
//	                         │       root that every run has (Base)
//	                         └─ pid 1     one per run: a fork of the slot, made before the run is known
//	                              └─ command   in the slot's user namespace, which has one unprivileged user
//	worker ◀──control─── pid 1, slot
//
// A slot makes in ordinary Go what a run's root has beyond its Base, and tells the waiting pid 1 to go on. What
// pid 1 does is system calls alone, since the Go runtime is not there any more (fork_linux_unsafe.go).
//
// Zygote and slots are this same executable, recognised by the first argument before flags are read or any other
// package of the program has been initialised. For that it must not depend on package net, os/exec or
// anything else that Go initialises after google.golang.org: packages are initialised in the order of
// their paths as their dependencies allow. And the smaller a slot is, the sooner it has forked.
//
// A run is asked for by one packet on the slot's socket, with the descriptors in the order of the fd*
// constants. Control then carries reports: the command says Watching before it is executed, the slot Started after,
// Exited with how the command
// ended, and Reaped once pid 1 and with it everything in its pid namespace is dead. The worker says
// "term" and "kill" to pid 1; when it dies, control closes and pid 1 ends the run. Where control closes before Watching
// nothing of the run has happened; where it does before Reaped, the slot's socket says why, or the zygote how it ended.
package zygote

import (
	"bytes"
	"slices"
)

// The names under which this executable starts itself. The zygote has one argument more, Root or Rootless:
// whether it has two users for each run, or makes do with the one that started it.
const (
	Name       = "cloister-zygote"
	Root       = "root"
	Rootless   = "rootless"
	nameSlot   = "cloister-slot"
	nameHolder = "cloister-holder"
	// NameProbe is the path of this executable inside a sandbox that is being probed.
	NameProbe = "/cloister-probe"
)

// Fixed facts of every run, so that no action can tell workers apart.
const (
	UID      = 1000 // the user that a run sees itself as
	GID      = 1000
	Hostname = "cloister"
)

// Users of the host that belong to runs if the zygote is Root, two for each slot: the command's, and that of
// its pid 1. The range belongs to nobody by the table of systemd (https://systemd.io/UIDS-GIDS).
const (
	FirstUID = 60578
	LastUID  = 61183
	// MaxSlots is how many slots there are users for.
	MaxSlots = (LastUID - FirstUID + 1) / 2
)

// Requests to the zygote, the first byte of a packet, each answered by a packet with a descriptor.
const (
	ReqSlot      = 's' // then a Slot in JSON, with the files of control groups that it joins: the slot's socket
	ReqWorkspace = 'w' // then a Room in JSON: a new tmpfs
	ReqUsers     = 'u' // then Users in JSON: a user namespace for one run
	ReqEnd       = 'e' // then the number of a slot: no descriptor, but how it ended, in words; none while it lives
)

// Requests to a slot, which says by an empty answer, as that of the zygote to ReqSlot, when it is ready for the next one:
// whatever the last run had in memory is gone then. Of a request that it could not do anything with it says why before.
const (
	ReqRun     = 'r' // then a Plan, with the descriptors below; not answered
	ReqFile    = 'f' // the same; the Plan is in a file, whose descriptor comes first
	ReqNetwork = 'n' // answered by a Traffic in JSON; the next run has another network
)

// Descriptors that come with ReqRun, in this order, and then those that the plan speaks of.
const (
	fdControl = iota
	fdStdin
	fdStdout
	fdStderr
	fdMore
)

// MaxImages is how many images one run may have: the kernel passes on 253 descriptors at once.
const MaxImages = 200

// Words from the worker on control.
const (
	WordTerm = "term" // send SIGTERM to every process of the run
	WordKill = "kill" // end the run now
)

// A Slot is what a new slot is to be.
type Slot struct {
	Number int
	// Nested permits user namespaces inside that of its runs.
	Nested bool
	// Cgroup says that a control group of version 2 comes along, in which each run is born, and Tasks how many
	// files of version 1, into which the slot writes itself.
	Cgroup bool
	Tasks  int
	// Attached has the slot do as on a kernel that copies only mounts that are attached (before Linux 6.15).
	Attached bool
}

// Users are who a run of a slot is otherwise than usual.
type Users struct {
	Slot   int
	UID    int  // of user and group, inside
	Nested bool // see Slot
}

// Traffic is what left a network since it was made, or tried to.
type Traffic struct {
	// NoRoute counts the packets that found no route.
	NoRoute int64
}

// A Room is the size of a workspace; -1 is no size of its own.
type Room struct{ Bytes, Files int64 }

// A Base is the part of a plan that many runs have in common, so that a slot makes it once.
type Base struct {
	// Ops make the template, of which every run has a copy: nothing of it can be written.
	Ops []Op
	// Temps are made anew for each run.
	Temps []Op
	// Points are empty directories for what a run mounts.
	Points []string
	// Own says that the template is good for one run only, which may add to it.
	Own bool

	// Loopback says that a run has a loopback interface that is up.
	Loopback bool
	// HostNetwork and HostIPC leave a run in those namespaces of the host.
	HostNetwork, HostIPC bool
	// KeepCapabilities leaves the command the capabilities that a user namespace gives.
	KeepCapabilities bool
	// Filter is the system calls that the command may make, Reaper those of pid 1, as classic BPF
	// programs (seccomp(2)); empty is no filter.
	Filter, Reaper []byte
	// Watched says that the filter notifies, and that the worker wants its listener.
	Watched bool
	// Landlock, if not 0, is the version of Landlock to use.
	Landlock int
	// Hidden are directories of the host whose paths must not show in the run's mount table, though
	// sources lie in them.
	Hidden []string
	// ProcOptions are those of /proc: "subset=pid,hidepid=invisible", or "".
	ProcOptions string
	// WritableRoot leaves the root itself writable.
	WritableRoot bool
}

// Equal reports whether both make the same.
func (b *Base) Equal(o *Base) bool {
	return slices.Equal(b.Ops, o.Ops) && slices.Equal(b.Temps, o.Temps) && slices.Equal(b.Points, o.Points) && b.Own == o.Own &&
		b.Loopback == o.Loopback && b.HostNetwork == o.HostNetwork && b.HostIPC == o.HostIPC &&
		b.KeepCapabilities == o.KeepCapabilities && bytes.Equal(b.Filter, o.Filter) && bytes.Equal(b.Reaper, o.Reaper) &&
		b.Watched == o.Watched && b.Landlock == o.Landlock && slices.Equal(b.Hidden, o.Hidden) &&
		b.ProcOptions == o.ProcOptions && b.WritableRoot == o.WritableRoot
}

// A Plan is what one run is made of.
type Plan struct {
	// Base is absent if it is that of the slot's last run.
	Base *Base
	// Ops come on top of the base, in order.
	Ops  []Op
	Args []string
	Env  []string
	Dir  string

	// Workspace says that the descriptor of a workspace comes with the plan, before those of its images.
	Workspace bool
	// Terminal says that the standard streams are a terminal, which becomes the run's.
	Terminal bool

	// SameNetwork permits the network that the last run had, because that run made no socket in it.
	SameNetwork bool
	// Addresses are IPv4 addresses that loopback has besides its own.
	Addresses [][4]byte
	// Listeners are where the worker listens inside the run's network.
	Listeners []Listener

	// Rlimits are set for the command (getrlimit(2)).
	Rlimits []Rlimit
	// Writable are the only paths that can be changed, by Landlock.
	Writable []string

	// Conditions are what the run notices otherwise than usual, or nil.
	Conditions *Conditions `json:",omitempty"`
}

// Conditions are those of sandbox.Conditions that pid 1 and the command set for themselves. They end with the run. A
// field that is zero is as usual.
type Conditions struct {
	Hostname string
	// UID is the number of user and group. The descriptor of their user namespace (Users) comes last with the plan.
	UID   int
	Umask uint32
	// CPUs is how many processors the run may use: the first ones of those that its slot may use.
	CPUs        int
	FixedLayout bool
	SkippedPIDs int
	// Uptime is in nanoseconds.
	Uptime int64
}

// A Listener is an address and a port.
type Listener struct {
	Address [4]byte
	Port    uint16
}

// A Rlimit is a resource and its limit, soft and hard; no limit is raised above what the zygote may use.
type Rlimit struct {
	Resource int
	Value    uint64
}

// An OpKind is one way to make a part of the root.
type OpKind string

// The kinds of Op. Every target's parents are made if they are absent.
const (
	OpFile    OpKind = "file"    // a file with the contents of Source
	OpSymlink OpKind = "symlink" // a symbolic link to Source
	OpTmpfs   OpKind = "tmpfs"   // an empty writable tmpfs of Bytes bytes, mode 1777
	OpDir     OpKind = "dir"     // an empty directory
	OpBind    OpKind = "bind"    // Source
	OpDevice  OpKind = "device"  // the device node Source
)

// An Op makes one part of the root.
type Op struct {
	Kind   OpKind
	Target string // absolute, in the new root
	// Source is a path of the host without symbolic links, a path relative to the workspace or an image, a
	// link's target or a file's contents.
	Source string `json:",omitempty"`
	// Image is the number, from 1 on, of the image that Source is relative to, "." being its root.
	Image int   `json:",omitempty"`
	Bytes int64 `json:",omitempty"`
	// Device and Inode are what a source of the host was when the base was written, so that its replacement makes
	// another base.
	Device, Inode uint64 `json:",omitempty"`
	// Attrs restrict the mount: MOUNT_ATTR_* of mount_setattr(2).
	Attrs uint64 `json:",omitempty"`
}

// A Report is one packet on control; exactly one field is set.
type Report struct {
	// Watching is sent by the command before it is executed, with the listener of the filter if there is one. Without it
	// nothing of the run has happened.
	Watching bool
	// Listening comes with the sockets of Plan.Listeners, in their order.
	Listening bool
	// Started is when the command began to execute, in nanoseconds of Unix time. It comes with a descriptor of
	// pid 1 (pidfd_open(2)), if there is one.
	Started int64
	// Failed says why the command was never started, and Lost that, too, where the next try may do better.
	Failed, Lost string
	Exited       *Exited
	Reaped       *Reaped
}

// Exited is how the command ended.
type Exited struct {
	Code   int   // of the command, if Signal is 0
	Signal int   // that ended it
	At     int64 // nanoseconds of Unix time
}

// Reaped is how the run ended, and what it consumed.
type Reaped struct {
	UserNS, SystemNS       int64 // CPU time, nanoseconds
	PeakRSS                int64 // bytes, of the largest process
	ReadBlocks, Written    int64 // blocks of 512 bytes from and to disk
	Voluntary, Involuntary int64 // switches away from a processor
	// Killed is the signal by which somebody ended pid 1, or 0.
	Killed int64
	// Gone is 1 if the kernel holds nothing any more of what the run had open: no socket is on its way through another.
	Gone int64
	// Full are the temporary directories that had no room left when the command had ended.
	Full []string
}

// Facts is what the executable finds when it runs inside a sandbox as NameProbe.
type Facts struct {
	UID, GID     int
	PID          int
	Hostname     string
	Capabilities string // the effective set in hexadecimal
	NoNewPrivs   bool
	// Filtered says that a filter of system calls is in force.
	Filtered   bool
	Interfaces []string
	// RootWritable says that a file could be made in /.
	RootWritable bool
	// Processes counts the entries of /proc that are numbers.
	Processes int
	// Loopback says that a connection over loopback worked.
	Loopback bool
	// Mounts is the mount table.
	Mounts string

	Umask int
	CPUs  int
	// FixedLayout says that memory is laid out without randomness.
	FixedLayout bool
	// Monotonic is what CLOCK_MONOTONIC shows, in nanoseconds.
	Monotonic int64
}
