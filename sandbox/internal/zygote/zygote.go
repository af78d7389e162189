// SPDX-License-Identifier: Apache-2.0

// Package zygote implements the processes between a worker and the commands it runs: the zygote, which is started once
// and never holds a file open for writing, its slots, and pid 1 of each run. They execute a Plan and make no decisions.
//
//	worker ──socket──▶ zygote        one per backend; without privileges: root of its own user namespace
//	worker ──socket──▶  └─ slot      holds one run at a time: network, control groups, and the part of the root
//	                         │       that all its runs share (Base)
//	                         └─ pid 1     one per run: a fork of the slot, made before the run is known
//	                              └─ command   in the slot's user namespace, which has one unprivileged user
//	worker ◀──control─── pid 1, slot
//
// A slot sets up in ordinary Go what a run's root has beyond its Base, and then releases the waiting pid 1. Pid 1 makes
// system calls only, since the Go runtime does not survive the fork (fork_linux_unsafe.go).
//
// Zygote and slots are this same executable, recognised by its first argument when it calls Main. In programs that
// import package earlyinit this happens before most other packages are initialised, because a small slot forks faster.
// Therefore this package must not depend on net, os/exec or anything else that Go initialises after google.golang.org:
// Go initialises packages in the order of their paths as dependencies allow.
//
// One packet on the slot's socket requests a run, with descriptors in the order of the fd constants. Control then
// carries reports: Ready from the command before it executes, Started from the slot afterwards, Exited when the command
// ended, and Reaped once pid 1 and everything in its pid namespace is dead. The worker sends "term" to pid 1; when it
// shuts down its end of control, or dies, pid 1 ends the run. If control closes before Ready, the run has not begun; if
// it closes before Reaped, the slot's socket or the zygote reports why.
package zygote

import (
	"bytes"
	"slices"
)

// Names under which this executable starts itself. The zygote has one more argument: Root if it has two users for each
// slot, Rootless if it has only the user that started it.
const (
	Name       = "cloister-zygote"
	Root       = "root"
	Rootless   = "rootless"
	nameSlot   = "cloister-slot"
	nameHolder = "cloister-holder"
	// nameOuterHolder starts nameHolder.
	nameOuterHolder = "cloister-outer-holder"
	// NameProbe is the path of this executable inside a sandbox that is being probed.
	NameProbe = "/cloister-probe"
	// NameProbeInput is a file in the working directory of NameProbe that it must not be able to change.
	NameProbeInput = "input"
)

// Properties of every run, so that actions cannot tell workers apart.
const (
	UID      = 1000 // the user inside a run
	GID      = 1000
	Hostname = "cloister"
)

// Host users reserved for runs if the zygote is Root, two for each slot: one for the command, one for pid 1. Systemd's
// table assigns the range to nobody (https://systemd.io/UIDS-GIDS).
const (
	FirstUID = 60578
	LastUID  = 61183
	// MaxSlots is how many slots there are users for.
	MaxSlots = (LastUID - FirstUID + 1) / 2
)

// Requests to the zygote: the first byte of a packet. Each is answered by a packet with a descriptor.
const (
	ReqSlot          = 's' // followed by a Slot in JSON, with its control group files; returns the slot's socket
	ReqWorkspace     = 'w' // followed by a WorkspaceSize in JSON; returns a tmpfs
	ReqUserNamespace = 'u' // followed by a UserNamespace in JSON; returns a namespace for one run
	ReqSlotEnd       = 'e' // followed by a slot number; returns no descriptor but how the slot ended, "" if it is alive
)

// Requests to a slot. When it is ready for the next one it sends an empty answer; the memory of the last run is freed
// then. Before that it reports why it could not handle a request.
const (
	ReqRun     = 'r' // followed by a Plan, with the descriptors below; not answered
	ReqFile    = 'f' // the same with the Plan in a file, whose descriptor comes first
	ReqNetwork = 'n' // returns a Traffic in JSON; the next run gets a new network
)

// Descriptors with ReqRun, in this order, followed by those that the plan refers to.
const (
	fdControl = iota
	fdStdin
	fdStdout
	fdStderr
	fdMore
)

// MaxInotify limits the inotify instances of a slot's runs.
const MaxInotify = 16

// MaxImages is the maximum number of images of one run: the kernel passes 253 descriptors at once.
const MaxImages = 200

// WordTerm is the worker's message on control to send SIGTERM to every process of the run.
const WordTerm = "term"

// WordStart is the worker's answer to the report that a guest is about to start its command.
const WordStart = "start"

// A Slot describes a new slot.
type Slot struct {
	Number int
	// Nested permits user namespaces inside that of its runs.
	Nested bool
	// Cgroup means that the descriptor of a version 2 control group follows, in which each run is born. Tasks is the
	// number of version 1 files that follow, into which the slot writes itself.
	Cgroup bool
	Tasks  int
	// Attached makes the slot behave as on kernels that copy attached mounts only (before Linux 6.15).
	Attached bool
}

// A UserNamespace describes the user of a run that is not the default one.
type UserNamespace struct {
	Slot   int
	UID    int  // of user and group, inside
	Nested bool // see Slot
}

// Traffic counts what left a network, or tried to.
type Traffic struct {
	// NoRoute counts packets without a route.
	NoRoute int64
}

// A WorkspaceSize limits a workspace; -1 means no limit.
type WorkspaceSize struct{ Bytes, Files int64 }

// A Base is the part of a plan that many runs share, so that a slot sets it up once.
type Base struct {
	// Root, if not nil, mounts the root file system of the template: OpBind or OpOverlay at "/". Everything else is
	// mounted over what it contains. It is taken from the sources of the first plan with this base; RootName identifies
	// it.
	Root     *Op    `json:",omitempty"`
	RootName string `json:",omitempty"`
	// Ops make the template that every run gets a copy of; it is read-only.
	Ops []Op
	// Temps are created for each run.
	Temps []Op
	// MountPoints are empty directories that runs mount on.
	MountPoints []string
	// SingleUse means that the template serves one run only, which may add to it.
	SingleUse bool

	// Loopback gives runs a loopback interface that is up.
	Loopback bool
	// HostNetwork and HostIPC leave runs in those namespaces of the host.
	HostNetwork, HostIPC bool
	// KeepCapabilities leaves the command the capabilities of its user namespace.
	KeepCapabilities bool
	// Filter and InitFilter limit the system calls of the command and of pid 1, as classic BPF programs (seccomp(2));
	// empty is no filter.
	Filter, InitFilter []byte
	// Notify means that the filter reports calls and that the worker gets its listener.
	Notify bool
	// Landlock is the version of Landlock to use, or 0.
	Landlock int
	// Hidden are directories of the host whose paths must not appear in the run's mount table, although sources lie in
	// them.
	Hidden []string
	// ProcOptions are the mount options of /proc: "subset=pid,hidepid=invisible", or "".
	ProcOptions string
	// WritableRoot leaves the root directory writable.
	WritableRoot bool
}

// Equal reports whether both bases are the same.
func (b *Base) Equal(o *Base) bool {
	return b.RootName == o.RootName && (b.Root == nil) == (o.Root == nil) && slices.EqualFunc(b.Ops, o.Ops, Op.equal) && slices.EqualFunc(b.Temps, o.Temps, Op.equal) && slices.Equal(b.MountPoints, o.MountPoints) && b.SingleUse == o.SingleUse &&
		b.Loopback == o.Loopback && b.HostNetwork == o.HostNetwork && b.HostIPC == o.HostIPC &&
		b.KeepCapabilities == o.KeepCapabilities && bytes.Equal(b.Filter, o.Filter) && bytes.Equal(b.InitFilter, o.InitFilter) &&
		b.Notify == o.Notify && b.Landlock == o.Landlock && slices.Equal(b.Hidden, o.Hidden) &&
		b.ProcOptions == o.ProcOptions && b.WritableRoot == o.WritableRoot
}

// A Plan is everything that makes up one run.
type Plan struct {
	// Base is nil if the slot's last run had the same.
	Base *Base
	// Ops apply on top of the base, in order.
	Ops  []Op
	Args []string
	Env  []string
	Dir  string

	// Workspace means that the descriptor of a workspace comes with the plan, before those of images.
	Workspace bool
	// Terminal means that the standard streams are a terminal, which becomes the run's controlling terminal.
	Terminal bool

	// SameNetwork permits the network of the last run, which made no socket in it.
	SameNetwork bool
	// Addresses are additional IPv4 addresses of loopback.
	Addresses [][4]byte
	// Listeners are where the worker listens inside the run's network.
	Listeners []Listener

	// Rlimits are set for the command (getrlimit(2)).
	Rlimits []Rlimit
	// Writable are the only paths that Landlock lets the run change.
	Writable []string
	// Owned are the paths of the workspace that are given to the command's user.
	Owned []string

	// Conditions differ from the default, or nil.
	Conditions *Conditions `json:",omitempty"`
}

// Conditions are those of sandbox.Conditions that pid 1 and the command set for themselves. They end with the run. Zero
// fields are the default.
type Conditions struct {
	Hostname string
	// UID is the number of user and group, or 0 if Superuser is set. The descriptor of their UserNamespace comes last with
	// the plan.
	UID       int
	Superuser bool
	Umask     uint32
	// CPUs is how many processors the run may use: the first of those that its slot may use.
	CPUs        int
	FixedLayout bool
	SkippedPIDs int
	// Uptime is in nanoseconds.
	Uptime int64
}

// OtherUser reports whether the run has another user than the default, and thus its own UserNamespace.
func (c *Conditions) OtherUser() bool { return c.UID != 0 || c.Superuser }

// A Listener is an address and a port.
type Listener struct {
	Address [4]byte
	Port    uint16
}

// A Rlimit is a resource and its soft and hard limit; it never exceeds the zygote's own limit.
type Rlimit struct {
	Resource int
	Value    uint64
}

// An OpKind is a way to create a part of the root.
type OpKind string

// The kinds of Op. Missing parents of a target are created.
const (
	OpFile    OpKind = "file"    // a file that contains Source
	OpSymlink OpKind = "symlink" // a symbolic link to Source
	OpTmpfs   OpKind = "tmpfs"   // an empty writable tmpfs of Bytes bytes, mode 1777
	OpBind    OpKind = "bind"    // Source
	OpDevice  OpKind = "device"  // the device node Source
	OpOverlay OpKind = "overlay" // an overlay with the upper directory Source over the Lower directories
)

// An Op creates one part of the root.
type Op struct {
	Kind   OpKind
	Target string // absolute, in the new root
	// Source is a path of the host without symbolic links, a path relative to the workspace or an image, a link target,
	// or the contents of a file.
	Source string `json:",omitempty"`
	// Image is the number, from 1, of the image that Source is relative to; "." is its root.
	Image int   `json:",omitempty"`
	Bytes int64 `json:",omitempty"`
	// Device and Inode identify a source of the host, so that replacing it makes a different base.
	Device, Inode uint64 `json:",omitempty"`
	// Attrs restrict the mount: MOUNT_ATTR_* of mount_setattr(2).
	Attrs uint64 `json:",omitempty"`
	// Lower are the lower directories of an overlay, the topmost first.
	Lower []Lower `json:",omitempty"`
}

// equal reports whether both operations are the same.
func (o Op) equal(p Op) bool {
	return o.Kind == p.Kind && o.Target == p.Target && o.Source == p.Source && o.Image == p.Image && o.Bytes == p.Bytes &&
		o.Device == p.Device && o.Inode == p.Inode && o.Attrs == p.Attrs && slices.Equal(o.Lower, p.Lower)
}

// A Lower is a directory of the workspace or, if Image is not 0, of that image.
type Lower struct {
	Source string
	Image  int
}

// A Report is one packet on control; exactly one field is set.
type Report struct {
	// Ready is sent by the command before it executes, with the listener of its filter if it notifies. Before it the
	// run has not begun.
	Ready bool
	// Listening comes with the sockets of Plan.Listeners, in their order.
	Listening bool
	// Resolving comes with two sockets of a new network, for this run and the next ones: a UDP socket at port 53, where
	// lookups arrive, and a netlink socket that finds the network's other sockets (sock_diag(7)).
	Resolving bool
	// Unwritable are the targets of outputs whose directory the command cannot write to. It comes before Ready.
	Unwritable []string
	// Started is when the command was executed, in nanoseconds of Unix time. A pidfd of pid 1 comes with it, if there
	// is one. A Guest sends it before, and waits for WordStart.
	Started int64
	// Failed is why the command was never started; Lost is the same if another attempt may succeed.
	Failed, Lost string
	Exited       *Exited
	Reaped       *Reaped
}

// Exited describes how the command ended.
type Exited struct {
	Code   int   // exit code, if Signal is 0
	Signal int   // that ended the command, or 0
	At     int64 // nanoseconds of Unix time
	// Missing is MissingProgram or MissingInterpreter if the command did not start for that reason.
	Missing string
}

// Values of Exited.Missing.
const (
	MissingProgram     = "program"
	MissingInterpreter = "interpreter"
)

// Reaped describes how the run ended and what it used.
type Reaped struct {
	UserNS, SystemNS       int64 // CPU time, nanoseconds
	PeakRSS                int64 // bytes, of the largest process
	ReadBlocks, Written    int64 // blocks of 512 bytes from and to disk
	Voluntary, Involuntary int64 // switches away from a processor
	// Killed is the signal with which another process killed pid 1, or 0.
	Killed int64
	// Released is 1 if the kernel has released every file of the run: no socket is in flight inside another.
	Released int64
	// Full are the temporary directories that were full when the command ended.
	Full []string
}

// Facts is what the executable finds as NameProbe inside a sandbox.
type Facts struct {
	UID, GID     int
	PID          int
	Hostname     string
	Domain       string
	Capabilities string // the effective set in hexadecimal
	NoNewPrivs   bool
	// Filtered means that a system call filter is in force.
	Filtered   bool
	Interfaces []string
	// RootWritable means that a file could be created in /.
	RootWritable bool
	// InputWritable means that NameProbeInput could be opened for writing.
	InputWritable bool
	// Processes counts the processes in /proc.
	Processes int
	// Loopback means that loopback works.
	Loopback bool
	// Inotify counts the inotify instances that could be created, up to MaxInotify+1.
	Inotify int
	// Mounts is the mount table.
	Mounts string

	Umask int
	CPUs  int
	// FixedLayout means that address space randomization is off.
	FixedLayout bool
	// Monotonic is CLOCK_MONOTONIC in nanoseconds.
	Monotonic int64
}
