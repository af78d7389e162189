// SPDX-License-Identifier: Apache-2.0

// Package reproduction carries out cloister repro: it runs actions repeatedly, here or on servers, and reports
// differences.
package reproduction

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/cloister-build/cloister/cmd/cloister/internal/attestation"
	"github.com/cloister-build/cloister/cmd/cloister/internal/client"
	"github.com/cloister-build/cloister/cmd/cloister/internal/comparison"
	"github.com/cloister-build/cloister/cmd/cloister/internal/confinement"
	"github.com/cloister-build/cloister/cmd/cloister/internal/localworker"
	"github.com/cloister-build/cloister/cmd/cloister/internal/render"
	"github.com/cloister-build/cloister/cmd/cloister/internal/terminal"
	"github.com/cloister-build/cloister/cmd/internal/exit"
	"github.com/cloister-build/cloister/worker"
	"github.com/cloister-build/cloister/worker/repro"
	"github.com/cloister-build/cloister/worker/repro/attest"
	"github.com/cloister-build/cloister/worker/repro/compare"
	"github.com/spf13/cobra"
)

// Config is the flags of repro.
type Config struct {
	localworker.ActionFlags
	From    client.Server
	Sandbox confinement.Flags
	Names   []string
	Which   client.Filter

	Runs       int
	Vary       string
	On         []string
	Bisect     bool
	TryFixes   bool
	Report     string
	KeepIn     string
	JSON       bool
	Diffoscope bool
	Verbose    bool
	Progress   io.Writer // for one line that is updated, if it is a terminal
	// FailOn are the causes for which the check fails; none means any difference.
	FailOn []string
	// AllowFailure accepts equal failures and outputs that no run produces.
	AllowFailure bool

	Attest attestation.Flags
	key    *attest.Key // of Attest
}

// maxActions limits the actions of a selection.
const maxActions = 1000

// CheckFlags validates the command line.
func (c *Config) CheckFlags(cmd *cobra.Command) error {
	command := len(c.Args) > 0
	for _, name := range localworker.ActionFlagNames {
		if cmd.Flags().Changed(name) && !command {
			return fmt.Errorf("--%s needs a command after --", name)
		}
	}
	kinds := 0
	for _, is := range []bool{command, len(c.Names) > 0, c.Which.Set()} {
		if is {
			kinds++
		}
	}
	switch {
	case kinds != 1:
		return errors.New("write digests of actions, a selection such as --invocation ID, or a command after --")
	case c.Runs < repro.MinRuns || c.Runs > repro.MaxRuns:
		return fmt.Errorf("--runs %d: write a number from %d to %d", c.Runs, repro.MinRuns, repro.MaxRuns)
	}
	if _, err := repro.Choose(c.Vary); err != nil {
		return fmt.Errorf("--vary: %w", err)
	}
	if _, err := writerOf(c.Report); c.Report != "" && err != nil {
		return err
	}
	for _, name := range c.FailOn {
		if !slices.ContainsFunc(compare.Causes, func(row compare.CauseRow) bool { return string(row.Cause) == name }) {
			return fmt.Errorf("--fail-on: unknown cause %+.100q: docs/causes.md lists them", name)
		}
	}
	if c.Attest.Path != "" && !command && len(c.Names) != 1 {
		return errors.New("--attest needs exactly one action")
	}
	var err error
	if c.key, err = c.Attest.Load(cmd.Context()); err != nil {
		return err
	}
	for _, on := range c.On {
		u, err := url.Parse(on)
		if on != "local" && on != "remote" && (err != nil || u.Port() == "" || u.User != nil || u.RawQuery+u.Fragment != "" || u.Scheme != "grpc" && u.Scheme != "grpcs") {
			// Reports and messages repeat the addresses, so they must not contain passwords.
			return errors.New("--on: write local, remote, grpc://HOST:PORT[/INSTANCE] or grpcs://HOST:PORT[/INSTANCE]")
		}
	}
	if c.Bisect && !c.local() {
		return errors.New("--bisect needs the sandbox of this machine: add local to --on")
	}
	if err := errors.Join(comparison.CheckDiffoscope(c.Diffoscope), c.ActionFlags.Check()); err != nil {
		return err
	}
	return c.Sandbox.AllowRegistries(c.Registries())
}

// actions returns the selected actions; for a command one without a digest yet. It writes a note to info if several
// callers have entries of the selected build.
func (c *Config) actions(ctx context.Context, info io.Writer) ([]client.Action, error) {
	if len(c.Args) > 0 {
		return []client.Action{{}}, nil
	}
	if c.Which.Set() {
		var err error
		if c.Which.Invocation, err = c.From.Invocation(ctx, c.Which.Invocation); err != nil {
			return nil, err
		}
		all, err := c.From.Actions(ctx, c.Which, maxActions)
		if err == nil && len(all) == 0 {
			err = exit.New(exit.Absent, fmt.Errorf("the history of %s has no such action; see cloister action ls --all", c.From.Address))
		}
		if c.Which.Invocation != "" {
			var callers []string
			for _, a := range all {
				callers = append(callers, a.Caller)
			}
			slices.Sort(callers)
			client.NoteCallers(info, c.Which.Invocation, slices.Compact(callers))
		}
		return all, err
	}
	var all []client.Action
	for _, name := range c.Names {
		s, err := c.From.Action(ctx, name)
		if err != nil {
			return nil, err
		}
		all = append(all, s)
	}
	return all, nil
}

// Run checks all actions in order and prints its findings.
func (c *Config) Run(ctx context.Context, out, info io.Writer) (repro.Report, error) {
	subjects, err := c.actions(ctx, info)
	if err != nil {
		return nil, err
	}
	w, err := localworker.Open(&c.Sandbox)
	if err != nil {
		return nil, err
	}
	defer w.Close()
	if c.local() {
		config := worker.Config{Name: "repro", MaxTimeout: max(c.Timeout, 24*time.Hour)}
		if err := w.Start(ctx, config); err != nil {
			return nil, err
		}
		if text := c.Sandbox.Warning(); text != "" {
			fmt.Fprintln(info, "cloister: "+text)
		}
	}
	servers, err := c.dial(ctx)
	defer servers.close()
	if err != nil {
		return nil, err
	}
	var report repro.Report
	var failed error
	for i, s := range subjects {
		v, err := c.check(ctx, w, servers, s, fmt.Sprintf("%d of %d, ", i+1, len(subjects)))
		if err != nil && (len(subjects) == 1 || ctx.Err() != nil) {
			return nil, err
		}
		if err != nil { // continue with the others
			fmt.Fprintf(info, "cloister: %s: %v\n", s.Digest, err)
			failed = fmt.Errorf("%d of %d actions could not be checked; the last: %w", i+1-len(report), len(subjects), err)
			continue
		}
		report = append(report, v)
		if !c.JSON {
			if err := v.Text(out, repro.TextOptions{Verbose: c.Verbose, Color: render.Colours(out)}); err != nil {
				return nil, err
			}
		}
	}
	return report, errors.Join(c.print(report, len(subjects), out), c.write(report), c.writeStatement(ctx, report), failed)
}

// Fails reports whether a verdict differs for a reason that matters: any without --fail-on; otherwise one of its
// causes, a flaky exit, or an output that could not be compared, which may hide such a cause.
func (c *Config) Fails(r repro.Report) bool {
	return slices.ContainsFunc(r, func(v *repro.Verdict) bool {
		matters := func(cause string) bool { return slices.Contains(c.FailOn, cause) }
		return !v.Result.AllEqual() && (len(c.FailOn) == 0 || v.Result == repro.FlakyExit || len(v.Unexplained) > 0 ||
			slices.ContainsFunc(v.Causes(), matters))
	})
}

// print prints the summary after all verdicts.
func (c *Config) print(report repro.Report, of int, out io.Writer) error {
	if c.JSON {
		return render.JSON(out, report)
	}
	if of == 1 {
		return nil
	}
	return report.Table(out)
}

// check checks one action.
func (c *Config) check(ctx context.Context, w *localworker.Worker, servers servers, s client.Action, which string) (*repro.Verdict, error) {
	var task *worker.Task
	var err error
	if len(c.Args) > 0 {
		task, err = c.Put(ctx, w, c.Progress)
	} else {
		task, err = c.fetch(ctx, w, s)
	}
	if err != nil {
		return nil, err
	}
	in, err := w.Store.Instance(task.Instance)
	if err != nil {
		return nil, err
	}
	o := repro.Options{Runs: max(c.Runs, len(c.On)), Bisect: c.Bisect, TryFixes: c.TryFixes, Host: repro.ThisHost()}
	o.Factors, _ = repro.Choose(c.Vary) // checkFlags did
	for _, on := range c.On {
		if on == "local" {
			o.Executors = append(o.Executors, repro.Executor{Name: on, Executor: w.Local, Store: in.Store, Features: &w.Features})
			continue
		}
		p, err := servers[on].executor(ctx, on, in.Store, task.Action)
		if err != nil {
			return nil, fmt.Errorf("--on %s: %w", on, err)
		}
		o.Executors = append(o.Executors, *p)
	}
	if line := terminal.NewProgress(c.Progress, which); line != nil {
		o.Progress = line.Say
		defer line.Clear()
	}
	v, err := repro.Check(ctx, task, o)
	if err != nil {
		return nil, err
	}
	if err := c.checkProof(v); err != nil {
		return nil, err
	}
	return v, errors.Join(c.keepRuns(ctx, v, o.Executors), c.runDiffoscope(ctx, w, v, o.Executors))
}

// local reports whether runs take place here.
func (c *Config) local() bool {
	return slices.Contains(c.On, "local")
}

// fetch copies an action with its inputs from the server, and returns its task.
func (c *Config) fetch(ctx context.Context, w *localworker.Worker, s client.Action) (*worker.Task, error) {
	task, err := w.Fetch(ctx, &c.From, s.Digest)
	if task != nil {
		task.Target, task.Mnemonic = s.Target, s.Mnemonic
	}
	return task, c.From.Explain(err, exit.Trouble)
}

// writerOf returns the encoder of the report format that the file name selects.
func writerOf(name string) (func(repro.Report) ([]byte, error), error) {
	switch filepath.Ext(name) {
	case ".html":
		return repro.Report.HTML, nil
	case ".md":
		return func(r repro.Report) ([]byte, error) { return r.Markdown(), nil }, nil
	case ".json":
		return func(r repro.Report) ([]byte, error) {
			var b strings.Builder
			err := render.JSON(&b, r)
			return []byte(b.String()), err
		}, nil
	}
	return nil, fmt.Errorf("--report %s: write a name that ends in .html, .md or .json", name)
}

// write writes the report, if requested.
func (c *Config) write(r repro.Report) error {
	if c.Report == "" {
		return nil
	}
	to, err := writerOf(c.Report)
	if err != nil {
		return err
	}
	b, err := to(r)
	if err == nil {
		err = os.WriteFile(c.Report, b, 0o644)
	}
	if err != nil {
		return fmt.Errorf("--report: %w", err)
	}
	return nil
}

// writeStatement writes the statement about the single action, if requested.
func (c *Config) writeStatement(ctx context.Context, r repro.Report) error {
	if c.Attest.Path == "" || len(r) != 1 {
		return nil
	}
	s, err := attestation.OfVerdict(r[0])
	if err != nil {
		return fmt.Errorf("--attest: %w", err)
	}
	return c.Attest.Write(ctx, s, c.key)
}

// dial connects to all servers of --on. The caller closes them, also after an error.
func (c *Config) dial(ctx context.Context) (servers, error) {
	all := servers{}
	for _, on := range c.On {
		if on == "local" || all[on] != nil {
			continue
		}
		// Credentials are for the server of --server only.
		at := client.Server{Address: on, Instance: c.From.Instance}
		if on == "remote" || on == c.From.Address {
			at = c.From
		}
		s, err := at.Open(ctx)
		if err != nil {
			return all, fmt.Errorf("--on %s: %w", on, err)
		}
		all[on] = &server{store: s}
		if all[on].conn, all[on].instance, err = at.Dial(); err != nil {
			return all, fmt.Errorf("--on %s: %w", on, err)
		}
	}
	return all, nil
}
