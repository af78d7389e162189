// SPDX-License-Identifier: Apache-2.0

// Package manifest writes and reads the record of one run as canonical text (docs/manifest.md). Two equivalent runs
// have the same stable hash, on any machine. The package neither runs actions nor stores manifests, and it reads no
// clock, no environment and no files.
package manifest

import (
	"time"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/sandbox"
)

// A Manifest is the record of a run. The order of its lists does not matter: Text sorts them.
type Manifest struct {
	Action, Command, InputRoot cas.Digest
	// Revision is the source revision of the input root, as the client named it; "" if unknown.
	Revision string
	// Sandbox is the backend of a run with a kernel of its own (sandbox.Features.Kernel) or with gaps (Features.Gaps), or
	// "".
	Sandbox string
	// Seed is the seed of the run's random numbers, nil if it had none.
	Seed *uint64
	// Order, if not 0, is the seed of the order in which directories of the input root list their entries.
	Order uint64

	// Spec is the canonical text (sandbox.Spec.Text) of what the policy grants, whether or not the host could enforce
	// it.
	Spec          string
	Configuration Configuration
	Toolchain     Toolchain
	// RemoteAPIs is what the run fetched through its socket for remote APIs, nil if it called none.
	RemoteAPIs *RemoteAPIs

	// Status is the name of the gRPC code of the execution. It is "OK" if the command itself failed.
	Status string
	// ExitCode is sandbox.Result.ExitCode.
	ExitCode       int
	Stdout, Stderr cas.Digest
	// Outputs are the declared outputs that the command produced.
	Outputs []Output

	// Volatile is not part of the stable hash.
	Volatile Volatile
}

// A Configuration holds the settings of a worker that affect results and are not in the Spec.
type Configuration struct {
	// Profile is the name of the grant in the policy.
	Profile string
	// Hermetic means that the policy grants no network exception.
	Hermetic bool
	// LogBytes limits the size of stdout and of stderr.
	LogBytes int64
}

// A Toolchain is what the run used of its host: the system and the programs it executed.
type Toolchain struct {
	Host
	// Programs are the programs of the host that are known to have been executed, except those of Volatile.
	Programs []Program
	// Complete means that no others were executed: the run was monitored and the list did not overflow.
	Complete bool
}

// A Host is what every run can see of its machine.
type Host struct {
	// OS and Version are ID and VERSION_ID of os-release(5), "" if unset.
	OS, Version string
	// Architecture is a GOARCH.
	Architecture string
	// Kernel and Release are sysname and release of uname(2).
	Kernel, Release string
}

// A Program is an executed file of the host.
type Program struct {
	// Path is its path in the sandbox, with links resolved.
	Path string
	// Sum is the SHA-256 of its content in hexadecimal, or Unreadable.
	Sum string
}

// Unreadable is the Sum of a program that the worker could execute but not read.
const Unreadable = "unreadable"

// RemoteAPIs are the inputs of a run that are not in its input root: what it fetched from remote APIs.
type RemoteAPIs struct {
	// Count is the number of different blobs and results.
	Count int
	// Fetched lists them in any order, or is nil if they are more than MaxFetched.
	Fetched []Fetched
	// Sum is the SHA-256 of the sorted lines of everything that was fetched, in hexadecimal, if they are more than
	// MaxFetched, or "".
	Sum string
}

// MaxFetched is the number of fetched blobs and results that a manifest lists.
const MaxFetched = 1000

// A Fetched is a blob or, with a Sum, a result.
type Fetched struct {
	// Digest is that of the blob, or of the action whose result it was.
	Digest cas.Digest
	// Sum is the SHA-256 of the result without its execution metadata, in hexadecimal, or "".
	Sum string
}

// NewRemoteAPIs returns what a run fetched; all has no duplicates.
func NewRemoteAPIs(all []Fetched) *RemoteAPIs {
	r := &RemoteAPIs{Count: len(all)}
	if len(all) <= MaxFetched {
		r.Fetched = all
	} else {
		r.Sum = Hash(fetchedText(all))
	}
	return r
}

// A Kind is the type of an output.
type Kind string

// The kinds.
const (
	File       Kind = "file"
	Executable Kind = "executable" // an executable file
	Tree       Kind = "tree"       // a directory, as the digest of its Tree
	Root       Kind = "root"       // a directory, as the digest of its root Directory
	Symlink    Kind = "symlink"
)

// An Output is a declared output of the run.
type Output struct {
	Kind Kind
	// Path is relative to the command's working directory.
	Path string
	// Digest is that of the content; zero for a Symlink.
	Digest cas.Digest
	// Target is the target of a Symlink.
	Target string
}

// Volatile holds facts that may differ between equivalent runs.
type Volatile struct {
	// Worker is the name of the worker. Backend and Tier name the isolation.
	Worker, Backend, Tier string
	// Audit is the level of monitoring: "off", "attempts" or "full".
	Audit string
	// Fingerprint identifies the whole toolchain of the worker, "" if it is unknown or the run did not see it.
	Fingerprint string
	// WorkerRequest is the number of the request to the run's persistent worker. From 2 on the process was warm; 0
	// means that the run had its own process.
	WorkerRequest int
	// Unenforced are the limits of the Spec that the worker cannot enforce.
	Unenforced []sandbox.Limit
	// Programs are executed programs of the host that only wait or inspect processes, such as sleep and ps. How many of
	// them a watchdog starts depends on timing.
	Programs []Program
	// Policy is the hash of the policy's text. Rule names the rule that chose the profile.
	Policy, Rule string
	// Queued is when the request arrived and Began when the worker took it. Staging and Staged bracket the staging of
	// its inputs, Started and Ended the command. Unknown times are zero.
	Queued, Began, Staging, Staged, Started, Ended time.Time
	Usage                                          sandbox.Usage
	// Events counts the distinct events, Unrecorded those beyond the limit.
	Events, Unrecorded int
}
