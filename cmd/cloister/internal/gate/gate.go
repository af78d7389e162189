// SPDX-License-Identifier: Apache-2.0

package gate

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/cloister-build/cloister/cmd/cloister/internal/attestation"
	"github.com/cloister-build/cloister/cmd/cloister/internal/confinement"
	"github.com/cloister-build/cloister/cmd/cloister/internal/interrupt"
	"github.com/cloister-build/cloister/cmd/cloister/internal/localworker"
	"github.com/cloister-build/cloister/cmd/internal/exit"
	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/sandbox/namespace"
	"github.com/cloister-build/cloister/sandbox/policy/strict"
	"github.com/cloister-build/cloister/worker/repro/attest"
)

// ExitViolation is the exit code after a violation.
const ExitViolation = 4

// The modes.
const (
	modeReport  = "report"
	modeEnforce = "enforce"
	modeStrict  = "strict"
)

// Defaults of the flags.
const (
	DefaultPolicy = "docs/ci/HERMETIC_CI_POLICY.yml"
	DefaultOut    = "artifacts/governance/hermetic-ci"
	DefaultMode   = modeEnforce
)

// Config holds the flags of cloister gate.
type Config struct {
	Policy, Revision, Mode, Out string
	Steps                       []string // "" is all
	JSON                        bool
	Fallback                    bool // without a sandbox, observe the steps only
	Prometheus                  string

	Sandbox confinement.Flags
	Attest  attestation.Flags

	Stdout, Notes io.Writer
}

// A gate is one run of the command.
type gate struct {
	*Config
	policy *gatePolicy
	steps  []*step
	clean  *strings.Replacer
	key    *attest.Key
	today  time.Time
	dir    string // for checkouts

	mu      sync.Mutex // guards sources, metrics.Steps and Notes while steps run
	sources map[string]*source

	backend  *namespace.Backend
	features sandbox.Features
	observer *observer // nil with a sandbox
	evidence *evidence
	report   Report
	metrics  metrics
}

// Run runs the steps and leaves the evidence. It returns the exit code of the gate; an error means that there is no
// evidence.
func Run(ctx context.Context, c *Config) (code int, err error) {
	g := &gate{Config: c, clean: secrets(os.Environ()), sources: map[string]*source{}}
	now := time.Now()
	g.today = now.UTC().Truncate(24 * time.Hour)
	g.metrics.Started = now.UTC()
	if err := g.check(ctx); err != nil {
		return 0, err
	}
	dir, held, removed, err := localworker.NewDir(os.TempDir())
	if err != nil {
		return 0, exit.New(exit.Environment, err)
	}
	defer func() {
		err = errors.Join(err, os.RemoveAll(dir), held.Close())
	}()
	g.dir = dir
	config, err := c.Sandbox.NamespaceConfig()
	if err != nil {
		return 0, err
	}
	config.Hidden = append(config.Hidden, dir)
	if err := g.open(ctx, removed); err != nil {
		return 0, err
	}
	g.backend = namespace.New(config)
	g.runSteps(ctx)
	if err := g.backend.Close(); err != nil {
		g.fail(fmt.Sprintf("clean up: %v", err))
	}
	g.conclude(ctx)
	return g.report.ExitCode, g.finish(ctx)
}

// check reads the policy and validates the flags.
func (g *gate) check(ctx context.Context) (err error) {
	if modes := []string{modeReport, modeEnforce, modeStrict}; !slices.Contains(modes, g.Mode) {
		return exit.New(exit.Usage, fmt.Errorf("--mode %q: write one of %s", g.Mode, strings.Join(modes, ", ")))
	}
	if g.Fallback && g.Mode == modeStrict {
		return exit.New(exit.Usage, errors.New("--fallback: strict mode needs the full sandbox: use another mode, or omit --fallback"))
	}
	if g.policy, err = confinement.ParseFile("--policy", g.Policy, parsePolicy); err != nil {
		return err
	}
	var ids []string
	for _, s := range g.policy.steps {
		ids = append(ids, s.id)
		if len(g.Steps) == 0 || slices.Contains(g.Steps, s.id) {
			g.steps = append(g.steps, s)
		}
	}
	for _, id := range g.Steps {
		if slices.Contains(ids, id) {
			continue
		}
		hint := "write one of " + strings.Join(ids, ", ")
		if nearest := strict.Nearest(id, ids); nearest != "" {
			hint = "did you mean " + nearest + "?"
		}
		return exit.New(exit.Usage, fmt.Errorf("--step %q: %s has no such step: %s", id, g.Policy, hint))
	}
	if g.key, err = g.Attest.Load(ctx); err != nil {
		return exit.New(exit.Usage, err)
	}
	return nil
}

// open resolves the revision and opens the evidence. It reports the directories of killed commands that were removed.
func (g *gate) open(ctx context.Context, removed []string) error {
	commit, err := resolve(ctx, ".", g.Revision)
	switch {
	case ctx.Err() != nil:
		return interrupt.Explain(ctx, err, err.Error())
	case err != nil:
		return exit.New(exit.Usage, fmt.Errorf("--revision %s: %w", g.Revision, err))
	}
	for _, s := range g.steps {
		if err := s.locate(ctx); ctx.Err() != nil {
			return interrupt.Explain(ctx, err, err.Error())
		} else if err != nil {
			return exit.New(exit.Usage, fmt.Errorf("%s:%d: step %s: %w", g.Policy, s.line, s.id, err))
		}
	}
	var partial []string // evidence
	if g.evidence, partial, err = openEvidence(g.Out, commit, filepath.Join(g.dir, "evidence"), g.clean); err != nil {
		return exit.New(exit.Environment, fmt.Errorf("--out: %w", err))
	}
	for _, name := range append(removed, partial...) {
		g.note("removed %s, which a killed command had left", name)
	}
	if changed, err := git(ctx, ".", false, "status", "--porcelain", "--untracked-files=no"); err == nil && changed != "" {
		g.note("steps do not see the uncommitted changes of the working tree")
	}
	g.report = Report{
		Format: reportFormat, Revision: commit, Mode: g.Mode, Policy: policyReport{filepath.ToSlash(g.Policy), g.policy.sum},
		Sandbox: boxReport{Tier: "none", Layers: []string{}, NotEnforced: []string{}}, Steps: []stepReport{},
	}
	return nil
}

// runSteps runs the steps, as many at a time as the policy permits, unless this machine lacks what the mode requires.
func (g *gate) runSteps(ctx context.Context) {
	for _, s := range g.steps {
		f := s.find(nil, g.Policy, g.today)
		command := make([]string, len(s.command))
		for i, word := range s.command {
			command[i] = g.clean.Replace(word) // before it is quoted
		}
		g.report.Steps = append(g.report.Steps, stepReport{
			ID: s.id, Line: s.line, Command: command, Listen: s.listen, Verdict: notRun,
			Violations: f.violations, Exceptions: f.uses,
		})
	}
	features, err := g.backend.Probe(ctx)
	g.features = features
	g.describeSandbox()
	if err != nil && g.Fallback {
		g.note("no sandbox is possible here: %v", err)
		if g.observer, err = findObserver(ctx, g.dir); err == nil {
			g.report.Sandbox = boxReport{
				Tier: "none", Layers: []string{}, Observer: g.observer.program, NotEnforced: []string{"network", "listening", "limits", "files"},
			}
			g.policy.parallel = 1
		}
	}
	if err != nil && ctx.Err() == nil {
		g.fail(fmt.Sprintf("this machine cannot run steps in the sandbox: %v; cloister check explains it", err))
		return
	}
	if why := g.shortfall(); why != "" {
		g.fail(why)
		return
	}
	var running sync.WaitGroup
	free := make(chan struct{}, g.policy.parallel)
	for i, s := range g.steps {
		free <- struct{}{}
		running.Go(func() {
			defer func() { <-free }()
			g.runOne(ctx, s, &g.report.Steps[i])
		})
	}
	running.Wait()
}

// runOne runs a step and reports its progress, unless ctx has ended.
func (g *gate) runOne(ctx context.Context, s *step, r *stepReport) {
	if ctx.Err() != nil {
		return
	}
	g.note("step %s", s.id)
	if err := g.runStep(ctx, s, r); err != nil && ctx.Err() == nil {
		r.Verdict, r.Message = impossible, g.clean.Replace(err.Error())
	} else if err != nil {
		r.Verdict = interrupted
	}
	g.note("step %s: %s", s.id, r.Verdict)
}

// note prints a progress line.
func (g *gate) note(format string, args ...any) {
	g.mu.Lock()
	defer g.mu.Unlock()
	fmt.Fprintf(g.Notes, "cloister: "+format+"\n", args...)
}

// describeSandbox records what this machine enforces and observes.
func (g *gate) describeSandbox() {
	box := &g.report.Sandbox
	box.Tier, box.Layers = g.features.Tier, append(box.Layers, g.features.Layers...)
	box.Observed = slices.Contains(g.features.Audits, sandbox.AuditViolations)
	for _, c := range g.features.Checks {
		if !c.OK {
			box.NotEnforced = append(box.NotEnforced, c.Name)
		}
	}
}

// shortfall returns what the mode requires and this machine lacks, with the remedy, or "".
func (g *gate) shortfall() string {
	if g.Mode != modeStrict {
		return ""
	}
	if g.Sandbox.Tier != "full" {
		return fmt.Sprintf("strict mode needs the full sandbox: omit --sandbox %s", g.Sandbox.Tier)
	}
	for _, c := range g.features.Checks {
		layers := []namespace.Layer{namespace.Seccomp, namespace.Landlock, namespace.Monitor}
		if !c.OK && slices.Contains(layers, namespace.Layer(c.Name)) {
			return fmt.Sprintf("strict mode needs the full sandbox, which lacks %s here: %s", c.Name, cmp.Or(c.Fix, c.Detail))
		}
	}
	if g.features.Tier != "full" || !g.report.Sandbox.Observed {
		return fmt.Sprintf("strict mode needs the full sandbox and records of network system calls; "+
			"the sandbox is %s here: see cloister check", g.features.Tier)
	}
	return ""
}

// fail records why the gate cannot decide.
func (g *gate) fail(why string) {
	g.report.Message = g.clean.Replace(why)
	g.note("%s", g.report.Message)
}

// conclude derives verdict and exit code from the steps.
func (g *gate) conclude(ctx context.Context) {
	r := &g.report
	has := func(verdicts ...string) bool {
		return slices.ContainsFunc(r.Steps, func(s stepReport) bool { return slices.Contains(verdicts, s.Verdict) })
	}
	by, stopped := errors.AsType[*interrupt.Error](context.Cause(ctx))
	switch {
	case stopped:
		r.Verdict, r.ExitCode = interrupted, by.ExitCode()
	case ctx.Err() != nil:
		r.Verdict, r.ExitCode = interrupted, exit.Environment
	case r.Message != "" || has(impossible):
		r.Verdict, r.ExitCode = impossible, exit.Environment
	case r.Count() > 0 && g.Mode != modeReport:
		r.Verdict, r.ExitCode = violated, ExitViolation
	case has(failed, timedOut) || slices.ContainsFunc(r.Steps, func(s stepReport) bool { return s.ExitCode != 0 }):
		r.Verdict, r.ExitCode = failed, exit.No
	case r.Count() > 0:
		r.Verdict = violated
	default:
		r.Verdict = g.best()
	}
}

// best returns the verdict of a step without any finding.
func (g *gate) best() string {
	if g.observer != nil {
		return unseen
	}
	return clean
}

// finish writes the reports and publishes the evidence.
func (g *gate) finish(ctx context.Context) error {
	g.metrics.finish(g)
	e, summary := g.evidence, []byte(g.clean.Replace(g.report.markdown()))
	err := errors.Join(
		e.writeJSON(reportFile, &g.report),
		e.write("report.md", summary),
		e.write("junit.xml", g.report.junit()),
		e.writeJSON("report.sarif", g.report.sarif()),
		e.writeJSON("volatile.json", &g.metrics),
	)
	if err == nil {
		err = e.publish()
	}
	if err == nil {
		err = g.sign(context.WithoutCancel(ctx))
	}
	if g.Prometheus != "" && err == nil {
		err = os.WriteFile(g.Prometheus, []byte(g.clean.Replace(g.metrics.prometheus())), 0o644)
	}
	if file := os.Getenv("GITHUB_STEP_SUMMARY"); file != "" && err == nil {
		err = appendFile(file, summary)
	}
	if err != nil {
		return exit.New(exit.Environment, fmt.Errorf("write the evidence: %w", err))
	}
	return g.print()
}

func appendFile(name string, text []byte) error {
	f, err := os.OpenFile(name, os.O_WRONLY|os.O_APPEND|os.O_CREATE, 0o644)
	if err != nil {
		return err
	}
	_, err = f.Write(text)
	return errors.Join(err, f.Close())
}

// print prints the outcome for a person, or the report as JSON.
func (g *gate) print() error {
	if g.JSON {
		text, err := encode(&g.report)
		if err == nil {
			_, err = io.WriteString(g.Stdout, g.clean.Replace(string(text)))
		}
		return err
	}
	var b strings.Builder
	for i := range g.report.Steps {
		s := &g.report.Steps[i]
		fmt.Fprintf(&b, "%-12s %s\n", s.Verdict, s.ID)
		if s.Message != "" {
			fmt.Fprintf(&b, "             %s\n", s.Message)
		}
		for _, v := range s.Violations {
			fmt.Fprintf(&b, "             %s\n", v.Text)
		}
	}
	if g.observer != nil {
		fmt.Fprintf(&b, "sandbox: %s\n", g.report.Sandbox.String())
	}
	fmt.Fprintf(&b, "verdict: %s; report: %s\n", g.report.Verdict, filepath.Join(g.evidence.final, "report.md"))
	_, err := io.WriteString(g.Stdout, g.clean.Replace(b.String()))
	return err
}
