// SPDX-License-Identifier: Apache-2.0

// Package manifest is the record of one run as canonical text (docs/manifest.md), and its stable hash: equal for two
// runs that are equal in all that matters, on any machine. It knows neither how a run is made nor where the text is
// kept; it reads no clock, no environment and no file.
package manifest

import (
	"time"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/sandbox"
)

// A Manifest is what is recorded of a run. Of two equal ones Text is equal, in whatever order their lists are.
type Manifest struct {
	// Action, Command and InputRoot are what was asked for.
	Action, Command, InputRoot cas.Digest
	// Revision is the revision of the sources that the input root is from, as its client names it; "" is not known.
	Revision string
	// Seed is what the run was given as the seed of its randomness, nil if it was given none.
	Seed *uint64
	// Order, if not 0, is the seed of the order in which directories of the input root were listed.
	Order uint64

	// Spec is the canonical text (sandbox.Spec.Text) of what the policy grants: what the run might see and use, also
	// where this host could not enforce it, and however closely it was watched.
	Spec          string
	Configuration Configuration
	Toolchain     Toolchain

	// Status is the name of the gRPC code of the execution: "OK" also where the command failed by itself.
	Status string
	// ExitCode is the command's, as sandbox.Result has it.
	ExitCode int
	// Stdout and Stderr are what it said.
	Stdout, Stderr cas.Digest
	// Outputs are what it left of what its command declares.
	Outputs []Output

	// Volatile is what two equal runs may differ in.
	Volatile Volatile
}

// A Configuration is what of a worker's configuration decides on results and is not in the Spec.
type Configuration struct {
	// Profile is what the policy calls the grant.
	Profile string
	// Hermetic says that the network had no exception.
	Hermetic bool
	// LogBytes is how much is kept of stdout and of stderr.
	LogBytes int64
}

// A Toolchain is the fingerprint of what the run used of its host: what it could see of the system, and the programs
// that it executed there.
type Toolchain struct {
	Host
	// Programs are those that are known to have been executed from the host, but for those of Volatile.
	Programs []Program
	// Complete says that there were no others: that the run was watched, and the list was long enough.
	Complete bool
}

// A Host is what every run on a machine can see of it.
type Host struct {
	// OS and Version are ID and VERSION_ID of os-release(5), "" if the host does not say.
	OS, Version string
	// Architecture is the processor's, as Go names it.
	Architecture string
	// Kernel and Release are what uname(2) calls sysname and release.
	Kernel, Release string
}

// A Program is a file of the host that was executed.
type Program struct {
	// Path is where the run found it, without links.
	Path string
	// Sum is the SHA-256 of its contents in hexadecimal, or Unreadable.
	Sum string
}

// Unreadable is the Sum of a program that the worker could execute but not read.
const Unreadable = "unreadable"

// A Kind says what an output is.
type Kind string

// The kinds.
const (
	File       Kind = "file"
	Executable Kind = "executable" // a file
	Tree       Kind = "tree"       // a directory, by the digest of its Tree
	Root       Kind = "root"       // a directory, by the digest of its root Directory
	Symlink    Kind = "symlink"
)

// An Output is something that the run left.
type Output struct {
	Kind Kind
	// Path is relative to the command's working directory.
	Path string
	// Digest is of the contents; of a Symlink it is the zero Digest.
	Digest cas.Digest
	// Target is where a Symlink leads.
	Target string
}

// Volatile is what two equal runs may differ in.
type Volatile struct {
	// Worker is who made the run; Backend and Tier are by what confinement.
	Worker, Backend, Tier string
	// Audit is how closely the run was watched: "off", "attempts" or "full".
	Audit string
	// Unenforced are the limits of the Spec that this worker cannot enforce.
	Unenforced []sandbox.Limit
	// Programs were executed from the host as well, and only wait or look at processes: how far a watchdog gets before
	// what it watches has ended is an accident.
	Programs []Program
	// Policy is the hash of the policy's text, Rule what chose the profile.
	Policy, Rule string
	// Queued, Began, Staging, Staged, Started and Ended are when the request arrived, the worker took it, its inputs
	// were being laid out and were, the command began to execute and had ended. The zero time is not known.
	Queued, Began, Staging, Staged, Started, Ended time.Time
	Usage                                          sandbox.Usage
	// Events counts the different events, Unrecorded those beyond.
	Events, Unrecorded int
}
