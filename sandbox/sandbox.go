// SPDX-License-Identifier: Apache-2.0

// Package sandbox says what a confined run may see and use, and who can perform it. It is
// vocabulary: a Spec is plain data, a Backend performs it, and the backends are subdirectories. It
// knows neither blobs nor the remote execution API.
package sandbox

import (
	"context"
	"errors"
	"io"
	"os"
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
	// laid out. The caller closes it.
	Workspace(ctx context.Context) (Workspace, error)
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

// Stdio is where a run's output goes. Its stdin is always empty. A nil writer discards.
type Stdio struct {
	Stdout, Stderr io.Writer
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
	// Start and End are when the command began to execute and when it had ended.
	Start, End time.Time
	Usage      Usage
}

// Usage is what a run consumed, all its processes together.
type Usage struct {
	User, System time.Duration
	// PeakRSS is the resident memory, in bytes, of the largest single process.
	PeakRSS int64
}

// Features is what a backend can enforce on this host: data, so that it can be printed and compared.
type Features struct {
	Backend string
	// Tier is how much of the confinement is in force: "full" or "none".
	Tier string
	// Layers are the mechanisms in force, in the order in which a person would name them.
	Layers []string
	// Checks are what was tried, in order.
	Checks []Check
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
