// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/worker"
	"github.com/cloister-build/cloister/worker/repro"
	"github.com/cloister-build/cloister/worker/repro/attest"
	"github.com/spf13/cobra"
)

// reproConfig is what the flags of repro say.
type reproConfig struct {
	recipe // of a command
	from   origin
	box    confinement
	names  []string
	which  selection

	runs   int
	vary   string
	on     []string
	bisect bool
	report string
	keepIn string
	asJSON bool
	// diffoscope asks for its opinion as well.
	diffoscope bool

	evidence evidence
	key      *attest.Key // of evidence
}

// exitTrouble is the code of repro and diff where nothing could be compared, as of diff(1).
const exitTrouble = 2

// maxSubjects is how many actions a selection judges.
const maxSubjects = 1000

func reproCommand() *cobra.Command {
	var c reproConfig
	cmd := &cobra.Command{
		Use: "repro DIGEST... [-n RUNS] [--vary FACTORS] [--bisect] [--on PLACES] [--report FILE]\n" +
			"  cloister repro [--in DIR] [--out PATH]... [--env K=V]... -- COMMAND [ARG]...\n" +
			"  cloister repro --invocation ID | --failed | --target LABEL | --mnemonic NAME",
		Short: "Says whether an action is reproducible, and why not",
		Long: `Repro runs an action several times and compares its outputs, its exit code and what it said. The first
run is a usual one; the others notice other times, users, hosts, directories and so on, each other ones, of
which no output should depend. If one does, it says where, and what the likely cause and its fix are.
With --bisect it then holds everything that it can, varies one factor at a time, and names those that
change an output.

DIGEST is HASH/SIZE, as messages print it, of an action that the server of --cas has; where that keeps a history also
the beginning of it, ^1 for the action that was asked for last, or all that a selection names. A command is
run as by cloister run, and needs no server. Nothing is recorded anywhere.

--on says where it runs, in turns: local is the sandbox of this machine, remote the server of --cas, or
state addresses of servers of whatever make, which run it as usual; there it has another digest, since it
is marked as not to be cached.

What can be varied: ` + strings.Join(repro.Names(), ", ") + `.
What the command sets by itself, as TZ in its environment, is an input of it and stays.

It exits with 0 if all runs are the same, 1 if they differ, and 2 if they could not be made.`,
		Example: `  cloister repro ^1                                     # the action that was executed last
  cloister repro 9f2c...e1/142 -n 5 --bisect --report out.html
  cloister repro --invocation 5c0a...77 --vary time,path
  cloister repro ^1 --attest app.intoto.json --key ~/.ssh/id_ed25519
  cloister repro --out lib.a --in obj --bisect -- ar crU lib.a a.o b.o
  cloister repro 9f2c...e1/142 --on local,grpc://other.example.com:8980`,
		RunE: func(cmd *cobra.Command, args []string) error {
			c.names = args
			if at := cmd.ArgsLenAtDash(); at >= 0 {
				c.names, c.args = args[:at], args[at:]
			}
			if err := c.checkFlags(cmd); err != nil {
				return err
			}
			ctx, end := stop(cmd.Context())
			defer end()
			report, err := c.judge(ctx, cmd.OutOrStdout(), cmd.ErrOrStderr())
			var by *interrupted
			switch {
			case errors.As(context.Cause(ctx), &by):
				return newExit(by.exitCode(), errors.New("stopped"))
			case err != nil:
				return newExit(exitTrouble, err)
			}
			for _, v := range report {
				if v.Result != repro.Same {
					return newExit(exitNo, nil)
				}
			}
			return nil
		},
	}
	f := cmd.Flags()
	f.StringVar(&c.which.invocation, "invocation", "", "all actions of this build, by the history of the server")
	f.StringVar(&c.which.target, "target", "", "all actions of this target, by the history of the server; * at its end stands for all that begin so")
	f.StringVar(&c.which.mnemonic, "mnemonic", "", "all actions of this kind, by the history of the server")
	f.BoolVar(&c.which.failed, "failed", false, "all actions that failed, by the history of the server")
	f.IntVarP(&c.runs, "runs", "n", repro.DefaultRuns, "how many runs are compared")
	f.StringVar(&c.vary, "vary", "all", "what the runs notice otherwise, divided by commas: all, none, or some")
	f.StringSliceVar(&c.on, "on", []string{"local"}, "where it runs, in turns: local, remote (the server of --cas), or addresses of servers")
	f.BoolVar(&c.bisect, "bisect", false, "if runs differ, find what makes them, by further runs")
	f.StringVar(&c.report, "report", "", "write what was found to this file: .html, .md or .json")
	f.StringVar(&c.keepIn, "keep", "", "directory that the outputs of each run are copied to, as run1, run2 and so on")
	f.BoolVar(&c.asJSON, "json", false, "print one JSON list")
	f.BoolVar(&c.diffoscope, "diffoscope", false, diffoscopeHelp)
	c.recipe.register(cmd)
	c.from.register(cmd)
	c.box.register(cmd)
	c.evidence.register(cmd)
	return cmd
}

// checkFlags returns what is wrong with the command line.
func (c *reproConfig) checkFlags(cmd *cobra.Command) error {
	command := len(c.args) > 0
	for _, name := range recipeFlags {
		if cmd.Flags().Changed(name) && !command {
			return fmt.Errorf("--%s is of a command, which is stated after --", name)
		}
	}
	kinds := 0
	for _, is := range []bool{command, len(c.names) > 0, c.which.any()} {
		if is {
			kinds++
		}
	}
	switch {
	case kinds != 1:
		return errors.New("state what is to run: digests of actions, or a selection as --invocation ID, or a command after --")
	case c.runs < repro.MinRuns || c.runs > repro.MaxRuns:
		return fmt.Errorf("--runs %d: from %d to %d runs can be compared", c.runs, repro.MinRuns, repro.MaxRuns)
	}
	if _, err := repro.Choose(c.vary); err != nil {
		return fmt.Errorf("--vary: %w", err)
	}
	if _, err := writerOf(c.report); c.report != "" && err != nil {
		return err
	}
	if c.evidence.path != "" && !command && len(c.names) != 1 {
		return errors.New("--attest is of one action: state one")
	}
	var err error
	if c.key, err = c.evidence.load(cmd.Context()); err != nil {
		return err
	}
	for _, on := range c.on {
		u, err := url.Parse(on)
		if on != "local" && on != "remote" && (err != nil || u.Port() == "" || u.User != nil || u.RawQuery+u.Fragment != "" || u.Scheme != "grpc" && u.Scheme != "grpcs") {
			// Reports and messages name places: what is stated must not be a password.
			return errors.New("--on: write local, remote, grpc://HOST:PORT[/INSTANCE] or grpcs://HOST:PORT[/INSTANCE]")
		}
	}
	if c.bisect && !c.local() {
		return errors.New("--bisect needs the sandbox of this machine, where things can be held: add local to --on")
	}
	return errors.Join(haveDiffoscope(c.diffoscope), c.recipe.check())
}

// subjects returns the actions that the command line names; of a command it is a digest that is yet to come.
func (c *reproConfig) subjects(ctx context.Context) ([]subject, error) {
	if len(c.args) > 0 {
		return []subject{{}}, nil
	}
	if c.which.any() {
		all, err := c.from.subjects(ctx, c.which, maxSubjects)
		if err == nil && len(all) == 0 {
			err = newExit(exitAbsent, fmt.Errorf("the history of %s has no such action", c.from.cas))
		}
		return all, err
	}
	var all []subject
	for _, name := range c.names {
		s, err := c.from.subject(ctx, name)
		if err != nil {
			return nil, err
		}
		all = append(all, s)
	}
	return all, nil
}

// judge judges all actions, one after the other, and prints what it finds.
func (c *reproConfig) judge(ctx context.Context, out, info io.Writer) (repro.Report, error) {
	subjects, err := c.subjects(ctx)
	if err != nil {
		return nil, err
	}
	bench, err := openWorkbench(&c.box)
	if err != nil {
		return nil, err
	}
	defer bench.close()
	if c.local() {
		config := worker.Config{Name: "repro", Grace: time.Second, MaxTimeout: max(c.timeout, 24*time.Hour)}
		if err := bench.start(ctx, config); err != nil {
			return nil, err
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
		v, err := c.one(ctx, bench, servers, s, fmt.Sprintf("%d of %d, ", i+1, len(subjects)), info)
		if err != nil && (len(subjects) == 1 || ctx.Err() != nil) {
			return nil, err
		}
		if err != nil { // the others are judged all the same
			fmt.Fprintf(info, "cloister: %s: %v\n", s.digest, err)
			failed = fmt.Errorf("%d of %d actions could not be judged; the last: %w", i+1-len(report), len(subjects), err)
			continue
		}
		report = append(report, v)
		if !c.asJSON {
			if err := v.Text(out); err != nil {
				return nil, err
			}
		}
	}
	return report, errors.Join(c.print(report, len(subjects), out), c.write(report), c.attest(ctx, report), failed)
}

// print prints what comes after all verdicts.
func (c *reproConfig) print(report repro.Report, of int, out io.Writer) error {
	if c.asJSON {
		return printJSON(out, report)
	}
	if of == 1 {
		return nil
	}
	return report.Table(out)
}

// one judges one action.
func (c *reproConfig) one(ctx context.Context, bench *workbench, servers servers, s subject, which string, info io.Writer) (*repro.Verdict, error) {
	var task *worker.Task
	var err error
	if len(c.args) > 0 {
		task, err = c.put(ctx, bench)
	} else {
		task, err = c.bring(ctx, bench, s)
	}
	if err != nil {
		return nil, err
	}
	in, err := bench.store.Instance(task.Instance)
	if err != nil {
		return nil, err
	}
	o := repro.Options{Runs: max(c.runs, len(c.on)), Bisect: c.bisect, Host: repro.ThisHost()}
	if c.vary != "all" {
		o.Factors, _ = repro.Choose(c.vary) // checkFlags did
	}
	for _, on := range c.on {
		if on == "local" {
			o.Executors = append(o.Executors, repro.Executor{Name: on, Executor: bench.local, Store: in.Store, Features: &bench.local.Features})
			continue
		}
		p, err := servers[on].place(ctx, on, in.Store, task.Action)
		if err != nil {
			return nil, fmt.Errorf("--on %s: %w", on, err)
		}
		o.Executors = append(o.Executors, *p)
	}
	if isTerminal(info) {
		o.Progress = func(what string) { fmt.Fprintf(info, "\r\x1b[K%s%s", which, what) }
		defer fmt.Fprint(info, "\r\x1b[K")
	}
	v, err := repro.Check(ctx, task, o)
	if err != nil {
		return nil, err
	}
	return v, errors.Join(c.keepRuns(ctx, v, o.Executors), c.lookDeeper(ctx, bench, v, o.Executors))
}

// local reports whether something runs here.
func (c *reproConfig) local() bool {
	for _, on := range c.on {
		if on == "local" {
			return true
		}
	}
	return false
}

// bring copies an action with its inputs from the server into the workbench, and returns its task.
func (c *reproConfig) bring(ctx context.Context, bench *workbench, s subject) (*worker.Task, error) {
	size, err := diskBytes(bench.dir)
	if err != nil {
		return nil, err
	}
	task := &worker.Task{Action: s.digest, Target: s.target, Mnemonic: s.mnemonic}
	task.Instance, err = fetch(ctx, bench.store, size/5, &c.from, s.digest)
	return task, c.from.explain(err, exitTrouble)
}

// keepRuns copies the outputs of each run to where --keep says.
func (c *reproConfig) keepRuns(ctx context.Context, v *repro.Verdict, places []repro.Executor) error {
	if c.keepIn == "" {
		return nil
	}
	below := c.keepIn
	if len(c.names) > 1 || c.which.any() {
		d, err := cas.ParseDigest(v.Action)
		if err != nil {
			return err
		}
		below = filepath.Join(below, d.Hash()) // all of it: outputs of two actions must not mix
	}
	for i := range v.Runs {
		if err := extractRun(ctx, v, i, places, filepath.Join(below, fmt.Sprintf("run%d", i+1))); err != nil {
			return fmt.Errorf("--keep: %w", err)
		}
	}
	return nil
}

// writerOf returns what makes a report of the kind that the name of its file says.
func writerOf(name string) (func(repro.Report) ([]byte, error), error) {
	switch filepath.Ext(name) {
	case ".html":
		return repro.Report.HTML, nil
	case ".md":
		return func(r repro.Report) ([]byte, error) { return r.Markdown(), nil }, nil
	case ".json":
		return func(r repro.Report) ([]byte, error) {
			var b strings.Builder
			err := printJSON(&b, r)
			return []byte(b.String()), err
		}, nil
	}
	return nil, fmt.Errorf("--report %s: its name is to end in .html, .md or .json", name)
}

// write writes the report, if one is wanted.
func (c *reproConfig) write(r repro.Report) error {
	if c.report == "" {
		return nil
	}
	to, err := writerOf(c.report)
	if err != nil {
		return err
	}
	b, err := to(r)
	if err == nil {
		err = os.WriteFile(c.report, b, 0o644)
	}
	if err != nil {
		return fmt.Errorf("--report: %w", err)
	}
	return nil
}
