// SPDX-License-Identifier: Apache-2.0

package buildevents

import (
	"cmp"
	"maps"
	"net/url"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/cloister-build/cloister/cas"
	bepb "github.com/cloister-build/cloister/proto/bazel/buildeventstream"
	"github.com/cloister-build/cloister/sandbox/printable"
	bespb "google.golang.org/genproto/googleapis/devtools/build/v1"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"
)

const (
	// maxText bounds a text, maxList a list inside of another one, maxOutput the output of Bazel.
	maxText   = 2048
	maxList   = 1000
	maxOutput = 256 << 10
	// outputsShown bounds the output files of a target.
	outputsShown = 100
	// maxParts bounds the targets, tests, files and references of a build, whose events can be much shorter than what
	// they become in memory.
	maxParts = 400_000
)

// A fileSet is a named set of files.
type fileSet struct {
	files []File
	sets  []string
}

// NewBuild returns the summary of a build without events. Add adds them in order, then Finish completes it.
func NewBuild(h Header) *Build {
	h.Facts = Facts{Status: h.Status}
	return &Build{
		Header: h, Targets: []*Target{}, FailedActions: []Action{}, targets: map[string]*Target{}, sets: map[string]*fileSet{},
	}
}

// payload returns Bazel's event, or nil.
func payload(m *bespb.BuildEvent) *bepb.BuildEvent {
	var e bepb.BuildEvent
	if m.GetBazelEvent() == nil || proto.Unmarshal(m.GetBazelEvent().Value, &e) != nil {
		return nil
	}
	return &e
}

// Add adds an event, a google.devtools.build.v1.BuildEvent. It ignores other messages; the error is nil.
func (b *Build) Add(data []byte) error {
	var m bespb.BuildEvent
	if proto.Unmarshal(data, &m) != nil {
		return nil
	}
	e := payload(&m)
	switch p := e.GetPayload().(type) {
	case *bepb.BuildEvent_Progress:
		b.Stdout, b.Stderr = output(b.Stdout, p.Progress.Stdout), output(b.Stderr, p.Progress.Stderr)
	case *bepb.BuildEvent_Started:
		b.started(e)
	case *bepb.BuildEvent_OptionsParsed:
		b.StartupOptions, b.Options = texts(p.OptionsParsed.ExplicitStartupOptions), texts(p.OptionsParsed.ExplicitCmdLine)
	case *bepb.BuildEvent_WorkspaceStatus:
		b.workspaceStatus(p.WorkspaceStatus)
	case *bepb.BuildEvent_StructuredCommandLine:
		b.commandLine(p.StructuredCommandLine)
	case *bepb.BuildEvent_Configured:
		id := e.GetId().GetTargetConfigured()
		b.target(id.GetLabel(), id.GetAspect()).Rule = text(p.Configured.TargetKind)
	case *bepb.BuildEvent_NamedSetOfFiles:
		b.namedSet(e.GetId().GetNamedSet().GetId(), p.NamedSetOfFiles)
	case *bepb.BuildEvent_Completed:
		b.completed(e.GetId().GetTargetCompleted(), p.Completed)
	case *bepb.BuildEvent_Action:
		b.action(e.GetId().GetActionCompleted(), p.Action)
	case *bepb.BuildEvent_TestResult:
		b.testResult(e.GetId().GetTestResult(), p.TestResult)
	case *bepb.BuildEvent_TestSummary:
		b.testSummary(e.GetId().GetTestSummary(), p.TestSummary)
	case *bepb.BuildEvent_Aborted:
		b.aborted(e.GetId(), p.Aborted)
	case *bepb.BuildEvent_Finished:
		b.finished(p.Finished)
	case *bepb.BuildEvent_BuildToolLogs:
		b.logs(files(p.BuildToolLogs.Log))
	case *bepb.BuildEvent_BuildMetrics:
		b.metrics(p.BuildMetrics)
	}
	return nil
}

// Finish completes the summary and returns b. No Add may follow.
func (b *Build) Finish() *Build {
	for _, t := range b.Targets {
		t.Outputs = b.outputs(t.groups)
		b.TargetCount++
		if t.Outcome != "" && t.Outcome != "built" {
			b.NotBuilt++
		}
		if t.Test == nil {
			continue
		}
		b.TestCount++
		if t.Test.failed() {
			b.TestsFailed++
		}
		if t.Test.Status == "flaky" {
			b.TestsFlaky++
		}
		for _, r := range t.Test.Results {
			for _, f := range r.Files {
				if f.Name == "test.lcov" && len(b.Coverage) < maxList {
					b.Coverage = append(b.Coverage, f)
				}
			}
		}
	}
	b.settle()
	b.targets, b.sets = nil, nil
	return b
}

func (b *Build) started(e *bepb.BuildEvent) {
	p := e.GetStarted()
	b.Started = instant(p.StartTime, p.StartTimeMillis)
	b.Tool, b.Command = text(p.BuildToolVersion), text(p.Command)
	b.Workspace, b.WorkingDirectory = text(p.WorkspaceDirectory), text(p.WorkingDirectory)
	for _, c := range e.Children {
		if patterns := c.GetPattern().GetPattern(); len(patterns) > 0 {
			b.Patterns = texts(patterns[:min(len(patterns), outputsShown)])
		}
	}
}

func (b *Build) workspaceStatus(p *bepb.WorkspaceStatus) {
	b.WorkspaceStatus = map[string]string{}
	for _, i := range p.Item[:min(len(p.Item), maxList)] {
		b.WorkspaceStatus[text(i.Key)] = text(i.Value)
	}
	b.User, b.Host = b.WorkspaceStatus["BUILD_USER"], b.WorkspaceStatus["BUILD_HOST"]
}

func (b *Build) commandLine(p *bepb.CommandLine) {
	c := CommandLine{Label: text(p.CommandLineLabel)}
	for _, s := range p.Sections {
		c.Args = append(c.Args, texts(s.GetChunkList().GetChunk())...)
		for _, o := range s.GetOptionList().GetOption() {
			if len(c.Args) < maxList {
				c.Args = append(c.Args, text(o.CombinedForm))
			}
		}
	}
	if len(c.Args) > 0 && len(b.CommandLines) < 10 {
		b.CommandLines = append(b.CommandLines, c)
	}
}

// target returns the target of that label, which it adds if necessary.
func (b *Build) target(label, aspect string) *Target {
	key := label + "\x00" + aspect
	t := b.targets[key]
	if t == nil {
		if t = (&Target{Label: text(label), Aspect: text(aspect)}); !b.keep(1) {
			return t // it is not listed
		}
		b.targets[key], b.Targets = t, append(b.Targets, t)
	}
	return t
}

func (b *Build) namedSet(id string, p *bepb.NamedSetOfFiles) {
	if !b.keep(1 + min(len(p.Files), maxList) + len(p.FileSets)) {
		return
	}
	set := &fileSet{files: files(p.Files)}
	for _, s := range p.FileSets {
		set.sets = append(set.sets, s.Id)
	}
	b.sets[id] = set
}

func (b *Build) completed(id *bepb.BuildEventId_TargetCompletedId, p *bepb.TargetComplete) {
	t := b.target(id.GetLabel(), id.GetAspect())
	if t.Outcome = "built"; !p.Success {
		t.Outcome = "failed"
	}
	t.Message = text(p.FailureDetail.GetMessage())
	for _, g := range p.OutputGroup {
		for _, s := range g.FileSets[:min(len(g.FileSets), outputsShown)] {
			if !b.keep(1) {
				return
			}
			t.groups = append(t.groups, s.Id)
		}
	}
}

// outputs returns files of some sets and of those that they contain.
func (b *Build) outputs(ids []string) (all []File) {
	seen := map[string]bool{}
	for len(ids) > 0 && len(all) < outputsShown {
		id := ids[0]
		if ids = ids[1:]; seen[id] || b.sets[id] == nil {
			continue
		}
		seen[id] = true
		all = append(all, b.sets[id].files...)
		ids = append(ids, b.sets[id].sets...)
	}
	return all[:min(len(all), outputsShown)]
}

func (b *Build) action(id *bepb.BuildEventId_ActionCompletedId, p *bepb.ActionExecuted) {
	if p.Success || len(b.FailedActions) >= maxList {
		return
	}
	b.FailedActions = append(b.FailedActions, Action{
		Label: text(cmp.Or(id.GetLabel(), p.Label)), Mnemonic: text(p.Type), Output: text(id.GetPrimaryOutput()),
		ExitCode: p.ExitCode, Message: text(p.FailureDetail.GetMessage()), Command: texts(p.CommandLine),
		Stdout: file(p.Stdout), Stderr: file(p.Stderr),
	})
}

// test returns the test of that label, which it adds if necessary.
func (b *Build) test(label string) *Test {
	t := b.target(label, "")
	if t.Test == nil {
		t.Test = &Test{}
	}
	return t.Test
}

func (b *Build) testResult(id *bepb.BuildEventId_TestResultId, p *bepb.TestResult) {
	t := b.test(id.GetLabel())
	if len(t.Results) >= maxList || !b.keep(1+min(len(p.TestActionOutput), maxList)) {
		return
	}
	r := TestResult{
		Run: id.GetRun(), Shard: id.GetShard(), Attempt: id.GetAttempt(), Status: words(p.Status.String()),
		Details: text(p.StatusDetails), Strategy: text(p.ExecutionInfo.GetStrategy()), Host: text(p.ExecutionInfo.GetHostname()),
		ExitCode: p.ExecutionInfo.GetExitCode(), Started: instant(p.TestAttemptStart, p.TestAttemptStartMillisEpoch),
		Duration: span(p.TestAttemptDuration, p.TestAttemptDurationMillis), Files: files(p.TestActionOutput),
	}
	switch {
	case p.CachedLocally:
		r.Cached = "locally"
	case p.ExecutionInfo.GetCachedRemotely():
		r.Cached = "remotely"
	}
	t.Results = append(t.Results, r)
}

func (b *Build) testSummary(id *bepb.BuildEventId_TestSummaryId, p *bepb.TestSummary) {
	t := b.test(id.GetLabel())
	t.Status, t.Runs, t.Shards, t.Cached = words(p.OverallStatus.String()), p.RunCount, p.ShardCount, p.TotalNumCached
	t.Attempts, t.Duration = cmp.Or(p.AttemptCount, attempts(t.Results)), span(p.TotalRunDuration, p.TotalRunDurationMillis)
}

// attempts returns the largest number of attempts, which early versions of Bazel do not state.
func attempts(results []TestResult) (most int32) {
	for _, r := range results {
		most = max(most, r.Attempt)
	}
	return most
}

func (b *Build) aborted(id *bepb.BuildEventId, p *bepb.Aborted) {
	if c := id.GetTargetCompleted(); c != nil {
		t := b.target(c.Label, c.Aspect)
		t.Outcome, t.Message = words(p.Reason.String()), text(p.Description)
		return
	}
	label := cmp.Or(id.GetTargetConfigured().GetLabel(), id.GetConfiguredLabel().GetLabel(), id.GetUnconfiguredLabel().GetLabel(),
		id.GetTestSummary().GetLabel(), strings.Join(id.GetPattern().GetPattern(), " "))
	if len(b.Problems) < maxList {
		b.Problems = append(b.Problems, Problem{Label: text(label), Reason: words(p.Reason.String()), Description: text(p.Description)})
	}
}

func (b *Build) finished(p *bepb.BuildFinished) {
	b.Exit, b.ExitCode, b.Finished = text(p.ExitCode.GetName()), p.ExitCode.GetCode(), instant(p.FinishTime, p.FinishTimeMillis)
	if b.Status = Succeeded; b.ExitCode != 0 {
		b.Status = Failed
	}
}

// profileName matches the names that Bazel gives its profile: command.profile.gz, since Bazel 8
// command-INVOCATION.profile.gz.
var profileName = regexp.MustCompile(`^command(-[0-9a-f-]+)?\.profile(\.gz)?$`)

func (b *Build) logs(all []File) {
	b.Logs = nil
	for _, f := range all {
		if profileName.MatchString(f.Name) && !f.Digest.IsZero() {
			b.Profile = &f
		} else {
			b.Logs = append(b.Logs, f)
		}
	}
}

func (b *Build) metrics(p *bepb.BuildMetrics) {
	a, t := p.ActionSummary, p.TimingMetrics
	b.Metrics = &Metrics{
		ActionsCreated: a.GetActionsCreated(), ActionsExecuted: a.GetActionsExecuted(),
		TargetsConfigured: p.TargetMetrics.GetTargetsConfigured(), PackagesLoaded: p.PackageMetrics.GetPackagesLoaded(),
		CPU: span(nil, t.GetCpuTimeInMs()), Wall: span(nil, t.GetWallTimeInMs()),
		Analysis: span(nil, t.GetAnalysisPhaseTimeInMs()), Execution: span(nil, t.GetExecutionPhaseTimeInMs()),
		Runners: map[string]int32{},
	}
	for _, r := range a.GetRunnerCount()[:min(len(a.GetRunnerCount()), maxList)] {
		b.Metrics.Runners[text(r.Name)] += r.Count
	}
	maps.DeleteFunc(b.Metrics.Runners, func(name string, _ int32) bool { return name == "total" })
}

func files(all []*bepb.File) (some []File) {
	for _, f := range all[:min(len(all), maxList)] {
		some = append(some, *file(f))
	}
	return some
}

// file returns the name and the digest of a file. Its URI may lead anywhere; only the digest of a blob is kept.
func file(f *bepb.File) *File {
	if f == nil {
		return nil
	}
	named := &File{Name: printable.Tail(strings.Join(append(slices.Clone(f.PathPrefix), f.Name), "/"), maxText)}
	named.Contents = printable.Head(string(f.GetContents()), maxText)
	u, err := url.Parse(f.GetUri())
	if err != nil || u.Scheme != "bytestream" {
		return named
	}
	parts := strings.Split(strings.Trim(u.Path, "/"), "/")
	i := slices.Index(parts, "blobs")
	instance := strings.Join(parts[:max(i, 0)], "/")
	if i < 0 || len(parts) < i+3 || cas.CheckInstanceName(instance) != nil {
		return named
	}
	digest := strings.Join(parts[len(parts)-2:], "/")
	if len(parts) == i+4 { // blobs/FUNCTION/HASH/SIZE
		digest = parts[i+1] + ":" + digest
	}
	if d, err := cas.ParseDigest(digest); err == nil {
		named.Instance, named.Digest = instance, d
	}
	return named
}

func text(s string) string { return printable.Head(s, maxText) }

func texts(all []string) []string {
	some := make([]string, 0, min(len(all), maxList))
	for _, s := range all[:cap(some)] {
		some = append(some, text(s))
	}
	return some
}

// words returns the name of an enum value as words.
func words(name string) string { return strings.ReplaceAll(strings.ToLower(name), "_", " ") }

// control matches the escape sequences with which Bazel colours and rewrites lines.
var control = regexp.MustCompile(`\x1b\[[0-9;?]*[a-zA-Z]|\r`)

// output returns the end of a text with more lines, all printable.
func output(before, more string) string {
	if more == "" {
		return before
	}
	lines := strings.Split(control.ReplaceAllString(more[max(0, len(more)-maxOutput):], ""), "\n")
	for i := range lines {
		lines[i] = printable.Text(lines[i])
	}
	all := before + strings.Join(lines, "\n")
	return all[max(0, len(all)-maxOutput):]
}

// instant returns a time that is stated as a timestamp or in milliseconds, and the zero time if neither is valid.
func instant(t *timestamppb.Timestamp, millis int64) time.Time {
	switch {
	case t.IsValid():
		return t.AsTime()
	case millis > 0 && millis < 253402300800_000: // before the year 10000
		return time.UnixMilli(millis).UTC()
	}
	return time.Time{}
}

func span(d *durationpb.Duration, millis int64) time.Duration {
	if d.IsValid() {
		return d.AsDuration()
	}
	return time.Duration(max(0, min(millis, 1<<40))) * time.Millisecond
}
