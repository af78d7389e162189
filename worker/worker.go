// SPDX-License-Identifier: Apache-2.0

// Package worker executes actions. Local carries an action from its digest to its result in seven steps, each in the
// file of its name: fetch, confine, stage, run, collect, seal, publish. The package depends on no concrete store, no
// concrete sandbox backend and no RPC.
//
// Outputs are hashed before they are stored, and the store hashes new ones again. Hashing while writing would save a
// sixth to a half of the processor time for new outputs, and cost a third to twice as much for present ones, which
// would also be written to disk (256 KiB to 4 MiB, SHA-256 and BLAKE3). Trusting the first hash instead would rest on
// the sandbox alone.
package worker

import (
	"context"
	"io"
	"os"
	"time"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/sandbox/policy"
	"github.com/cloister-build/cloister/worker/internal/actionapi"
	"google.golang.org/protobuf/types/known/anypb"
)

// An Executor executes actions. It is safe for concurrent use.
type Executor interface {
	// Execute executes t and calls report as each stage begins. A failed action is an Outcome. An error is always a
	// *Fault: either the request or this side is at fault. If ctx ends, Execute kills the action and returns a Fault
	// of kind FaultCancelled. When Execute returns, no process of the action is left, except a persistent worker that the
	// policy permits.
	Execute(ctx context.Context, t *Task, report func(Stage)) (*Outcome, error)
}

// A Task is one request to execute an action.
type Task struct {
	Instance string
	Action   cas.Digest
	// ActionBlob, if not nil, is the blob of Action, which the caller has just read from the store.
	ActionBlob []byte
	// SkipCacheLookup executes the action even if the action cache has its result.
	SkipCacheLookup bool
	// Queued is when the request arrived.
	Queued time.Time
	// Timeout, if not 0, limits the execution time in addition to the action's own timeout.
	Timeout time.Duration
	// Stdout and Stderr, if not nil, receive the output while the action runs.
	Stdout, Stderr io.Writer
	// Logs, if not nil, hold the output, which others may read while the action runs. They are closed once the output
	// is complete, and stay open if the execution fails before that.
	Logs *Logs

	// Target, Mnemonic and Invocation come from the client's RequestMetadata: the label being built, the kind of
	// action and the invocation ID. They select the policy rule. Nothing proves that they are true.
	Target, Mnemonic, Invocation string
	// Correlated is the client's ID for a group of invocations. It selects nothing.
	Correlated string
	// Root, if not zero, is the digest of the Directory of the root file system in which the command runs, in the same
	// store as the action; nothing of this host is visible then. Zero means the host's toolchain. The action cache does
	// not know the root, so a task with a Root or RootEnv neither uses nor fills it.
	Root cas.Digest
	// RootEnv is the environment that comes with Root: "KEY=VALUE". The command's own variables override it.
	RootEnv []string
	// Image is the reference, with a digest, of the container image that the action's properties name: it is the root file
	// system unless Root is set. Admit sets it; if it is "", Execute asks Config.Images.
	Image string

	// Caller identifies the client that requested the action, for calls of remote APIs by the action itself; nil if no
	// client did. Package execserver sets it.
	Caller *actionapi.Caller

	// Tool is the client's name and version, such as "bazel 4.2.3", or "".
	Tool string
	// Trace holds the trace context headers of the client's call, as returned by ParseTrace. Calls made for this task
	// carry them.
	Trace map[string]string
	// Auxiliary is appended to the auxiliary metadata of the result, but not to the manifest. It is shared and must
	// not be modified.
	Auxiliary []*anypb.Any

	// Args, if not empty, replaces the command's arguments, and Terminal, if not nil, is the run's terminal: this is
	// how a person gets a shell in the action's sandbox. Such a run is never cached, and only the worker's maximum
	// limits its time.
	Args     []string
	Terminal *os.File

	// Stdin, if not nil, is the reading end of a pipe that the command reads. Such a run is never cached, because its
	// result depends on more than the action.
	Stdin *os.File

	// Seed is the seed for the randomness given to the run, and Revision the source revision of its inputs. The
	// manifest records both if they are set.
	Seed     *uint64
	Revision string

	// Variation, if not nil, changes the conditions of the run. Such a run neither reads nor writes the action cache.
	Variation *Variation

	// Approve, if not nil, decides whether a cacheable result is written to the action cache. It is called once, with
	// the outcome that the client will get, and may take as long as another run.
	Approve func(context.Context, *Outcome) bool
}

// A Variation changes the conditions of a run on purpose, to find out whether its result depends on them. The zero
// Variation changes nothing.
type Variation struct {
	Conditions sandbox.Conditions
	// Env overrides variables of the command: "KEY=VALUE" sets one, and "KEY" unsets it.
	Env []string
	// Root is the path of the input root; "" is ExecRoot.
	Root string
	// Order, if not 0, seeds the order in which directories of the input root list their entries.
	Order uint64
}

// An Admission is what a worker decides about a task before it occupies a slot.
type Admission struct {
	// DoNotMerge forbids sharing one execution between identical requests, because its result is not to be cached.
	DoNotMerge bool
	// MergeKey is equal for requests that get the same conditions for the same action. Only these may share an
	// execution.
	MergeKey string
	// Demands are the platform properties that a worker must have to execute the action, sorted and without duplicates.
	// The sandbox settings (cloister-*) are not among them, since every worker implements these, except a backend that the
	// action or the policy requires (PropertySandbox), nor are those of persistent workers, since they do not change the
	// result. Those of IsPlacement are: a worker that does not
	// implement them may take the action only if its operator offers them.
	Demands []Property
	// Pull, if not nil, pulls the container image that the action needs, so that Execute does not, or waits for another
	// pull of it. It returns a *Fault.
	Pull func(context.Context) error
}

// A Property is a platform property that an action demands or a worker has.
type Property = policy.Property

// interactive reports whether a person runs a command of their own in the action's sandbox.
func (t *Task) interactive() bool { return len(t.Args) > 0 || t.Terminal != nil }

// uncacheable reports whether the run depends on more than the action, so that the action cache is not used.
func (t *Task) uncacheable() bool {
	return t.interactive() || t.Stdin != nil || t.Variation != nil
}

// A Status reports whether an action ran to its end and produced valid outputs. The exit code is separate.
type Status uint8

// The statuses.
const (
	StatusOK        Status = iota
	StatusTimedOut         // the command was killed after its timeout
	StatusBadOutput        // an output has the wrong type, or the outputs do not fit in one result
)

// String returns the name of the gRPC code that the API defines for s. Manifests and reports record it.
func (s Status) String() string {
	return [...]string{"OK", "DeadlineExceeded", "FailedPrecondition"}[s]
}

// An Outcome is the result of an action that was executed or found in the action cache.
type Outcome struct {
	Result *repb.ActionResult
	Cached bool
	Status Status
	// Exceeded is the limit that made the action fail, or "".
	Exceeded sandbox.Limit
	// OnViolation is "fail" or "kill" if the policy made the action fail for a violation or killed it at one. Otherwise it
	// is "".
	OnViolation string
	// Uncacheable reports that the result depends on more than the action: it hit a limit, had a violation that counts,
	// used a network, was varied or ran interactively. It is not written to the action cache.
	Uncacheable bool
	// Message explains why the action failed and what the sandbox denied, in at most MaxMessageLines lines of
	// printable text. It may be "".
	Message string
	// Reproduce is the command line that reruns a failed action, or "".
	Reproduce string
	// AuditLog is a blob of text that lists everything the sandbox denied, or the zero Digest.
	AuditLog cas.Digest
	// Manifest is the blob that records the run (see package manifest), or the zero Digest, and StableHash its stable
	// hash. For a cached result they are what RecordedManifest returns.
	Manifest   cas.Digest
	StableHash string
	// Started and Ended delimit the execution of the command, with monotonic clock readings. They are zero for a
	// cached result.
	Started, Ended time.Time
}

// A Stage is one of the seven steps of an execution.
type Stage uint8

// The stages, in order.
const (
	StageFetch Stage = iota + 1
	StageConfine
	StageInputs
	StageRun
	StageCollect
	StageSeal
	StagePublish
)

// String returns the verb.
func (s Stage) String() string {
	return [...]string{"", "fetch", "confine", "stage", "run", "collect", "seal", "publish"}[s]
}
