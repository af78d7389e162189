// SPDX-License-Identifier: Apache-2.0

package repro

import (
	"bytes"
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/sandbox/printable"
	"github.com/cloister-build/cloister/worker"
	"github.com/cloister-build/cloister/worker/repro/compare"
	"github.com/cloister-build/cloister/worker/repro/manifest"
)

// run makes run i of the check. The first one has no variation.
func (c *check) run(ctx context.Context, i int) error {
	x := &c.Executors[i%len(c.Executors)]
	if i == 0 && c.First != nil {
		c.verdict.Runs = append(c.verdict.Runs, c.record(ctx, x, &worker.Variation{}, c.First))
		return nil
	}
	v, copies := c.planner.baseline(), 0
	if i > 0 && x.Features != nil {
		v, copies = c.planner.varied(c.factors, i)
	}
	r, err := c.execute(ctx, x, v, copies, fmt.Sprintf("run %d of %d", i+1, c.Runs))
	if err != nil {
		return err
	}
	c.verdict.Runs = append(c.verdict.Runs, *r)
	return nil
}

// execute makes a run, with copies of it at the same time whose results are discarded.
func (c *check) execute(
	ctx context.Context, x *Executor, v *worker.Variation, copies int, purpose string,
) (*Run, error) {
	if c.Progress != nil {
		c.Progress(fmt.Sprintf("%s, %s", purpose, x.Name))
	}
	task := c.task
	task.Variation, task.SkipCacheLookup = v, true
	if !x.Action.IsZero() {
		task.Action = x.Action
	}
	task.Queued = time.Now()
	running, cancel := context.WithCancel(ctx)
	var others sync.WaitGroup
	for range copies {
		t := task
		others.Go(func() { _, _ = x.Executor.Execute(running, &t, func(worker.Stage) {}) })
	}
	out, err := x.Executor.Execute(ctx, &task, func(worker.Stage) {})
	cancel()
	others.Wait()
	if err != nil {
		return nil, err
	}
	r := c.record(ctx, x, v, out)
	if copies > 0 {
		r.Varied = append(r.Varied, "parallel, with another run")
	}
	return &r, nil
}

// record returns the Run of an outcome.
func (c *check) record(ctx context.Context, x *Executor, v *worker.Variation, out *worker.Outcome) Run {
	m, function := out.Result.GetExecutionMetadata(), c.task.Action.Function()
	r := Run{
		On: text(x.Name), Worker: text(m.GetWorker()), Varied: describe(v), ExitCode: out.Result.GetExitCode(),
		Result: out.Result, items: items(out.Result, function), executor: x, facts: c.planner.facts(v, m),
		function: function, uptime: v.Conditions.Uptime,
	}
	r.facts.Digests = map[string]string{}
	for name, it := range r.items {
		if it.kind == "file" {
			r.facts.Digests[it.digest.GetHash()] = displayName(name)
		}
	}
	if !x.Action.IsZero() && x.Action != c.task.Action {
		r.Action = x.Action.String()
	}
	if out.Status != worker.StatusOK {
		r.Code = out.Status.String()
	}
	text, hash := out.Manifest, out.StableHash
	if text.IsZero() {
		text, hash = worker.RecordedManifest(out.Result)
	}
	if !text.IsZero() {
		r.Manifest, r.StableHash = text.String(), hash
		if r.Action != "" {
			r.StableHash = c.stableHash(ctx, x, text)
		}
	}
	if !r.succeeded() {
		r.Stderr = r.lastLine(ctx)
	}
	if m.GetExecutionStartTimestamp() != nil {
		r.Start, r.End = m.GetExecutionStartTimestamp().AsTime(), m.GetExecutionCompletedTimestamp().AsTime()
	}
	return r
}

// stableHash returns the stable hash of a manifest with the action of the check in place of the one that x ran, which
// differs only in that it is not cached. It returns "" if the manifest cannot be read.
func (c *check) stableHash(ctx context.Context, x *Executor, text cas.Digest) string {
	b, err := cas.ReadAll(ctx, x.Store, text, manifest.MaxBytes)
	if err != nil {
		return ""
	}
	m, err := manifest.Parse(b)
	if err != nil || m.Action != x.Action {
		return ""
	}
	m.Action = c.task.Action
	return m.StableHash()
}

// succeeded reports whether the command exited with 0.
func (r *Run) succeeded() bool { return r.ExitCode == 0 && r.Code == "" }

// failure returns how the run ended, and the last line of its stderr.
func (r *Run) failure() string {
	if r.Stderr == "" {
		return r.Ended()
	}
	return r.Ended() + " (" + r.Stderr + ")"
}

// lastLine returns the last line that a run wrote to stderr as printable text. It usually explains a failure.
func (r *Run) lastLine(ctx context.Context) string {
	const limit = 1 << 20
	text := r.Result.GetStderrRaw()
	if d, err := cas.FromProto(r.function, r.Result.GetStderrDigest()); len(text) == 0 && err == nil && d.Size() <= limit {
		text, _ = cas.ReadAll(ctx, r.executor.Store, d, limit) // messages are complete without
	}
	text = bytes.TrimSpace(text)
	return printable.Head(strings.TrimPrefix(string(text[bytes.LastIndexByte(text, '\n')+1:]), "cloister: "), 200)
}

// date returns a time in seconds since 1970 as text.
func date(seconds int64) string { return time.Unix(seconds, 0).UTC().Format(time.RFC3339) }

// An item is an output, stdout or stderr of one run.
type item struct {
	kind, name string // name is a digest or a target
	digest     *repb.Digest
	tree       bool // digest is that of a Tree rather than a Directory
	executable bool
	target     string       // of a symlink
	root       *repb.Digest // of a Tree that is compared by its root
}

// equal compares kind and name: a file may have the bytes, and so the digest, of a Tree.
func (it item) equal(other item) bool { return it.kind == other.kind && it.name == other.name }

// The keys of stdout and stderr among the items. No path ends in a slash.
const (
	stdout = "stdout/"
	stderr = "stderr/"
)

// items returns the items of a result. function is that of its digests.
func items(r *repb.ActionResult, function cas.Function) map[string]item {
	all := map[string]item{}
	for _, f := range r.GetOutputFiles() {
		name := digestName(f.Digest)
		if f.IsExecutable {
			name += " executable"
		}
		all[f.Path] = item{kind: "file", name: name, digest: f.Digest, executable: f.IsExecutable}
	}
	for _, d := range r.GetOutputDirectories() {
		// Servers may encode the same Tree differently.
		if root := d.RootDirectoryDigest; root != nil {
			all[d.Path] = item{kind: "directory", name: digestName(root), digest: root}
		} else {
			all[d.Path] = item{kind: "directory", name: digestName(d.TreeDigest), digest: d.TreeDigest, tree: true}
		}
	}
	for _, l := range slices.Concat(r.GetOutputSymlinks(), r.GetOutputFileSymlinks(), r.GetOutputDirectorySymlinks()) {
		all[l.Path] = item{kind: "symlink", name: "-> " + l.Target, target: l.Target}
	}
	for _, log := range []struct {
		name   string
		digest *repb.Digest
		raw    []byte
	}{{stdout, r.GetStdoutDigest(), r.GetStdoutRaw()}, {stderr, r.GetStderrDigest(), r.GetStderrRaw()}} {
		d := log.digest
		if d == nil && len(log.raw) > 0 {
			d = function.Sum(log.raw).Proto() // other servers inline without a digest
		}
		if d.GetSizeBytes() > 0 {
			all[log.name] = item{kind: strings.TrimSuffix(log.name, "/"), name: digestName(d), digest: d}
		}
	}
	return all
}

// Root returns the digest of an output directory's root Directory if directories were compared by their roots, else
// nil.
func (r *Run) Root(path string) *repb.Digest { return r.items[path].root }

func digestName(d *repb.Digest) string { return fmt.Sprintf("%s/%d", d.GetHash(), d.GetSizeBytes()) }

// compareRuns returns the result of runs and their outputs.
func compareRuns(runs []Run) (Result, []Output) {
	result := Same
	outputs := []Output{}
	for _, name := range itemNames(runs) {
		o := Output{Path: displayName(name)}
		for i := range runs {
			it := runs[i].items[name]
			o.Kind = cmp.Or(o.Kind, it.kind)
			o.Digests = append(o.Digests, text(it.name))
			if !it.equal(runs[0].items[name]) {
				o.Differ, result = true, Differs
			}
		}
		outputs = append(outputs, o)
	}
	for i := range runs {
		if runs[i].ExitCode != runs[0].ExitCode || runs[i].Code != runs[0].Code {
			result = FlakyExit
		}
	}
	return result, outputs
}

// itemNames returns the keys of the items of all runs: sorted paths, then stdout and stderr.
func itemNames(runs []Run) []string {
	var names []string
	for i := range runs {
		names = slices.AppendSeq(names, maps.Keys(runs[i].items))
	}
	last := func(name string) int { return slices.Index([]string{stdout, stderr}, name) }
	slices.SortFunc(names, func(a, b string) int {
		return cmp.Or(cmp.Compare(last(a), last(b)), cmp.Compare(a, b))
	})
	return slices.Compact(names)
}

// describe lists what a variation changes, each in a few words.
func describe(v *worker.Variation) []string {
	var all []string
	c := &v.Conditions
	add := func(format string, args ...any) { all = append(all, fmt.Sprintf(format, args...)) }
	if c.ClockOffset != 0 {
		day := 24 * time.Hour
		add("time +%dd%s", c.ClockOffset/day, c.ClockOffset%day)
	}
	if c.FrozenClock != 0 {
		add("time held at %s", date(c.FrozenClock))
	}
	for _, kv := range v.Env {
		key, value, _ := strings.Cut(kv, "=")
		switch key {
		case "TZ":
			add("zone %s", value)
		case "LC_ALL":
			add("locale %s", value)
		case "HOME":
			add("home %s", value)
		case "PATH":
			add("search path %s", value[strings.LastIndexByte(value, ':'):])
		case padding:
			add("environment +%d", len(kv)+1)
		}
	}
	for _, name := range []struct {
		condition sandbox.Condition
		format    string
		value     any
	}{
		{sandbox.ConditionUser, "user %v", fmt.Sprintf("%s(%d)", c.User, c.UID)},
		{sandbox.ConditionHostname, "hostname %v", c.Hostname},
		{sandbox.ConditionUmask, "umask %04o", c.Umask},
		{sandbox.ConditionCPUs, "cpus %v", c.CPUs},
		{sandbox.ConditionFixedLayout, "aslr off%v", ""},
		{sandbox.ConditionRandomSeed, "random seed %v", c.RandomSeed},
		{sandbox.ConditionSkippedPIDs, "pids +%v", c.SkippedPIDs},
		{sandbox.ConditionUptime, "uptime +%v", c.Uptime},
	} {
		if c.Of(name.condition) != "" {
			add(name.format, name.value)
		}
	}
	if v.Order != 0 {
		add("readdir order %d", v.Order)
	}
	if c.InputTime != 0 {
		add("input-times %s", date(c.InputTime))
	}
	if c.InputOwner != 0 {
		add("input-owner %d", c.InputOwner)
	}
	if c.OutputOrder != 0 {
		add("output-order %d", c.OutputOrder)
	}
	if v.Root != "" {
		add("path %s", v.Root)
	}
	return all
}

// Conditions of a run without variation (docs/sandbox.md).
const (
	defaultHostname   = "cloister"
	defaultUser       = "build"
	defaultUID        = 1000
	defaultInputOwner = 65534
	defaultUmask      = 0o022
)

// facts returns the conditions of a run.
func (p *planner) facts(v *worker.Variation, m *repb.ExecutedActionMetadata) *compare.Facts {
	c := &v.Conditions
	f := &compare.Facts{
		Hostname: cmp.Or(c.Hostname, defaultHostname),
		User:     cmp.Or(c.User, defaultUser), UID: cmp.Or(c.UID, defaultUID), Umask: cmp.Or(c.Umask, defaultUmask),
		InputOwner: cmp.Or(c.InputOwner, defaultInputOwner),
		Root:       cmp.Or(v.Root, worker.ExecRoot), CPUs: cmp.Or(c.CPUs, p.host.CPUs),
		FixedLayout: c.FixedLayout, HeldRandom: c.RandomSeed != 0,
	}
	env := map[string]string{}
	for _, kv := range p.command.GetEnvironmentVariables() {
		env[kv.Name] = kv.Value
	}
	for _, kv := range v.Env {
		key, value, set := strings.Cut(kv, "=")
		if env[key] = value; !set {
			delete(env, key)
		}
	}
	for key, value := range env {
		f.Env = append(f.Env, key+"="+value)
	}
	slices.Sort(f.Env)
	f.Zone, f.Locale = env["TZ"], cmp.Or(env["LC_ALL"], env["LANG"])
	if m.GetExecutionStartTimestamp() != nil {
		f.Start, f.End = m.GetExecutionStartTimestamp().AsTime().Add(
			c.ClockOffset), m.GetExecutionCompletedTimestamp().AsTime().Add(
			c.ClockOffset,
		)
		if c.FrozenClock != 0 {
			f.Start = time.Unix(c.FrozenClock, 0).UTC()
			// The held clock advances with each reading, so the end is unknown.
			f.End = f.Start.Add(max(f.End.Sub(m.GetExecutionStartTimestamp().AsTime()), time.Minute))
		}
	}
	return f
}

// maxText limits texts from actions and clients, in bytes.
const maxText = 1000

// text returns s as printable text. Output names must not control a terminal.
func text(s string) string { return printable.Head(s, maxText) }
