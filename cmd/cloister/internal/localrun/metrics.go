// SPDX-License-Identifier: Apache-2.0

package localrun

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"slices"
	"time"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/tree"
	cloisterpb "github.com/cloister-build/cloister/proto/cloister/v1"
	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/worker"
	"github.com/cloister-build/cloister/worker/repro/manifest"
)

// metrics is the content of the --metrics file (docs/runs.md). Times are in nanoseconds of the monotonic clock.
type metrics struct {
	Format   string  `json:"format"` // metricsFormat
	ID       string  `json:"id"`     // of this command; its manifests name the worker "run-ID"
	Action   string  `json:"action"`
	Revision string  `json:"revision,omitempty"`
	Seed     *uint64 `json:"seed,omitempty"`

	InputFiles int64 `json:"input_files"`
	InputBytes int64 `json:"input_bytes"`

	// Once per command: reading inputs into the store, probing and making the sandbox, and cleaning up.
	Inputs  time.Duration `json:"inputs_ns"`
	Sandbox time.Duration `json:"sandbox_ns"`
	Close   time.Duration `json:"close_ns"`

	// Of the runs below.
	SetUp   Spread `json:"set_up"`
	Guard   Spread `json:"guard"`
	Run     Spread `json:"run"`
	CleanUp Spread `json:"clean_up"`
	// Equal reports whether all runs have the same stable hash.
	Equal        bool `json:"equal"`
	StableHashes int  `json:"stable_hashes"`

	Runs []runMetrics `json:"runs"`
}

const metricsFormat = "cloister-run-metrics v1"

// A Spread has the median and the 95th percentile of some times.
type Spread struct {
	P50 time.Duration `json:"p50_ns"`
	P95 time.Duration `json:"p95_ns"`
}

// runMetrics is one run: from the request to the start of the command, to its end, and until everything made for the
// run is removed. Guard is the last part of SetUp: making the sandbox around the staged inputs.
type runMetrics struct {
	SetUp   time.Duration `json:"set_up_ns"`
	Guard   time.Duration `json:"guard_ns"`
	Run     time.Duration `json:"run_ns"`
	CleanUp time.Duration `json:"clean_up_ns"`

	ExitCode   int32  `json:"exit_code"`
	StableHash string `json:"stable_hash"`
	Manifest   string `json:"manifest,omitempty"`

	// Sizes of stdout, stderr and outputs; for a directory that of its Tree.
	StdoutBytes int64 `json:"stdout_bytes"`
	StderrBytes int64 `json:"stderr_bytes"`
	OutputBytes int64 `json:"output_bytes"`
	// Resource usage. A peak that was not measured is absent.
	User          time.Duration `json:"user_ns"`
	System        time.Duration `json:"system_ns"`
	PeakMemory    int64         `json:"peak_memory_bytes,omitzero"`
	PeakResident  int64         `json:"peak_resident_bytes,omitzero"`
	PeakProcesses int64         `json:"peak_processes,omitzero"`
	ReadBytes     int64         `json:"read_bytes"`
	WrittenBytes  int64         `json:"written_bytes"`

	Hermetic   bool  `json:"hermetic"`   // no endpoint was allowed
	Violations int64 `json:"violations"` // distinct ones, and limits that were hit
}

// timed calls f and returns its duration.
func timed(f func() error) (time.Duration, error) {
	began := time.Now()
	err := f()
	return time.Since(began), err
}

// describe records the command or the action of the runs.
func (m *metrics) describe(ctx context.Context, store cas.Store, t *worker.Task) error {
	var action repb.Action
	if err := cas.ReadProto(ctx, store, t.Action, &action); err != nil {
		return err
	}
	root, err := cas.FromProto(t.Action.Function(), action.InputRootDigest)
	if err != nil {
		return err
	}
	in, err := tree.Load(ctx, store, root)
	if err != nil {
		return err
	}
	m.Action, m.Revision, m.Seed = t.Action.String(), t.Revision, t.Seed
	m.InputFiles, m.InputBytes = in.Files(), in.Bytes()
	return nil
}

// add adds a run that was requested at asked, had its inputs at staged, and has just ended.
func (m *metrics) add(asked, staged time.Time, out *worker.Outcome) {
	r := out.Result
	run := runMetrics{
		SetUp: out.Started.Sub(asked), Guard: out.Started.Sub(staged),
		Run: out.Ended.Sub(out.Started), CleanUp: time.Since(out.Ended),
		ExitCode: r.ExitCode, StableHash: out.StableHash,
		StdoutBytes: r.StdoutDigest.GetSizeBytes(), StderrBytes: r.StderrDigest.GetSizeBytes(),
	}
	if !out.Manifest.IsZero() {
		run.Manifest = out.Manifest.String()
	}
	for _, f := range r.OutputFiles {
		run.OutputBytes += f.Digest.GetSizeBytes()
	}
	for _, d := range r.OutputDirectories {
		run.OutputBytes += d.TreeDigest.GetSizeBytes()
	}
	for _, aux := range r.ExecutionMetadata.GetAuxiliaryMetadata() {
		var e cloisterpb.Execution
		if aux.MessageIs(&e) && aux.UnmarshalTo(&e) == nil {
			u := e.GetUsage()
			run.User, run.System = u.GetUserTime().AsDuration(), u.GetSystemTime().AsDuration()
			run.PeakMemory, run.PeakResident, run.PeakProcesses = u.GetPeakMemoryBytes(), u.GetPeakResidentBytes(), u.GetPeakProcesses()
			run.ReadBytes, run.WrittenBytes = u.GetReadBytes(), u.GetWrittenBytes()
			run.Hermetic, run.Violations = e.Hermetic, violations(&e)
		}
	}
	if !slices.ContainsFunc(m.Runs, func(o runMetrics) bool { return o.StableHash == run.StableHash }) {
		m.StableHashes++
	}
	m.Runs = append(m.Runs, run)
}

// violations returns how many violations a run had, including events that were omitted.
func violations(e *cloisterpb.Execution) int64 {
	n := e.EventsOmitted
	for _, event := range e.Events {
		switch sandbox.EventKind(event.Kind) {
		case sandbox.EventAllowed, sandbox.EventUnreachable, sandbox.EventOutput:
		default:
			n++
		}
	}
	return n
}

// finish computes what concerns all runs.
func (m *metrics) finish() {
	m.Format, m.Equal = metricsFormat, m.StableHashes == 1
	of := func(value func(*runMetrics) time.Duration) Spread {
		var all []time.Duration
		for i := range m.Runs {
			all = append(all, value(&m.Runs[i]))
		}
		return SpreadOf(all)
	}
	m.SetUp = of(func(r *runMetrics) time.Duration { return r.SetUp })
	m.Guard = of(func(r *runMetrics) time.Duration { return r.Guard })
	m.Run = of(func(r *runMetrics) time.Duration { return r.Run })
	m.CleanUp = of(func(r *runMetrics) time.Duration { return r.CleanUp })
}

// summarize prints the metrics for people: times of the median run, totals, and the highest peak.
func (m *metrics) summarize(out io.Writer) {
	var all runMetrics
	for _, r := range m.Runs {
		all.User, all.System = all.User+r.User, all.System+r.System
		all.ReadBytes, all.WrittenBytes = all.ReadBytes+r.ReadBytes, all.WrittenBytes+r.WrittenBytes
		all.PeakMemory, all.PeakResident = max(all.PeakMemory, r.PeakMemory), max(all.PeakResident, r.PeakResident)
		all.Violations += r.Violations
	}
	short := func(d time.Duration) time.Duration { return d.Round(100 * time.Microsecond) }
	took := short(m.Run.P50).String()
	if n := len(m.Runs); n > 1 {
		took = fmt.Sprintf("%v median, %v 95th percentile of %d runs", took, short(m.Run.P95), n)
	}
	memory := sandbox.Bytes(all.PeakMemory) + " at most"
	if all.PeakMemory == 0 {
		memory = sandbox.Bytes(all.PeakResident) + " at most in one process"
	}
	fmt.Fprintf(out, "time        %s (set-up %v, clean-up %v)\n", took, short(m.SetUp.P50), short(m.CleanUp.P50))
	fmt.Fprintf(out, "processor   %v user, %v system\n", short(all.User), short(all.System))
	fmt.Fprintf(out, "memory      %s\n", memory)
	fmt.Fprintf(out, "disk        %s read, %s written\n", sandbox.Bytes(all.ReadBytes), sandbox.Bytes(all.WrittenBytes))
	fmt.Fprintf(out, "violations  %d\n", all.Violations)
}

// write writes the finished metrics to a file.
func (m *metrics) write(name string) error {
	b, err := json.MarshalIndent(m, "", "  ")
	if err != nil {
		return err
	}
	return os.WriteFile(name, append(b, '\n'), 0o644)
}

// SpreadOf returns the spread of times in any order, zero without any.
func SpreadOf(times []time.Duration) Spread {
	if len(times) == 0 {
		return Spread{}
	}
	sorted := slices.Sorted(slices.Values(times))
	return Spread{P50: rank(sorted, 50), P95: rank(sorted, 95)}
}

// rank returns the p-th percentile of sorted, which is not empty.
func rank(sorted []time.Duration, p int) time.Duration {
	return sorted[max(0, int(math.Ceil(float64(len(sorted)*p)/100))-1)]
}

// writeManifest writes the text of a run's manifest to a file.
func writeManifest(ctx context.Context, store cas.Store, out *worker.Outcome, name string) error {
	if out.Manifest.IsZero() {
		return errors.New("the manifest is too large and was not stored")
	}
	text, err := cas.ReadAll(ctx, store, out.Manifest, manifest.MaxBytes)
	if err != nil {
		return err
	}
	return os.WriteFile(name, text, 0o644)
}
