// SPDX-License-Identifier: Apache-2.0

// Package sandboxtest is the contract of sandbox.Backend as tests: what every backend must do, and what a program in
// its sandbox must not be able to do. Only test files import it.
package sandboxtest

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/tests/must"
)

// TestBackend runs the contract against backends that new creates and the test closes. The host must have a POSIX shell
// and the usual tools in /usr and /bin. Parts may still run after it returns, so callers clean up with t.Cleanup.
func TestBackend(t *testing.T, new func() sandbox.Backend) {
	b := new()
	t.Cleanup(func() { b.Close() })
	f, err := b.Probe(t.Context())
	if err != nil {
		requirement, _, _ := strings.Cut(f.Backend, "-") // qemu and qemu-tcg need the same
		Unavailable(t, map[bool]string{true: "namespaces", false: requirement}[f.Kernel == ""], err)
	}
	type part struct {
		name string
		run  func(*testing.T, sandbox.Backend)
	}
	parts := []part{
		{"ProbeNamesTheTier", probe},
		{"ExitCodes", exitCodes},
		{"EnvironmentIsExact", environment},
		{"IdentityIsFixed", identity},
		{"NothingIsInherited", inherited},
		{"UndeclaredPathsAreAbsent", undeclared},
		{"InputsCannotBeChanged", inputs},
		{"InputInsideWritableDirectoryCannotBeChanged", inputInOutput},
		{"OutputsOverInputs", lower},
		{"AttemptsAtInputsBelowOutputsAreRecorded", lowerViolations},
		{"RootReplacesTheHosts", ownRoot},
		{"OutputIsTheRoot", outputRoot},
		{"SuperuserHasNoRights", superuser},
		{"OnlyOutputsAndTempAreWritable", writable},
		{"OutputsOutliveTheRun", outputs},
		{"MissingOutputIsCreated", missingOutput},
		{"UnwritableOutputIsReported", unwritableOutput},
		{"MissingToolchainIsExplained", missingToolchain},
		{"ProfileRuns", profileRuns},
		{"ClosedBackendRefuses", func(t *testing.T, _ sandbox.Backend) { closedBackend(t, new()) }},
		{"TempIsPrivateToARun", temp},
		{"HostNetworkIsUnreachable", hostNetwork},
		{"LoopbackOnlyIfDeclared", loopback},
		{"NoProcessOutlivesTheRun", processes},
		{"StopTermsThenKills", stop},
		{"StopAtAnyMomentEndsSoon", stopAnytime},
		{"TimeoutCountsExecutionOnly", timeout},
		{"PidOneCannotBeSignalled", pidOne},
		{"OutputCanBeOpenedAgain", reopen},
		{"NetworkIsNewForEachRun", freshNetwork},
		{"KeysAreNotShared", keys},
		{"LinksInTargetsAreNotFollowed", linkedTarget},
		{"InvalidSpecIsRefused", invalid},
		{"EqualWritersGetOneStream", equalWriters},
		{"UsageIsOfTheWholeRun", usage},
		{"ViolationsAreRecorded", violations},
		{"ManyViolationsHideNoOther", flood},
		{"KillEndsTheRunAtItsFirstViolation", kill},
		{"SharedCountersAreBounded", shared},
		{"FullTemporaryDirectoryIsReported", fullTemp},
		{"HostCannotBeAskedForItsFiles", oracle},
		{"LookupsAreRecorded", lookups},
		{"AllowedNameHasAnAddress", allowedName},
		{"EmptyLoopbackIsReported", ownLoopback},
		{"OrdinaryActionsAreNoViolations", ordinary},
		{"AuditFullNamesWhatIsMissing", auditFull},
		{"AuditOffRecordsNothing", auditOff},
		{"EndpointsAreReachedAndNothingElse", endpoints},
		{"ListenIsForbiddenUnlessPermitted", listen},
		{"SocketsAreReachedAndNoOther", sockets},
		{"StdinIsThePipe", stdin},
		{"TerminalIsTheRuns", terminal},
		{"ConditionsAreOfOneRun", conditions},
		{"ConditionsTogether", conditionsTogether},
	}
	// These need several runs at a time, or compare processor time with elapsed time. No other part runs meanwhile.
	alone := []part{
		{"ManyRunsAtOnce", many},
		{"OtherRunsAreInvisible", otherRuns},
		{"LimitsAreEnforced", limitsEnforced},
		{"LimitsOfOneRunDoNotOutliveIt", func(t *testing.T, _ sandbox.Backend) {
			// A new backend has one slot, which every run reuses.
			b := new()
			defer b.Close()
			limitsReset(t, b)
		}},
	}
	// An emulated machine keeps one processor of this host busy, so two parts run at a time. Each uses its own
	// backend, because some check that a run finds nothing left by the previous one, which must have used the same machine.
	parallel := f.Backend == "qemu-tcg"
	backends := make(chan sandbox.Backend, 2)
	backends <- b
	if parallel {
		second := new()
		t.Cleanup(func() { second.Close() })
		backends <- second
	}
	for _, c := range parts {
		t.Run(c.name, func(t *testing.T) {
			if parallel {
				t.Parallel() // continues once those alone have ended
			}
			b := <-backends
			defer func() { backends <- b }()
			c.run(t, b)
		})
	}
	for _, c := range alone {
		t.Run(c.name, func(t *testing.T) { c.run(t, b) })
	}
}

// Requirements are the words for what a test may need of the host. CONTRIBUTING.md explains them.
var Requirements = []string{
	"namespaces", "unprivileged", "limits", "conditions", "timens", "monitor",
	"bazel", "git", "python", "node", "tools", "networks", "root", "tmpfs", "interop", "browser", "packaging", "vm",
	"clients", "disk", "ia32", "address", "diffoscope", "strace", "corpus", "gvisor", "qemu", "windows", "wine",
}

// Unavailable skips the test because the host lacks what, or fails it if CLOISTER_REQUIRE names what: a skipped
// guarantee must not look like a kept one.
func Unavailable(t testing.TB, requirement string, reason any) {
	t.Helper()
	required := strings.Split(os.Getenv("CLOISTER_REQUIRE"), ",")
	for _, word := range append(required, requirement) {
		if word != "" && !slices.Contains(Requirements, word) {
			t.Fatalf("unknown requirement %q: see sandboxtest.Requirements", word)
		}
	}
	if slices.Contains(required, requirement) {
		t.Fatalf("CLOISTER_REQUIRE requires %s, which this host lacks: %v", requirement, reason)
	}
	t.Skipf("needs %s: %v", requirement, reason)
}

// Tool skips the test, as Unavailable does, if a program is missing. CLOISTER_REQUIRE calls python3 python, git and
// node by their names, and all others tools.
func Tool(t testing.TB, program string) {
	t.Helper()
	_, err := exec.LookPath(program)
	if err == nil {
		return
	}
	switch name := filepath.Base(program); name {
	case "git", "node":
		Unavailable(t, name, err)
	case "python3":
		Unavailable(t, "python", err)
	default:
		Unavailable(t, "tools", err)
	}
}

// Limits returns limits that every backend enforces: the defaults without those that need control groups.
func Limits() sandbox.Limits {
	l := sandbox.DefaultLimits()
	l.Memory, l.CPU = sandbox.Unlimited, sandbox.Unlimited
	return l
}

// A Run is one run of a shell script and its results.
type Run struct {
	Script string
	Spec   func(*sandbox.Spec)                // changes the spec, if not nil
	Bytes  int64                              // limit of the workspace; 0 is unlimited
	Files  int64                              // likewise
	Setup  func(testing.TB, *os.Root)         // fills the workspace, if not nil
	Result *sandbox.Result                    // how it ended
	Stdout string                             // what it wrote
	Stderr string                             //
	Check  func(testing.TB, *os.Root, string) // sees the output directory before it vanishes, if not nil
}

// Do executes the run in a sandbox with the host's programs, a writable directory /build and /tmp.
func (r *Run) Do(t testing.TB, b sandbox.Backend) {
	t.Helper()
	if err := r.Try(t.Context(), t, b); err != nil {
		t.Fatalf("run %q: %v", r.Script, err)
	}
}

// run executes r and returns it with its results.
func run(t testing.TB, b sandbox.Backend, r Run) *Run {
	t.Helper()
	r.Do(t, b)
	return &r
}

// bash is a run of a script with bash.
func bash(script string) Run {
	return Run{Spec: func(s *sandbox.Spec) { s.Args = []string{"/bin/bash", "-c", script} }}
}

// Try is Do for runs that may fail to start.
func (r *Run) Try(ctx context.Context, t testing.TB, b sandbox.Backend) error {
	t.Helper()
	w, err := b.Workspace(ctx, cmp.Or(r.Bytes, sandbox.Unlimited), cmp.Or(r.Files, sandbox.Unlimited))
	if err != nil {
		return err
	}
	defer w.Close()
	if err := w.Root().Mkdir("out", 0o777); err != nil {
		return err
	}
	if err := w.Root().Chmod("out", 0o777|os.ModeSticky); err != nil {
		return err
	}
	if r.Setup != nil {
		r.Setup(t, w.Root())
	}
	spec := &sandbox.Spec{
		Args:      []string{"/bin/sh", "-c", r.Script},
		Dir:       "/build",
		Env:       []string{"PATH=/usr/bin:/bin"},
		Inputs:    host(t),
		Outputs:   []sandbox.Output{{Target: "/build", Source: "out"}},
		Temp:      []sandbox.Temp{{Target: "/tmp", Bytes: 16 << 20}},
		Network:   sandbox.Network{Loopback: true, Listen: true},
		Limits:    Limits(),
		Workspace: w.Name(),
	}
	if r.Spec != nil {
		r.Spec(spec)
	}
	var stdout, stderr bytes.Buffer
	r.Result, err = perform(ctx, b, spec, sandbox.Stdio{Stdout: &stdout, Stderr: &stderr})
	r.Stdout, r.Stderr = stdout.String(), stderr.String()
	if err == nil && r.Check != nil {
		out, err := w.Root().OpenRoot("out")
		if err != nil {
			return err
		}
		defer out.Close()
		r.Check(t, out, r.Stdout)
	}
	return err
}

// perform runs spec, unaudited if the backend does not support the default level.
func perform(ctx context.Context, b sandbox.Backend, spec *sandbox.Spec, std sandbox.Stdio) (*sandbox.Result, error) {
	res, err := b.Run(ctx, spec, std)
	if errors.Is(err, sandbox.ErrUnsupported) && strings.Contains(err.Error(), "audit level "+sandbox.AuditViolations.String()) {
		unaudited := *spec
		unaudited.Audit = sandbox.AuditOff
		return b.Run(ctx, &unaudited, std)
	}
	return res, err
}

// lacks skips a test of what the backend's Features do not promise. On the host's kernel that is a lack of the host,
// and Unavailable decides; a backend with its own kernel lacks it everywhere.
func lacks(t *testing.T, f *sandbox.Features, requirement, what string) {
	t.Helper()
	if f.Kernel != "" {
		t.Skipf("the backend %s does not promise it: %s", f.Backend, what)
	}
	Unavailable(t, requirement, what)
}

// needAudit skips the test if the backend does not record at this level.
func needAudit(t *testing.T, b sandbox.Backend, level sandbox.Audit) {
	t.Helper()
	if f := features(t, b); !slices.Contains(f.Audits, level) {
		lacks(t, f, "namespaces", "it does not support the audit level "+level.String())
	}
}

// host returns the directories of a shell and its tools.
func host(t testing.TB) []sandbox.Input {
	var ins []sandbox.Input
	for _, dir := range []string{"/usr", "/bin", "/lib", "/lib64", "/etc/alternatives"} {
		if src, err := filepath.EvalSymlinks(dir); err == nil {
			ins = append(ins, sandbox.Input{Target: dir, Content: "host", Source: src})
		}
	}
	if len(ins) == 0 {
		t.Fatal("this host has none of the usual directories")
	}
	return ins
}

// shell runs a script, which must succeed, and returns its output.
func shell(t *testing.T, b sandbox.Backend, script string) string {
	t.Helper()
	r := run(t, b, Run{Script: script})
	if r.Result.ExitCode != 0 {
		t.Fatalf("script %q: exit code %d\n%s", script, r.Result.ExitCode, r.Stderr)
	}
	return r.Stdout
}

func probe(t *testing.T, b sandbox.Backend) {
	f := must.Get(b.Probe(t.Context()))(t)
	want := "full"
	defaults := sandbox.DefaultLimits()
	if slices.ContainsFunc(f.Checks, func(c sandbox.Check) bool { return !c.OK }) ||
		slices.ContainsFunc(sandbox.AllLimits, func(l sandbox.Limit) bool {
			return defaults.Of(l) != sandbox.Unlimited && !slices.Contains(f.Limits, l)
		}) {
		want = "partial"
	}
	if f.Tier != want || f.Backend == "" || len(f.Layers) == 0 {
		t.Errorf("got backend %q, tier %q, layers %v; want tier %q", f.Backend, f.Tier, f.Layers, want)
	}
}
