// SPDX-License-Identifier: Apache-2.0

// Package sandbox defines what a confined run may see and use. It contains types only: a Spec is plain data, a Backend
// runs it, and the backends are in subdirectories. ForBuild and ForTest make a Spec for common cases. The package
// depends on neither blobs nor the Remote Execution API.
package sandbox

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"syscall"
	"time"
)

// Errors returned by a Backend.
var (
	// ErrUnsupported means that this host cannot do what was requested; its text names what is missing.
	ErrUnsupported = errors.New("not supported on this host")
	// ErrSpec means that a Spec is contradictory; its text says where.
	ErrSpec = errors.New("invalid sandbox spec")
	// ErrClosed means that the Backend was closed, before the call or during it.
	ErrClosed = errors.New("the sandbox is closed")
)

// A Backend runs commands with one isolation mechanism. Its methods are safe for concurrent use. After Close they
// return ErrClosed.
type Backend interface {
	// Probe reports what the backend enforces on this host, by trying it. If that is too little to run anything, it
	// returns ErrUnsupported and Features that name what is missing.
	Probe(ctx context.Context) (Features, error)
	// Run runs spec. If the command started, Run returns a Result whatever the command did; an error means that it
	// never started or that its end is unknown. The error is ErrSpec for an invalid Spec, and fs.ErrNotExist for a
	// missing Source. A program that is missing or not executable yields a Result with the exit code that a shell would
	// give, and an EventExec if the inputs lack its toolchain. When ctx or spec.Timeout ends, Run sends SIGTERM to the
	// run, kills it after spec.Grace and returns a Result with Stopped set. When Run returns, no process of the run is
	// alive and nothing more is written to std.
	Run(ctx context.Context, spec *Spec, std Stdio) (*Result, error)
	// Workspace creates an empty private file system for the inputs and outputs of one run, limited to this many bytes
	// and files (including directories and links); either may be Unlimited. The caller closes it.
	Workspace(ctx context.Context, bytes, files int64) (Workspace, error)
	// Close ends the backend and every run in it.
	Close() error
}

// A Workspace is a private, empty, memory-backed file system. It appears in no mount table and disappears when it is
// closed or its holder dies.
type Workspace interface {
	// Root gives access to the files. Close closes it.
	Root() *os.Root
	// Name identifies the workspace in Spec.Workspace.
	Name() string
	// Close frees the memory once no run uses it.
	Close() error
}

// An ImageMounter is a Backend that can mount inputs as images.
type ImageMounter interface {
	// Mount mounts an EROFS image, whose chunks are in devices, read-only and visible to runs only. The caller may
	// close the files immediately, but the parts that the image uses must not change until the Mount is closed. Mount
	// returns ErrUnsupported if this host cannot mount images.
	Mount(ctx context.Context, image *os.File, devices []*os.File) (Mount, error)
}

// A Mount is a mounted image.
type Mount interface {
	// Name identifies the mount in Input.Image.
	Name() string
	// Close unmounts the image once no run uses it.
	Close() error
}

// Stdio is a run's standard streams. A nil writer discards. If Stdout and Stderr are equal, the run has one stream for
// both, and at most one goroutine at a time calls Write.
type Stdio struct {
	Stdout, Stderr io.Writer
	// Stdin, if not nil, is the reading end of a pipe made for this run, which becomes its owner. The caller closes it.
	// Nil means an empty stdin.
	Stdin *os.File
	// Terminal, if not nil, replaces stdin, stdout and stderr and becomes the run's controlling terminal. It is the
	// user's end of a pseudo-terminal made for this run. The caller closes it.
	Terminal *os.File
}

// A Result describes how a command ended.
type Result struct {
	// ExitCode is the command's exit code, 128+n if signal n ended it, 127 if the program was not found, 126 if it is
	// not executable.
	ExitCode int
	// Signal is the signal that ended the command, or 0.
	Signal syscall.Signal
	// Stopped means that the timeout or the context ended the run before its command had exited.
	Stopped bool
	// Exceeded is the limit that ended the run or made it fail, or nil. A run that hit a limit and continued, as after
	// a failed fork, has an event only.
	Exceeded *Event
	// KilledForViolation means that the run was killed at an event of a kind of Spec.Kill, which is one of Events.
	KilledForViolation bool
	// Released means that the kernel has released every file of the run. Otherwise files are still open, with their
	// locks, because they were sent over a socket and never received: the run's inputs must not be reused.
	Released bool
	// Start and End are when the command was executed and when it ended, with monotonic clock readings.
	Start, End time.Time
	Usage      Usage
	// Events are what the syscall monitor recorded, with a count for equal events, in the order of Event.Compare.
	Events []Event
	// Unrecorded counts the events beyond MaxEvents different ones.
	Unrecorded int
	// Opened lists the paths below inputs that the run opened for reading, sorted, if the Spec asks for AuditFull.
	Opened []string
	// Executed lists the files below inputs that the run executed, as programs or as interpreters (#!, PT_INTERP),
	// sorted, unless the Spec asks for AuditOff. ExecutedAll means that the list is complete.
	Executed    []string
	ExecutedAll bool
}

// Usage is the resource consumption of all processes of a run. Measured distinguishes zero from unknown.
type Usage struct {
	// User and System are processor time in user mode and in the kernel.
	User, System time.Duration
	// PeakRSS is the resident memory, in bytes, of the largest single process, including pid 1 of the run. It is always
	// measured.
	PeakRSS int64
	// PeakMemory is the highest memory use of all processes and their files in memory, in bytes. It is not measured
	// without a control group for memory, nor if it did not exceed the memory that earlier runs had left in the group.
	PeakMemory int64
	// PeakProcesses is the highest number of processes and threads, including pid 1 of the run. It is measured only if
	// it exceeds that of every earlier run in the same control group.
	PeakProcesses int64
	// ReadBytes and WrittenBytes passed between disk and memory. Files that were already in memory, and outputs, which
	// are kept there, do not count, so both are usually zero.
	ReadBytes, WrittenBytes int64
	// VoluntarySwitches and InvoluntarySwitches count context switches of the processes that were waited for.
	VoluntarySwitches, InvoluntarySwitches int64
	// PacketsRefused counts packets without a route: every attempt to leave the sandbox. It is not measured if the slot
	// died before it could be read.
	PacketsRefused int64

	// Measured marks the figures that were measured for the whole run. If one is not marked, a peak and PacketsRefused
	// are zero, and processor time and disk bytes (ReadBytes and WrittenBytes) lack processes that nobody waited for.
	Measured struct{ CPU, PeakMemory, PeakProcesses, DiskBytes, PacketsRefused bool }
}

// Features describes what a backend enforces on this host. It is data, so that it can be printed and compared.
type Features struct {
	Backend string
	// Kernel is the name of the kernel that runs see if each has its own, or "" for that of this host.
	Kernel string
	// Tier is the level of confinement in force: "full", "partial" (this host lacks a layer: see the Checks that are not
	// OK), "namespaces" (the operator disabled the system call filter, Landlock and the syscall monitor), "weakened",
	// "unconfined" (runs are limited, but use files and network like any program) or "none".
	Tier string
	// Layers are the mechanisms in force, outermost first.
	Layers []string
	// Limits are the limits that the backend enforces here.
	Limits []Limit
	// Audits are the audit levels that it supports.
	Audits []Audit
	// Endpoints means that Network.Allow is supported, ListenControl that listening can be denied.
	Endpoints, ListenControl bool
	// Kill means that Spec.Kill is supported.
	Kill bool
	// Lower and Sockets report whether Spec.Lower and Spec.Sockets are supported.
	Lower, Sockets bool
	// Root means that Spec.Root and an output at "/" are supported, Superuser that Spec.Superuser is.
	Root, Superuser bool
	// Gaps are what no run is protected from, in words, such as "the files of this host", although a Spec that says
	// nothing about it expects that; see Spec.Accept.
	Gaps []string
	// SameUser means that runs have the user ID of the worker, so that the owner and mode of a file do not protect it from
	// them; see Lower.
	SameUser bool
	// Conditions are those that can differ from the default.
	Conditions []Condition
	// Checks are the results of the probes, in order.
	Checks []Check
}

// Covers returns nil if a backend with these features can enforce all of s, and otherwise an ErrUnsupported that names
// what it cannot enforce. Empty Features cover nothing. A nil Spec is ErrSpec.
func (f *Features) Covers(s *Spec) error {
	if s == nil {
		return fmt.Errorf("%w: %w", ErrSpec, errNilSpec)
	}
	if len(f.Audits) == 0 { // every backend supports AuditOff
		return fmt.Errorf("%w: the Features are empty: set them to the result of Backend.Probe", ErrUnsupported)
	}
	if len(f.Gaps) > 0 && s.Accept != f.Backend {
		return fmt.Errorf("%w: the sandbox %s does not protect from %s: an action accepts that with the property cloister-sandbox=%s",
			ErrUnsupported, f.Backend, strings.Join(f.Gaps, "; "), f.Backend)
	}
	for _, l := range AllLimits {
		if v := s.Limits.Of(l); v != Unlimited && !slices.Contains(f.Limits, l) {
			return fmt.Errorf("%w: this worker cannot enforce the limit of %s (%s)", ErrUnsupported, l, l.Format(v))
		}
	}
	if !slices.Contains(f.Audits, s.Audit) {
		return fmt.Errorf("%w: this worker does not support the audit level %s", ErrUnsupported, s.Audit)
	}
	if len(s.Kill) > 0 && !f.Kill {
		return fmt.Errorf("%w: this worker cannot kill a run at its first violation (%s)", ErrUnsupported, s.Kill[0])
	}
	if len(s.Network.Allow) > 0 && !f.Endpoints {
		return fmt.Errorf("%w: this worker cannot allow network endpoints (%s)", ErrUnsupported, s.Network.Allow[0])
	}
	if len(s.Lower) > 0 && !f.Lower {
		return fmt.Errorf("%w: this worker cannot mount an overlay over inputs", ErrUnsupported)
	}
	if len(s.Sockets) > 0 && !f.Sockets {
		return fmt.Errorf("%w: this sandbox does not support sockets of other processes (%s)", ErrUnsupported, s.Sockets[0].Target)
	}
	if !f.Root && (s.Root != nil || slices.ContainsFunc(s.Outputs, func(o Output) bool { return o.Target == "/" })) {
		return fmt.Errorf("%w: this worker cannot replace the root file system", ErrUnsupported)
	}
	if s.Superuser && !f.Superuser {
		return fmt.Errorf("%w: this worker cannot run a command as user 0", ErrUnsupported)
	}
	for _, c := range AllConditions {
		if v := s.Conditions.Of(c); v != "" && !slices.Contains(f.Conditions, c) {
			return fmt.Errorf("%w: this worker cannot change the %s of a run (%s)", ErrUnsupported, c, v)
		}
	}
	if s.Network.Loopback && !s.Network.Listen && !f.ListenControl {
		return fmt.Errorf("%w: this worker cannot deny listening", ErrUnsupported)
	}
	return nil
}

// A Check is the result of one probe of this host.
type Check struct {
	Name string // for example "user namespace"
	OK   bool
	// Detail describes the result or, if OK is false, the consequence.
	Detail string
	// Fix is a command or setting that enables it, or "".
	Fix string
	// Required means that nothing runs without it.
	Required bool
}
