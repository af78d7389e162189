// SPDX-License-Identifier: Apache-2.0

// Package sandbox says what a confined run may see and use, and who can perform it. It is
// vocabulary: a Spec is plain data, a Backend performs it, and the backends are subdirectories. It
// knows neither blobs nor the remote execution API.
package sandbox

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"syscall"
	"time"
)

// Errors of a run.
var (
	// ErrUnsupported says that this host cannot do what is asked; its text says what is missing.
	ErrUnsupported = errors.New("not supported on this host")
	// ErrSpec says that a Spec contradicts itself; its text says where.
	ErrSpec = errors.New("invalid sandbox spec")
)

// A Backend runs commands by one isolation mechanism. Its methods are safe for concurrent use.
type Backend interface {
	// Probe reports what the backend can enforce on this host now, by doing it; ErrUnsupported,
	// beside a Features that says what is missing, if it can enforce too little to run anything.
	Probe(ctx context.Context) (Features, error)
	// Run performs spec. A command that started yields a Result, whatever it did; an error means
	// that it never started or its end is not known. A program that cannot be found or executed is
	// a Result, as a shell would give it. When ctx or spec.Timeout ends, the run is told to stop by
	// SIGTERM, killed after spec.Grace, and its Result says so. When Run returns, nothing of the run is alive and
	// nothing more is written to std.
	Run(ctx context.Context, spec *Spec, std Stdio) (*Result, error)
	// Workspace lends an empty private file system in which the inputs and outputs of one run are
	// laid out, with room for so many bytes and files, directories and links included; either may be
	// Unlimited. The caller closes it.
	Workspace(ctx context.Context, bytes, files int64) (Workspace, error)
	// Close ends the backend and every run in it.
	Close() error
}

// A Workspace is a private, empty, memory-backed file system. It has no path in any mount table: it
// vanishes when it is closed, or when its holder dies.
type Workspace interface {
	// Root reaches the files; it is the workspace's, and closed with it.
	Root() *os.Root
	// Name is what Spec.Workspace says to mean this workspace.
	Name() string
	// Close gives the memory back, once no run uses it any more.
	Close() error
}

// An ImageMounter is an optional ability of a Backend: to have inputs lie in images.
type ImageMounter interface {
	// Mount mounts the EROFS image in a file, whose chunks lie in devices, for runs alone, which cannot write to it.
	// The files remain the caller's, which may close them; nobody may change what the image uses of them until
	// the Mount is closed. ErrUnsupported says that this host cannot do it.
	Mount(ctx context.Context, image *os.File, devices []*os.File) (Mount, error)
}

// A Mount is an image that is mounted.
type Mount interface {
	// Name is what Input.Image says to mean this mount.
	Name() string
	// Close ends it, once no run uses it any more.
	Close() error
}

// Stdio is where a run's output goes. Its stdin is empty. A nil writer discards.
type Stdio struct {
	Stdout, Stderr io.Writer
	// Terminal, if not nil, is the run's stdin, stdout and stderr in place of all that, and its controlling
	// terminal: the user's end of a pseudo-terminal made for this run alone, for a person's shell. The
	// caller closes it.
	Terminal *os.File
}

// A Result is how a command ended.
type Result struct {
	// ExitCode is the command's own, 128+n where signal n ended it, 127 where the program was not
	// found, 126 where it was found and cannot be executed.
	ExitCode int
	// Signal is the signal that ended the command, or 0.
	Signal syscall.Signal
	// Stopped says that the run was told to end, by its timeout or its context, before its command
	// had ended by itself.
	Stopped bool
	// Exceeded is the limit that ended the run or made it fail, with what it used and what it may; or
	// nil. A run that met a limit and went on, as after a failed fork, has only an event of it.
	Exceeded *Event
	// Released says that nothing at all is left of the run. Else the kernel still holds files that it had open, with their
	// locks, because it sent them to itself and never received them: what it saw is not for another run.
	Released bool
	// Start and End are when the command began to execute and when it had ended, with readings of the monotonic clock.
	Start, End time.Time
	Usage      Usage
	// Events are what the syscall monitor recorded, equal ones as one with a count, in the order of Event.Compare.
	Events []Event
	// Unrecorded counts the events beyond MaxEvents different ones.
	Unrecorded int
	// Opened are the paths below inputs that the run opened for reading, sorted, if the Spec asks for
	// AuditFull.
	Opened []string
	// Executed are the files below inputs that the run executed, as its programs or as what these name to interpret
	// them (#!, PT_INTERP), sorted, if the Spec does not ask for AuditOff. ExecutedAll says that no other was.
	Executed    []string
	ExecutedAll bool
}

// Usage is what a run consumed, all its processes together. What a host cannot count is zero.
type Usage struct {
	User, System time.Duration
	// PeakRSS is the resident memory, in bytes, of the largest single process.
	PeakRSS int64
	// PeakMemory is the most memory, in bytes, that all processes and their files in memory had at once.
	PeakMemory int64
	// PeakProcesses is the most processes and threads there were at once, the run's own pid 1 included.
	PeakProcesses int64
	// ReadBytes and WrittenBytes passed between disk and memory.
	ReadBytes, WrittenBytes int64
	// Switches away from a processor, waiting for something and because others wanted it.
	VoluntarySwitches, InvoluntarySwitches int64
	// PacketsRefused counts the packets for which there was no route: every attempt to leave the sandbox. It is 0 as well
	// if what could count them was killed as the run ended.
	PacketsRefused int64
}

// Features is what a backend can enforce on this host: data, so that it can be printed and compared.
type Features struct {
	Backend string
	// Tier is how much of the confinement is in force: "full", "namespaces" (no system-call filter,
	// no Landlock and no syscall monitor, by the operator's choice), "weakened" or "none".
	Tier string
	// Layers are the mechanisms in force, in the order in which a person would name them.
	Layers []string
	// Limits are the kinds of limit that this backend enforces here.
	Limits []Limit
	// Audits are the degrees of watching that it can do.
	Audits []Audit
	// Endpoints says that exceptions of the network can be made, ListenControl that listening can be forbidden.
	Endpoints, ListenControl bool
	// Conditions are those that a run can be given otherwise than usual.
	Conditions []Condition
	// Checks are what was tried, in order.
	Checks []Check
}

// Covers returns nil if a backend of these features enforces all of s, and else ErrUnsupported, naming
// what it cannot enforce. A limit that is Unlimited needs no enforcement.
func (f *Features) Covers(s *Spec) error {
	for _, l := range AllLimits {
		if v := s.Limits.Of(l); v != Unlimited && !slices.Contains(f.Limits, l) {
			return fmt.Errorf("%w: the limit of %s (%s) cannot be enforced by this worker", ErrUnsupported, l, l.Format(v))
		}
	}
	if !slices.Contains(f.Audits, s.Audit) {
		return fmt.Errorf("%w: this worker cannot watch a run as closely as %s", ErrUnsupported, cmp.Or(string(s.Audit), "attempts"))
	}
	if len(s.Network.Allow) > 0 && !f.Endpoints {
		return fmt.Errorf("%w: this worker cannot make exceptions of the network (%s)", ErrUnsupported, s.Network.Allow[0])
	}
	for _, c := range AllConditions {
		if v := s.Conditions.Of(c); v != "" && !slices.Contains(f.Conditions, c) {
			return fmt.Errorf("%w: this worker cannot give a run another %s (%s)", ErrUnsupported, c, v)
		}
	}
	if s.Network.Loopback && !s.Network.Listen && !f.ListenControl {
		return fmt.Errorf("%w: this worker cannot forbid a run to listen", ErrUnsupported)
	}
	return nil
}

// A Check is one thing that was tried on this host.
type Check struct {
	Name string // what was tried: "user namespace"
	OK   bool
	// Detail says what was found. Where OK is false it says what is lost without it.
	Detail string
	// Fix is the one command or line that would enable it, or "".
	Fix string
	// Required says that nothing runs without it.
	Required bool
}
