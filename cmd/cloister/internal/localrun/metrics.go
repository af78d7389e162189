// SPDX-License-Identifier: Apache-2.0

package localrun

import (
	"context"
	"encoding/json"
	"errors"
	"math"
	"os"
	"slices"
	"time"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/tree"
	"github.com/cloister-build/cloister/proto/cloister/v1"
	"github.com/cloister-build/cloister/worker"
	"github.com/cloister-build/cloister/worker/repro/manifest"
)

// Metrics is what --metrics writes (docs/runs.md). Times are in nanoseconds, by the monotonic clock of this process.
type metrics struct {
	Format   string  `json:"format"` // metricsFormat
	Action   string  `json:"action"`
	Revision string  `json:"revision,omitempty"`
	Seed     *uint64 `json:"seed,omitempty"`

	InputFiles int64 `json:"input_files"`
	InputBytes int64 `json:"input_bytes"`

	// Once: the inputs were read into the store, the sandbox was tried and begun, all was removed.
	Inputs  time.Duration `json:"inputs_ns"`
	Sandbox time.Duration `json:"sandbox_ns"`
	Close   time.Duration `json:"close_ns"`

	// Of the runs below.
	SetUp   spread `json:"set_up"`
	Run     spread `json:"run"`
	CleanUp spread `json:"clean_up"`
	// Equal says that all runs have one stable hash.
	Equal        bool `json:"equal"`
	StableHashes int  `json:"stable_hashes"`

	Runs []runMetrics `json:"runs"`
}

const metricsFormat = "cloister-run-metrics v1"

// A spread is what half of the runs, and 95 of 100, take at most.
type spread struct {
	P50 time.Duration `json:"p50_ns"`
	P95 time.Duration `json:"p95_ns"`
}

// runMetrics is one run: from the request to the command's start, from there to its end, and until all that was made for
// the run was put away.
type runMetrics struct {
	SetUp   time.Duration `json:"set_up_ns"`
	Run     time.Duration `json:"run_ns"`
	CleanUp time.Duration `json:"clean_up_ns"`

	ExitCode   int32  `json:"exit_code"`
	StableHash string `json:"stable_hash"`
	Manifest   string `json:"manifest,omitempty"`

	// What the command said and left; of a directory its Tree, which names its files.
	StdoutBytes int64 `json:"stdout_bytes"`
	StderrBytes int64 `json:"stderr_bytes"`
	OutputBytes int64 `json:"output_bytes"`
	// What it used; zero is what the host cannot count.
	User          time.Duration `json:"user_ns"`
	System        time.Duration `json:"system_ns"`
	PeakMemory    int64         `json:"peak_memory_bytes"`
	PeakResident  int64         `json:"peak_resident_bytes"`
	PeakProcesses int64         `json:"peak_processes"`
	ReadBytes     int64         `json:"read_bytes"`
	WrittenBytes  int64         `json:"written_bytes"`
}

// timed calls f and returns how long it took.
func timed(f func() error) (time.Duration, error) {
	began := time.Now()
	err := f()
	return time.Since(began), err
}

// describe says what is run.
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

// add adds the run that was asked for at a moment and has ended now.
func (m *metrics) add(asked time.Time, out *worker.Outcome) {
	r := out.Result
	run := runMetrics{
		SetUp: out.Started.Sub(asked), Run: out.Ended.Sub(out.Started), CleanUp: time.Since(out.Ended),
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
		}
	}
	if !slices.ContainsFunc(m.Runs, func(o runMetrics) bool { return o.StableHash == run.StableHash }) {
		m.StableHashes++
	}
	m.Runs = append(m.Runs, run)
}

// write writes the whole to a file.
func (m *metrics) write(name string) error {
	m.Format, m.Equal = metricsFormat, m.StableHashes == 1
	of := func(value func(*runMetrics) time.Duration) spread {
		var all []time.Duration
		for i := range m.Runs {
			all = append(all, value(&m.Runs[i]))
		}
		slices.Sort(all)
		return spread{P50: rank(all, 50), P95: rank(all, 95)}
	}
	m.SetUp = of(func(r *runMetrics) time.Duration { return r.SetUp })
	m.Run = of(func(r *runMetrics) time.Duration { return r.Run })
	m.CleanUp = of(func(r *runMetrics) time.Duration { return r.CleanUp })
	b, err := json.MarshalIndent(m, "", "  ")
	if err != nil {
		return err
	}
	return os.WriteFile(name, append(b, '\n'), 0o644)
}

// rank returns the smallest value that p percent of sorted, which has values, are not above.
func rank(sorted []time.Duration, p int) time.Duration {
	return sorted[max(0, int(math.Ceil(float64(len(sorted)*p)/100))-1)]
}

// writeManifest writes the text of a run's manifest to a file.
func writeManifest(ctx context.Context, store cas.Store, out *worker.Outcome, name string) error {
	if out.Manifest.IsZero() {
		return errors.New("the run has none: it would be too large to be read again")
	}
	text, err := cas.ReadAll(ctx, store, out.Manifest, manifest.MaxBytes)
	if err != nil {
		return err
	}
	return os.WriteFile(name, text, 0o644)
}
