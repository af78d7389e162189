// SPDX-License-Identifier: Apache-2.0

// Package worker carries one action from its digest to its result: fetch, confine, stage, run,
// collect, seal, publish, one verb a file. It knows no concrete store and no concrete backend.
package worker

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/sandbox/policy"
	"google.golang.org/protobuf/types/known/anypb"
)

// An Executor executes actions. It is safe for concurrent use.
type Executor interface {
	// Execute carries t to its outcome, calling report as each stage begins. An action that fails
	// is an Outcome; an error is the client's fault or ours, always a *Fault. It ends early when
	// ctx does, with a Fault of kind Cancelled, and nothing of the action is alive when it returns.
	Execute(ctx context.Context, t *Task, report func(Stage)) (*Outcome, error)
}

// A Task is one request to execute an action.
type Task struct {
	Instance string
	Action   cas.Digest
	// ActionBlob, if not nil, is the blob of Action, from somebody who has just read it in the store.
	ActionBlob []byte
	// SkipCacheLookup runs the action even if a result is recorded.
	SkipCacheLookup bool
	// Queued is when the request arrived.
	Queued time.Time
	// Timeout, if not 0, is how long the command may execute at most, whatever more the action states.
	Timeout time.Duration
	// Stdout and Stderr, if not nil, see the action's output while it runs.
	Stdout, Stderr io.Writer
	// Logs, if not nil, keep the output for the result, so that it can be read from there until the action has
	// ended. They are closed once all of the output is in them, if it ever is.
	Logs *Logs

	// Target, Mnemonic and Invocation are what the client says of itself, "" if it does not: the label
	// that is built, the kind of action, the build. They choose a rule of the policy, and nobody vouches
	// for them.
	Target, Mnemonic, Invocation string
	// Correlated is what the client calls the builds to which its own belongs; it chooses nothing.
	Correlated string
	// Trace are the headers of the trace that the client's call is a part of, as ParseTrace returns them: calls that are
	// made for this task carry them. They choose nothing.
	Trace map[string]string
	// Auxiliary is copied into the metadata of the result, beside what the worker says there itself. It is no part of the
	// manifest. It is shared and must not be changed.
	Auxiliary []*anypb.Any

	// Args, if there are any, are run in place of the command's arguments, and Terminal, if not nil, is
	// the run's terminal: a person's shell in the action's sandbox. Such a run is never recorded, and
	// its time is the worker's.
	Args     []string
	Terminal *os.File

	// Seed, if not nil, is what the run is given as the seed of its randomness, and Revision, if not "", the revision
	// of the sources that the action's inputs are from, as the client names it: both for the manifest alone.
	Seed     *uint64
	Revision string

	// Variation, if not nil, is what the run is given otherwise than usual. Such a run is made whatever is
	// recorded, and is never recorded.
	Variation *Variation

	// Approve, if not nil, is asked before the result is recorded, once and only if it would be, with the outcome as the
	// client will have it. A result that it does not approve is not recorded. It may take as long as a run.
	Approve func(context.Context, *Outcome) bool
}

// A Variation is what a run is given otherwise than usual, on purpose, to see whether its result depends on it. Its
// zero value is a run like every other that is not recorded.
type Variation struct {
	Conditions sandbox.Conditions
	// Env are variables, "KEY=VALUE", that are set over those of the command; "KEY" alone is not set at all.
	Env []string
	// Root is where the run finds its input root; "" is ExecRoot.
	Root string
	// Order, if not 0, is the seed of the order in which the directories of the input root are listed.
	Order uint64
}

// An Admission is what a worker says of a task before it takes a slot.
type Admission struct {
	// DoNotMerge says that its result is for nobody else: it is not to be cached.
	DoNotMerge bool
	// MergeKey are equal for equal actions that are given the same: only these may share a run.
	MergeKey string
	// Demands are what the action's platform demands of whoever executes it, sorted and each once. What it asks the
	// sandbox for (cloister-*) is not among them: every worker answers that itself.
	Demands []Property
}

// A Property is one that an action demands of whoever executes it, or that a worker has.
type Property struct{ Name, Value string }

// Compare orders properties by name, then by value.
func (p Property) Compare(q Property) int {
	return cmp.Or(strings.Compare(p.Name, q.Name), strings.Compare(p.Value, q.Value))
}

// String returns name=value, quoted as in Go where it is more than printable ASCII, and shortened.
func (p Property) String() string { return policy.Property(p).String() }

// byHand reports whether a person runs something of their own in the action's place.
func (t *Task) byHand() bool { return len(t.Args) > 0 || t.Terminal != nil }

// oneOff reports whether the run is made whatever is recorded, and is never recorded, because it is given more than
// the action says.
func (t *Task) oneOff() bool { return t.byHand() || t.Variation != nil }

// root returns where the run finds its input root.
func (t *Task) root() string {
	if v := t.Variation; v != nil && v.Root != "" {
		return v.Root
	}
	return ExecRoot
}

// A Status says whether an action ran to its end and produced valid outputs. The exit code is separate.
type Status uint8

// The statuses.
const (
	OK        Status = iota
	TimedOut         // the command was killed after its timeout
	BadOutput        // an output is of the wrong kind, or the outputs are too many for one result
)

// String returns the name of the status's gRPC code, as manifests and reports record it.
func (s Status) String() string {
	return [...]string{"OK", "DeadlineExceeded", "FailedPrecondition"}[s]
}

// An Outcome is what became of an action that was executed, or found in the action cache.
type Outcome struct {
	Result *repb.ActionResult
	Cached bool
	Status Status
	// Exceeded is the limit that made the action fail, or "".
	Exceeded sandbox.Limit
	// Uncacheable says that the result depends on more than the action: on a limit that it met, on a network,
	// on a variation or on a person. It is not recorded.
	Uncacheable bool
	// Message says to a person why the action did not succeed, and what it tried; at most MaxMessage
	// lines of printable text, "" if there is nothing to say.
	Message string
	// Reproduce is the command line that reruns a failed action, or "".
	Reproduce string
	// AuditLog is a text in the store that says all that the action tried, or the zero Digest.
	AuditLog cas.Digest
	// Manifest is the record of the run, a text in the store (package manifest), or the zero Digest; StableHash is its
	// stable hash. A result that was found has what Recorded says.
	Manifest   cas.Digest
	StableHash string
	// Started and Ended are when the command began to execute and when it had ended, with readings of the monotonic
	// clock; zero for a result that was found.
	Started, Ended time.Time
}

// Violations are what one run tried, and the limits that it met; or for what an action was refused.
type Violations struct {
	ExitCode int // sandbox.NeverRan if it was refused
	// Events are in the order of Event.Compare, in printable text.
	Events []sandbox.Event
	// Unrecorded counts the events beyond those.
	Unrecorded int
}

// A Stage is one of the seven verbs.
type Stage uint8

// The stages, in order.
const (
	Fetch Stage = iota + 1
	Confine
	StageInputs
	Run
	Collect
	Seal
	Publish
)

// String returns the verb.
func (s Stage) String() string {
	return [...]string{"", "fetch", "confine", "stage", "run", "collect", "seal", "publish"}[s]
}

// A Kind says whose fault an error is, and so what the caller may do about it. It is a closed list.
type Kind uint8

// The kinds. The first three are the client's, the others ours.
const (
	Invalid     Kind = iota + 1 // malformed; asking again cannot help
	Missing                     // blobs are absent; upload them and ask again
	Unmet                       // the host or the operator does not permit it
	Exhausted                   // no room now
	Unavailable                 // ask again
	Internal                    // a defect, or the host failed us
	Cancelled                   // the caller wanted no more
)

// A Fault is an error with its kind.
type Fault struct {
	Kind Kind
	Err  error
	// Blobs lists all blobs that are absent, if Kind is Missing.
	Blobs []cas.Digest
}

// Error returns the text of the error.
func (f *Fault) Error() string { return f.Err.Error() }

// Unwrap returns the error.
func (f *Fault) Unwrap() error { return f.Err }

// faultf returns a Fault of kind k; format may wrap.
func faultf(k Kind, format string, args ...any) *Fault {
	return &Fault{Kind: k, Err: fmt.Errorf(format, args...)}
}
