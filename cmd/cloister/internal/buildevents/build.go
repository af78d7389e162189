// SPDX-License-Identifier: Apache-2.0

package buildevents

import (
	"strconv"
	"strings"
	"time"

	"github.com/cloister-build/cloister/cas"
)

// States of a build.
const (
	Running     = "running"
	Succeeded   = "succeeded"
	Failed      = "failed"
	Interrupted = "interrupted" // its events ended before the build did
)

// Facts are what a list of builds shows.
type Facts struct {
	Status      string    `json:"status"`
	Exit        string    `json:"exit,omitempty"` // Bazel's name of the exit code, such as TESTS_FAILED
	ExitCode    int32     `json:"exit_code"`
	Command     string    `json:"command,omitempty"`
	Patterns    []string  `json:"patterns,omitempty"`
	Started     time.Time `json:"started,omitzero"`
	Finished    time.Time `json:"finished,omitzero"`
	TargetCount int       `json:"target_count"`
	NotBuilt    int       `json:"not_built"` // targets that failed to build or were not built
	TestCount   int       `json:"test_count"`
	TestsFailed int       `json:"tests_failed"`
	TestsFlaky  int       `json:"tests_flaky"`
}

// A Build summarizes the events of a build. Its texts are one line of printable ASCII each, apart from Stdout and
// Stderr, which have several. All lists are bounded.
type Build struct {
	Header
	Tool             string            `json:"tool,omitempty"` // version of Bazel
	User             string            `json:"user,omitempty"`
	Host             string            `json:"host,omitempty"`
	Workspace        string            `json:"workspace,omitempty"`
	WorkingDirectory string            `json:"working_directory,omitempty"`
	WorkspaceStatus  map[string]string `json:"workspace_status,omitempty"`
	CommandLines     []CommandLine     `json:"command_lines,omitempty"`
	StartupOptions   []string          `json:"startup_options,omitempty"` // those given explicitly
	Options          []string          `json:"options,omitempty"`         // likewise
	Targets          []*Target         `json:"targets"`
	FailedActions    []Action          `json:"failed_actions"`
	Problems         []Problem         `json:"problems,omitempty"`
	Metrics          *Metrics          `json:"metrics,omitempty"`
	Logs             []File            `json:"logs,omitempty"` // of the build as a whole, such as its critical path
	Profile          *File             `json:"profile,omitempty"`
	Coverage         []File            `json:"coverage,omitempty"` // in the format of lcov
	Stdout           string            `json:"stdout,omitempty"`   // the end of what Bazel printed
	Stderr           string            `json:"stderr,omitempty"`
	// Missing is the number of events that were not stored, because the build exceeded a limit.
	Missing int64 `json:"missing_events,omitempty"`

	targets map[string]*Target
	sets    map[string]*fileSet
	parts   int // of the summary; see maxParts
}

// A CommandLine is "original", as the user gave it, or "canonical", as Bazel understood it.
type CommandLine struct {
	Label string   `json:"label"`
	Args  []string `json:"args"`
}

// A Target is a target that was requested.
type Target struct {
	Label  string `json:"label"`
	Aspect string `json:"aspect,omitempty"`
	// Rule is its kind, such as "cc_test rule".
	Rule string `json:"rule,omitempty"`
	// Outcome is "built", "failed", the reason why it was not built, such as "skipped", or "" while it is built.
	Outcome string `json:"outcome,omitempty"`
	Message string `json:"message,omitempty"`
	Outputs []File `json:"outputs,omitempty"`
	Test    *Test  `json:"test,omitempty"`

	groups []string // the sets of its outputs
}

// A Test is the outcome of a test target.
type Test struct {
	// Status is Bazel's, in lower case: "passed", "failed", "flaky", "timeout", ...
	Status   string        `json:"status,omitempty"`
	Runs     int32         `json:"runs,omitempty"`
	Shards   int32         `json:"shards,omitempty"`
	Attempts int32         `json:"attempts,omitempty"`
	Cached   int32         `json:"cached,omitempty"`
	Duration time.Duration `json:"duration_ns,omitempty"`
	Results  []TestResult  `json:"results,omitempty"`
}

// A TestResult is one attempt of one shard of one run.
type TestResult struct {
	Run      int32         `json:"run"`
	Shard    int32         `json:"shard"`
	Attempt  int32         `json:"attempt"`
	Status   string        `json:"status"`
	Details  string        `json:"details,omitempty"`
	Cached   string        `json:"cached,omitempty"` // "locally" or "remotely"
	Strategy string        `json:"strategy,omitempty"`
	Host     string        `json:"host,omitempty"`
	ExitCode int32         `json:"exit_code"`
	Started  time.Time     `json:"started,omitzero"`
	Duration time.Duration `json:"duration_ns,omitempty"`
	Files    []File        `json:"files,omitempty"` // test.log, test.xml, test.lcov, ...
}

// An Action is an action that failed.
type Action struct {
	Label    string   `json:"label,omitempty"`
	Mnemonic string   `json:"mnemonic,omitempty"`
	Output   string   `json:"output,omitempty"` // its primary output
	ExitCode int32    `json:"exit_code"`
	Message  string   `json:"message,omitempty"`
	Command  []string `json:"command,omitempty"`
	Stdout   *File    `json:"stdout,omitempty"`
	Stderr   *File    `json:"stderr,omitempty"`
}

// A Problem is the reason why Bazel omitted an event, such as a target that it could not load.
type Problem struct {
	Label       string `json:"label,omitempty"`
	Reason      string `json:"reason"`
	Description string `json:"description,omitempty"`
}

// A File is a file that Bazel names: a blob of the instance of its URI, or short contents.
type File struct {
	Name     string `json:"name"`
	Instance string `json:"instance,omitempty"`
	// Digest is zero if the file is not a blob: it stayed on the client, or is in Contents.
	Digest   cas.Digest `json:"digest,omitzero"`
	Contents string     `json:"contents,omitempty"`
}

// Metrics are Bazel's metrics of a build.
type Metrics struct {
	ActionsCreated    int64            `json:"actions_created"`
	ActionsExecuted   int64            `json:"actions_executed"`
	Runners           map[string]int32 `json:"runners,omitempty"` // actions by strategy
	TargetsConfigured int64            `json:"targets_configured"`
	PackagesLoaded    int64            `json:"packages_loaded"`
	CPU               time.Duration    `json:"cpu_ns"`
	Wall              time.Duration    `json:"wall_ns"`
	Analysis          time.Duration    `json:"analysis_ns"`
	Execution         time.Duration    `json:"execution_ns"`
}

// failed reports whether a test of that status did not pass.
func (t *Test) failed() bool {
	return t.Status != "" && t.Status != "passed" && t.Status != "flaky" && t.Status != "no status"
}

// keep counts n parts of the summary, and reports whether they fit.
func (b *Build) keep(n int) bool {
	if b.parts+n > maxParts {
		return false
	}
	b.parts += n
	return true
}

// Count returns the facts of a build in a few words, such as "12 targets, 3 tests, 1 failed".
func (f *Facts) Count() string {
	parts := []string{strconv.Itoa(f.TargetCount) + " targets", strconv.Itoa(f.TestCount) + " tests"}
	for _, n := range []struct {
		count int
		what  string
	}{{f.NotBuilt, " not built"}, {f.TestsFailed, " failed"}, {f.TestsFlaky, " flaky"}} {
		if n.count > 0 {
			parts = append(parts, strconv.Itoa(n.count)+n.what)
		}
	}
	return strings.Join(parts, ", ")
}
