// SPDX-License-Identifier: Apache-2.0

package repro

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/worker"
	"github.com/cloister-build/cloister/worker/repro/compare"
)

// run makes run i of the check, the first as usual.
func (c *check) run(ctx context.Context, i int) error {
	place := &c.Executors[i%len(c.Executors)]
	if i == 0 && c.First != nil {
		c.verdict.Runs = append(c.verdict.Runs, c.record(place, &worker.Variation{}, c.First))
		return nil
	}
	v, copies := c.scene.usual(), 0
	if i > 0 && place.Features != nil {
		v, copies = c.scene.varied(c.factors, i)
	}
	r, err := c.execute(ctx, place, v, copies, fmt.Sprintf("run %d of %d", i+1, c.Runs))
	if err != nil {
		return err
	}
	c.verdict.Runs = append(c.verdict.Runs, *r)
	return nil
}

// execute makes a run, and copies of it at the same time, of which nothing is kept.
func (c *check) execute(ctx context.Context, p *Executor, v *worker.Variation, copies int, what string) (*Run, error) {
	if c.Progress != nil {
		c.Progress(fmt.Sprintf("%s, %s", what, p.Name))
	}
	task := c.task
	task.Variation, task.SkipCacheLookup = v, true
	if !p.Action.IsZero() {
		task.Action = p.Action
	}
	task.Queued = time.Now()
	ctx, cancel := context.WithCancel(ctx)
	beside := make(chan struct{})
	for range copies {
		t := task
		go func() {
			// It is there to be in the way. How it ends is nobody's business.
			_, _ = p.Executor.Execute(ctx, &t, func(worker.Stage) {})
			beside <- struct{}{}
		}()
	}
	out, err := p.Executor.Execute(ctx, &task, func(worker.Stage) {})
	cancel()
	for range copies {
		<-beside
	}
	if err != nil {
		return nil, err
	}
	r := c.record(p, v, out)
	if copies > 0 {
		r.Varied = append(r.Varied, "parallel, with another run")
	}
	return &r, nil
}

// record returns what is known of a run.
func (c *check) record(p *Executor, v *worker.Variation, out *worker.Outcome) Run {
	m := out.Result.GetExecutionMetadata()
	r := Run{
		On: text(p.Name), Worker: text(m.GetWorker()), Varied: describe(v), ExitCode: out.Result.GetExitCode(),
		Result: out.Result, outputs: items(out.Result, c.task.Action.Function()), place: p, facts: c.scene.facts(v, m), digests: c.task.Action.Function(),
	}
	if !p.Action.IsZero() && p.Action != c.task.Action {
		r.Action = p.Action.String()
	}
	if out.Status != worker.OK {
		r.Code = out.Status.String()
	}
	if !out.Manifest.IsZero() {
		r.Manifest, r.StableHash = out.Manifest.String(), out.StableHash
	}
	if m.GetExecutionStartTimestamp() != nil {
		r.Start, r.End = m.GetExecutionStartTimestamp().AsTime(), m.GetExecutionCompletedTimestamp().AsTime()
	}
	return r
}

// An item is what one run left in one place.
type item struct {
	kind, name string // name is what is compared, and printed
	digest     *repb.Digest
	tree       bool // digest is that of a Tree, and not of a Directory
	executable bool
	target     string       // of a symlink
	root       *repb.Digest // of a Tree by whose root it is compared, else nil
}

// The names of stdout and stderr among the items: no path ends in a slash.
const (
	stdout = "stdout/"
	stderr = "stderr/"
)

// items returns what a result names, by path. Function is that of its digests.
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
		// The root says the same as the Tree, which need not be written in one way alone.
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
			d = function.Sum(log.raw).Proto() // only others inline without a digest
		}
		if d.GetSizeBytes() > 0 {
			all[log.name] = item{kind: strings.TrimSuffix(log.name, "/"), name: digestName(d), digest: d}
		}
	}
	return all
}

// Root returns the digest of the Directory that is the root of an output directory, where that is what was compared and not
// the digest of its Tree, else nil.
func (r *Run) Root(path string) *repb.Digest { return r.outputs[path].root }

func digestName(d *repb.Digest) string { return fmt.Sprintf("%s/%d", d.GetHash(), d.GetSizeBytes()) }

// judge compares the runs.
func (c *check) judge() {
	v := &c.verdict
	v.Result, v.Outputs = judge(v.Runs)
}

// judge says what runs come to, and what they made.
func judge(runs []Run) (Result, []Output) {
	result := Same
	outputs := []Output{}
	for _, name := range paths(runs) {
		o := Output{Path: shown(name)}
		for i := range runs {
			it := runs[i].outputs[name]
			o.Kind = cmp.Or(o.Kind, it.kind)
			o.Digests = append(o.Digests, text(it.name))
			if it.kind != runs[0].outputs[name].kind || it.name != runs[0].outputs[name].name {
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

// paths returns the names of all items of runs: paths in their order, then stdout and stderr.
func paths(runs []Run) []string {
	seen := map[string]bool{}
	for i := range runs {
		for name := range runs[i].outputs {
			seen[name] = true
		}
	}
	names := make([]string, 0, len(seen))
	for name := range seen {
		names = append(names, name)
	}
	last := func(name string) int { return slices.Index([]string{stdout, stderr}, name) }
	slices.SortFunc(names, func(a, b string) int {
		return cmp.Or(cmp.Compare(last(a), last(b)), cmp.Compare(a, b))
	})
	return names
}

// describe says what a variation changes, each in a few words.
func describe(v *worker.Variation) []string {
	var all []string
	c := &v.Conditions
	say := func(format string, args ...any) { all = append(all, fmt.Sprintf(format, args...)) }
	if c.ClockOffset != 0 {
		day := 24 * time.Hour
		say("time +%dd%s", c.ClockOffset/day, c.ClockOffset%day)
	}
	if c.FrozenClock != 0 {
		say("time held at %s", time.Unix(c.FrozenClock, 0).UTC().Format(time.RFC3339))
	}
	for _, kv := range v.Env {
		key, value, _ := strings.Cut(kv, "=")
		switch key {
		case "TZ":
			say("zone %s", value)
		case "LC_ALL":
			say("locale %s", value)
		case padding:
			say("environment +%d", len(kv)+1)
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
			say(name.format, name.value)
		}
	}
	if v.Order != 0 {
		say("readdir order %d", v.Order)
	}
	if v.Root != "" {
		say("path %s", v.Root)
	}
	return all
}

// What every run has that is given nothing else (docs/sandbox.md).
const (
	usualHostname = "cloister"
	usualUser     = "build"
	usualUID      = 1000
	usualUmask    = 0o022
)

// facts returns what a run noticed.
func (s *scene) facts(v *worker.Variation, m *repb.ExecutedActionMetadata) *compare.Facts {
	c := &v.Conditions
	f := &compare.Facts{
		Hostname: cmp.Or(c.Hostname, usualHostname),
		User:     cmp.Or(c.User, usualUser), UID: cmp.Or(c.UID, usualUID), Umask: cmp.Or(c.Umask, usualUmask),
		Root: cmp.Or(v.Root, worker.ExecRoot), CPUs: cmp.Or(c.CPUs, s.host.CPUs),
		FixedLayout: c.FixedLayout, HeldRandom: c.RandomSeed != 0,
	}
	env := map[string]string{}
	for _, kv := range s.command.GetEnvironmentVariables() {
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
		f.Start, f.End = m.GetExecutionStartTimestamp().AsTime().Add(c.ClockOffset), m.GetExecutionCompletedTimestamp().AsTime().Add(c.ClockOffset)
		if c.FrozenClock != 0 {
			f.Start = time.Unix(c.FrozenClock, 0).UTC()
			// A millisecond for each reading: how many there were is not known.
			f.End = f.Start.Add(max(f.End.Sub(m.GetExecutionStartTimestamp().AsTime()), time.Minute))
		}
	}
	return f
}

// maxName bounds, in bytes, what is told of a name that an action or a client chose.
const maxName = 1000

// text returns s as one line of ASCII, with other characters as Go's escapes, and not too long: an output's name must not
// command a terminal. What it returns it leaves as it is.
func text(s string) string {
	var b []byte
	for _, r := range s {
		if len(b) >= maxName {
			return string(b[:maxName]) + "[cut]"
		}
		if ' ' <= r && r <= '~' {
			b = append(b, byte(r))
			continue
		}
		quoted := strconv.QuoteRuneToASCII(r)
		b = append(b, quoted[1:len(quoted)-1]...)
	}
	return string(b)
}
