// SPDX-License-Identifier: Apache-2.0

// Package localrun carries out cloister run.
package localrun

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/tree"
	"github.com/cloister-build/cloister/cmd/cloister/internal/client"
	"github.com/cloister-build/cloister/cmd/cloister/internal/confinement"
	"github.com/cloister-build/cloister/cmd/cloister/internal/localworker"
	"github.com/cloister-build/cloister/cmd/cloister/internal/render"
	"github.com/cloister-build/cloister/cmd/cloister/internal/terminal"
	"github.com/cloister-build/cloister/cmd/internal/exit"
	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/worker"
	"github.com/cloister-build/cloister/worker/repro/changes"
	"github.com/spf13/cobra"
)

// Config is the flags of run.
type Config struct {
	localworker.ActionFlags
	OutDir   string
	Runs     int
	Manifest string
	Metrics  string
	Summary  bool

	Sandbox confinement.Flags

	// Of a stored action.
	ActionName       string
	digest           cas.Digest // of action
	Target, Mnemonic string
	From             client.Server
	Shell            bool

	Interactive, TTY bool

	Notes io.Writer // for what explains the run
}

// Check validates the command line.
func (c *Config) Check(cmd *cobra.Command) error {
	for _, f := range []struct {
		names  []string
		action bool // of a stored action, not of a command
	}{{append([]string{"interactive", "tty"}, localworker.ActionFlagNames...), false}, {append(c.From.Identity.Names(), "server", "instance", "shell", "target", "mnemonic"), true}} {
		for _, name := range f.names {
			switch {
			case !cmd.Flags().Changed(name) || f.action == (c.ActionName != ""):
			case f.action:
				return fmt.Errorf("--%s needs --action", name)
			default:
				return fmt.Errorf("--%s conflicts with --action, which states it itself", name)
			}
		}
	}
	switch {
	case c.ActionName == "" && len(c.Args) == 0:
		return errors.New("write a command after --, or a stored action with --action")
	case c.ActionName != "" && len(c.Args) > 0:
		return errors.New("--action has its own command: omit the one after --")
	case c.ActionName != "":
		a, err := c.From.Action(cmd.Context(), c.ActionName)
		if err != nil {
			return fmt.Errorf("--action: %w", err)
		}
		c.digest = a.Digest
		if c.Target == "" && c.Mnemonic == "" { // for the rules of the policy
			c.Target, c.Mnemonic = a.Target, a.Mnemonic
		}
	case c.OutDir == "":
		c.OutDir = "."
	}
	if c.Runs < 1 || c.Runs > maxRuns {
		return fmt.Errorf("-n %d: write a number from 1 to %d", c.Runs, maxRuns)
	}
	if (c.Shell || c.Interactive || c.TTY) && c.recorded() {
		return errors.New("--shell, -i and -t are for one interactive run: omit -n, --manifest and --metrics")
	}
	if err := c.ActionFlags.Check(); err != nil {
		return err
	}
	if err := c.Sandbox.AllowRegistries(c.Registries()); err != nil {
		return err
	}
	c.Sandbox.AllowEndpoints(c.Endpoints)
	if term := os.Getenv("TERM"); c.TTY && term != "" {
		c.SetDefault("TERM", term)
	}
	return nil
}

// recorded reports whether the run is one of several, or leaves a record, which lacks what the command reads from
// stdin.
func (c *Config) recorded() bool { return c.Runs > 1 || c.Manifest != "" || c.Metrics != "" }

// maxRuns bounds -n, because the metrics of all runs are kept in memory.
const maxRuns = 10_000

// Run carries the command through the same seven verbs as the action of a client, with a temporary store. It returns
// the exit code of the command, or of the first of several runs that fails.
func Run(ctx context.Context, c *Config) (int, error) {
	w, err := localworker.Open(&c.Sandbox)
	if err != nil {
		return 0, err
	}
	m := &metrics{ID: rand.Text()}
	code, err := c.runOn(ctx, w, m)
	m.Close, err = timed(func() error { return errors.Join(err, w.Close()) })
	if err != nil {
		return code, err
	}
	m.finish()
	if c.Summary {
		m.summarize(os.Stderr)
	}
	if c.Metrics != "" {
		err = m.write(c.Metrics)
	}
	return code, err
}

// runOn runs the action as often as requested.
func (c *Config) runOn(ctx context.Context, w *localworker.Worker, m *metrics) (code int, err error) {
	var task *worker.Task
	if m.Inputs, err = timed(func() (err error) { task, err = c.prepare(ctx, w); return err }); err != nil {
		return 0, err
	}
	task.Target, task.Mnemonic = c.Target, c.Mnemonic
	var line *live
	line, task.Stdout, task.Stderr = c.liveLine()
	task.SkipCacheLookup = true // every run counts
	in, err := w.Store.Instance(task.Instance)
	if err != nil {
		return 0, err
	}
	config := worker.Config{Name: "run-" + m.ID}
	if c.ActionName == "" {
		config.MaxTimeout = max(c.Timeout, 24*time.Hour)
		if c.TTY && c.Timeout > 0 {
			config.MaxTimeout = c.Timeout // the only limit of a run on a terminal
		}
	}
	if m.Sandbox, err = timed(func() error { return w.Start(ctx, config) }); err != nil {
		return 0, err
	}
	if text := c.Sandbox.Warning(); text != "" {
		fmt.Fprintln(os.Stderr, "cloister: "+text)
	}
	c.seedRandom(w, task)
	if c.Metrics != "" {
		if err := m.describe(ctx, in.Store, task); err != nil {
			return 0, err
		}
	}
	for i := range c.Runs {
		t := *task
		t.Queued = time.Now()
		stop := line.start(c.heading(m), interval)
		var staged time.Time
		out, err := c.execute(ctx, w.Local, &t, in.Store, func(s worker.Stage) {
			if s == worker.StageRun {
				staged = time.Now()
			}
		})
		stop()
		if err != nil {
			return 0, c.ExplainRefusal(err)
		}
		m.add(t.Queued, staged, out)
		if text := remarks(out, task.Action); text != "" {
			if c.ActionName == "" {
				text = c.asFlags(text)
			}
			fmt.Fprintln(os.Stderr, text)
		}
		if i == 0 {
			if err := c.keep(ctx, in.Store, task.Action.Function(), out); err != nil {
				return 0, err
			}
		}
		if ended := c.ended(out); code == 0 {
			code = ended
		}
	}
	if n := m.StableHashes; n > 1 {
		fmt.Fprintf(os.Stderr, "cloister: the %d runs differ: they have %d stable hashes\n", c.Runs, n)
	}
	return code, nil
}

// prepare puts the action into the store and returns its task.
func (c *Config) prepare(ctx context.Context, w *localworker.Worker) (*worker.Task, error) {
	if c.ActionName == "" {
		return c.Put(ctx, w, c.Notes)
	}
	task, err := w.Fetch(ctx, &c.From, c.digest)
	return task, c.From.Explain(err, exit.Internal)
}

// seedRandom derives the kernel's randomness from the seed and fixes the address layout, or reports that this host
// cannot.
func (c *Config) seedRandom(w *localworker.Worker, task *worker.Task) {
	if task.Seed == nil {
		return
	}
	can := func(name sandbox.Condition) bool { return slices.Contains(w.Features.Conditions, name) }
	held := sandbox.Conditions{FixedLayout: can(sandbox.ConditionFixedLayout)}
	if can(sandbox.ConditionRandomSeed) {
		held.RandomSeed = *task.Seed + 1 // 0 means unseeded, but is a valid seed
	} else {
		fmt.Fprintln(os.Stderr, "cloister: this host cannot seed the kernel's randomness; only CLOISTER_SEED and PYTHONHASHSEED have the seed")
	}
	task.Variation = &worker.Variation{Conditions: held}
}

// ended returns the exit code for a run, and explains a failure that its messages leave unexplained.
func (c *Config) ended(out *worker.Outcome) int {
	code := int(out.Result.ExitCode)
	explain := func(text string) {
		if text != "" {
			fmt.Fprintln(os.Stderr, "cloister: "+text)
		}
	}
	switch {
	case out.Status != worker.StatusOK:
		return max(code, 1)
	case c.ActionName != "":
		return code
	case code != 0:
		explain(c.ExplainAbsent())
		return code
	}
	missing := c.MissingOutputs(out.Result)
	if len(missing) == 0 {
		return 0
	}
	if len(missing) < len(c.Out) { // the message names the first if all are missing
		explain("the command succeeded but did not produce " + strings.Join(missing, ", "))
	}
	return 1
}

// execute carries out the task, with a shell instead of its command if requested.
func (c *Config) execute(
	ctx context.Context, local *worker.Local, task *worker.Task, store cas.Store, report func(worker.Stage),
) (*worker.Outcome, error) {
	if c.Shell {
		action, err := changes.ReadAction(ctx, store, task.Action)
		if err != nil {
			return nil, err
		}
		fmt.Fprintf(c.Notes, "cloister: a shell instead of this command of action %s:\n%s\n", task.Action, render.QuoteScript(action.Command.Arguments))
		task.Args = []string{"/bin/sh", "-i"}
	}
	if c.Shell || c.TTY {
		t, err := terminal.Open(os.Stdin, os.Stdout)
		if err != nil {
			return nil, err
		}
		defer t.Close()
		task.Terminal = t.TTY
	} else if c.readsStdin() {
		r, w, err := os.Pipe() // the run must not get files and terminals of this host
		if err != nil {
			return nil, err
		}
		defer r.Close()
		go func() {
			_, _ = io.Copy(w, os.Stdin) // it fails when the run ends
			w.Close()
		}()
		task.Stdin = r
	}
	return local.Execute(ctx, task, report)
}

// readsStdin reports whether the command gets our stdin: with -i, or if it is a pipe or file and no record of the run
// would lack it.
func (c *Config) readsStdin() bool {
	if c.Interactive {
		return true
	}
	fi, err := os.Stdin.Stat()
	return err == nil && fi.Mode()&os.ModeCharDevice == 0 && c.ActionName == "" && !c.recorded()
}

// remarks returns what to print about an outcome besides the exit code.
func remarks(out *worker.Outcome, action cas.Digest) string {
	end, rest, _ := strings.Cut(out.Message, "\n")
	if out.Status == worker.StatusOK && out.Result.ExitCode <= 128 && strings.HasSuffix(end, ", action "+action.String()) {
		return rest
	}
	return out.Message
}

// asFlags replaces the advice in a message for clients by flags of run.
func (c *Config) asFlags(message string) string {
	message = strings.ReplaceAll(message, `raise it; for a Bazel test, set timeout = "long" in BUILD or pass --test_timeout`, "raise it with --timeout")
	message = strings.ReplaceAll(message, "set a longer one in the client", "set a longer one with --timeout")
	message = strings.ReplaceAll(message, "property cloister-on-violation", "--on-violation")
	if c.Sandbox.Policy == "" {
		message = strings.ReplaceAll(message, "or allow the endpoint in the policy", "or allow the endpoint with --allow")
	}
	return localworker.AsFlags(message)
}

// keep writes the manifest and the outputs of a run to the requested files, or reports that outputs are dropped.
func (c *Config) keep(ctx context.Context, store cas.Store, f cas.Function, out *worker.Outcome) error {
	if c.Manifest != "" {
		if err := writeManifest(ctx, store, out, c.Manifest); err != nil {
			return fmt.Errorf("--manifest: %w", err)
		}
	}
	r := out.Result
	if c.OutDir == "" {
		if n := len(r.OutputFiles) + len(r.OutputDirectories) + len(r.OutputSymlinks); n > 0 {
			fmt.Fprintf(c.Notes, "cloister: outputs are dropped (%d); --out-dir DIR keeps them\n", n)
		}
		return nil
	}
	if err := os.MkdirAll(c.OutDir, 0o755); err != nil {
		return fmt.Errorf("write outputs: %w", err)
	}
	dir, err := os.OpenRoot(c.OutDir)
	if err != nil {
		return fmt.Errorf("write outputs: %w", err)
	}
	defer dir.Close()
	if err := tree.Extract(ctx, store, f, r, dir); err != nil {
		return fmt.Errorf("write outputs: %w", err)
	}
	return nil
}
