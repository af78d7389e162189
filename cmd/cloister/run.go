// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"syscall"
	"time"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/tree"
	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/worker"
	"github.com/spf13/cobra"
)

// runConfig is what the flags of run say.
type runConfig struct {
	recipe
	outDir   string
	times    int
	manifest string
	metrics  string

	box confinement

	// Of a stored action.
	action           string
	digest           cas.Digest // of action
	target, mnemonic string
	from             origin
	shell            bool
}

func runCommand() *cobra.Command {
	var c runConfig
	cmd := &cobra.Command{
		Use: "run [--in DIR | --git REPOSITORY@REVISION] [--out PATH]... [--env K=V]... [--seed N] [-n N] -- COMMAND [ARG]...\n" +
			"  cloister run --action DIGEST [--cas URL] [--instance NAME] [--shell] [--out-dir DIR]",
		Short: "Runs one command, or a stored action, in the sandbox, without a server",
		Long: `Run executes one command as an action: the files of --in are its inputs, read-only, in the working
directory; the paths of --out, relative to it, are copied to --out-dir when it has ended; the
environment is exactly the variables of --env and --pass-env, and PATH, HOME and TMPDIR. There is no
network but loopback.

With --git the inputs are the files of a commit of a local repository, as they are in the commit. Nothing
is checked out, written into the repository or run by its configuration. SOURCE_DATE_EPOCH is the
commit's time, unless --env states it.

With --seed the variables CLOISTER_SEED and PYTHONHASHSEED, and where the host permits it all that the
kernel gives as random, come from one number. With -n the command runs several times, and it is said if
the runs were not equal. --manifest writes the record of the first run, whose stable hash is that of every
equal run, and --metrics how long each took (docs/runs.md).

With --action it fetches an action and all its inputs from a server and executes it here, as the server
would; DIGEST is HASH/SIZE, as messages print it. Its outputs are dropped unless --out-dir says where
they go, and no result is recorded. With --shell it first says what the action's command is, and opens
a shell in its place, with the same inputs, environment and working directory.

It exits with the command's own code, of several runs with that of the first that fails; 128+N if signal
N ended it, and 125 if Cloister itself failed; with --action also with 4 if blobs are absent from the
server, and 5 if it cannot be reached.`,
		Example: `  cloister run -- /bin/sh -c 'id; ls -l /'
  cloister run --in src --out app -- gcc -o app main.c
  cloister run --git .@v1.2 --out app -- make app        # the files of a tag; the worktree is not looked at
  cloister run --git . --seed 7 -n 10 --manifest run.txt --metrics run.json -- ./simulate
  cloister run -- /bin/sh -c 'cat /etc/shadow'           # No such file or directory
  cloister run --action 9f2c...e1/142 --shell            # look around where an action failed`,
		RunE: func(cmd *cobra.Command, args []string) error {
			c.args = args
			var more []os.Signal
			if c.shell {
				more = append(more, syscall.SIGQUIT) // the terminal must be given back
			}
			ctx, cancel := interruptible(cmd.Context(), more...)
			defer cancel()
			if err := c.check(cmd); err != nil {
				return err
			}
			code, err := run(ctx, &c)
			var by *interrupted
			var told *exit
			switch {
			case err == nil:
			case errors.As(context.Cause(ctx), &by):
				code = by.exitCode()
			case errors.As(err, &told):
				return told
			default:
				return newExit(exitOurs, err)
			}
			if code != 0 {
				return newExit(code, nil)
			}
			return nil
		},
	}
	f := cmd.Flags()
	c.recipe.register(cmd)
	f.IntVarP(&c.times, "times", "n", 1, "run the command so often, each time with a fresh working directory")
	f.StringVar(&c.manifest, "manifest", "", "write the manifest of the first run to this file")
	f.StringVar(&c.metrics, "metrics", "", "write to this file, as JSON, how long each run took and what it used")
	f.StringVar(&c.outDir, "out-dir", "", "directory that outputs are copied to (default: the current one; of --action none)")
	f.StringVar(&c.action, "action", "", "run this action of a server: HASH/SIZE, or by its history the beginning of that, or ^1 for the previous one")
	f.StringVar(&c.target, "target", "", "what the client says that the action is for: it may choose a rule of the policy")
	f.StringVar(&c.mnemonic, "mnemonic", "", "what the client says of the action's kind: it may choose a rule of the policy")
	f.BoolVar(&c.shell, "shell", false, "open a shell in the action's sandbox in place of its command")
	c.from.register(cmd)
	c.box.register(cmd)
	return cmd
}

// check returns what is wrong with the command line.
func (c *runConfig) check(cmd *cobra.Command) error {
	for _, f := range []struct {
		names  []string
		action bool // belongs to a stored action, and not to a command
	}{{recipeFlags, false}, {append(c.from.who.flags(), "cas", "instance", "shell", "target", "mnemonic"), true}} {
		for _, name := range f.names {
			switch {
			case !cmd.Flags().Changed(name) || f.action == (c.action != ""):
			case f.action:
				return fmt.Errorf("--%s goes with --action, which is not given", name)
			default:
				return fmt.Errorf("--%s does not go with --action: an action states it by itself", name)
			}
		}
	}
	switch {
	case c.action == "" && len(c.args) == 0:
		return errors.New("state a command after --, or a stored action with --action")
	case c.action != "" && len(c.args) > 0:
		return errors.New("--action has a command of its own: state none")
	case c.action != "":
		a, err := c.from.subject(cmd.Context(), c.action)
		if err != nil {
			return fmt.Errorf("--action: %w", err)
		}
		c.digest = a.digest
		if c.target == "" && c.mnemonic == "" { // which may choose a rule of the policy
			c.target, c.mnemonic = a.target, a.mnemonic
		}
	case c.outDir == "":
		c.outDir = "."
	}
	if c.times < 1 || c.times > maxTimes {
		return fmt.Errorf("-n %d: write a number from 1 to %d", c.times, maxTimes)
	}
	if c.shell && (c.times > 1 || c.manifest != "" || c.metrics != "") {
		return errors.New("--shell is one run that a person makes: -n, --manifest and --metrics do not go with it")
	}
	return c.recipe.check()
}

// maxTimes bounds -n, and so what is kept in memory of all runs.
const maxTimes = 10_000

// run carries the command through the same seven verbs as an action of a client, with a store that
// lasts as long as the run. It returns the command's exit code: of several runs that of the first that fails.
func run(ctx context.Context, c *runConfig) (int, error) {
	bench, err := openWorkbench(&c.box)
	if err != nil {
		return 0, err
	}
	m := &metrics{}
	code, err := c.runOn(ctx, bench, m)
	m.Close, err = timed(func() error { return errors.Join(err, bench.close()) })
	if err == nil && c.metrics != "" {
		err = m.write(c.metrics)
	}
	return code, err
}

// runOn runs what c describes so often as it says.
func (c *runConfig) runOn(ctx context.Context, bench *workbench, m *metrics) (code int, err error) {
	var task *worker.Task
	if m.Inputs, err = timed(func() (err error) { task, err = c.prepare(ctx, bench); return err }); err != nil {
		return 0, err
	}
	task.Target, task.Mnemonic, task.Stdout, task.Stderr = c.target, c.mnemonic, os.Stdout, os.Stderr
	task.SkipCacheLookup = true // each of several runs is one
	in, err := bench.store.Instance(task.Instance)
	if err != nil {
		return 0, err
	}
	config := worker.Config{Name: "run"}
	if c.action == "" {
		config.Grace, config.MaxTimeout = time.Second, max(c.timeout, 24*time.Hour)
	}
	if m.Sandbox, err = timed(func() error { return bench.start(ctx, config) }); err != nil {
		return 0, err
	}
	c.seedRandom(bench, task)
	if c.metrics != "" {
		if err := m.describe(ctx, in.Store, task); err != nil {
			return 0, err
		}
	}
	for i := range c.times {
		t := *task
		t.Queued = time.Now()
		out, err := execute(ctx, bench.local, &t, in.Store, c.shell)
		if err != nil {
			return 0, err
		}
		m.add(t.Queued, out)
		if text := remarks(out, task.Action); text != "" {
			fmt.Fprintln(os.Stderr, text)
		}
		if i == 0 {
			if err := c.keep(ctx, in.Store, task.Action.Function(), out); err != nil {
				return 0, err
			}
		}
		if code == 0 {
			if code = int(out.Result.ExitCode); out.Status != worker.OK {
				code = max(code, 1)
			}
		}
	}
	if n := m.StableHashes; n > 1 {
		fmt.Fprintf(os.Stderr, "cloister: the %d runs are not equal: they have %d stable hashes\n", c.times, n)
	}
	return code, nil
}

// prepare puts the action into the store and returns its task.
func (c *runConfig) prepare(ctx context.Context, bench *workbench) (*worker.Task, error) {
	if c.action == "" {
		return c.put(ctx, bench)
	}
	size, err := diskBytes(bench.dir)
	if err != nil {
		return nil, err
	}
	task := &worker.Task{Action: c.digest}
	task.Instance, err = fetch(ctx, bench.store, size/5, &c.from, c.digest)
	return task, c.from.explain(err, exitOurs)
}

// seedRandom lets the kernel's randomness, too, come from the seed of the task, and addresses in memory be the same in each
// run; it says if it cannot.
func (c *runConfig) seedRandom(bench *workbench, task *worker.Task) {
	if task.Seed == nil {
		return
	}
	can := func(name sandbox.Condition) bool { return slices.Contains(bench.local.Features.Conditions, name) }
	held := sandbox.Conditions{FixedLayout: can(sandbox.ConditionFixedLayout)}
	if can(sandbox.ConditionRandomSeed) {
		held.RandomSeed = *task.Seed + 1 // zero is the kernel's own randomness, and a seed may be zero
	} else {
		fmt.Fprintln(os.Stderr, "cloister: the kernel's randomness cannot be seeded here: the seed is in CLOISTER_SEED and PYTHONHASHSEED alone")
	}
	task.Variation = &worker.Variation{Conditions: held}
}

// execute carries the task to its outcome, with a shell in place of its command if that is wished.
func execute(ctx context.Context, local *worker.Local, task *worker.Task, store cas.Store, shell bool) (*worker.Outcome, error) {
	if shell {
		command, err := commandOf(ctx, store, task.Action)
		if err != nil {
			return nil, err
		}
		fmt.Fprintf(os.Stderr, "cloister: a shell in place of this command of action %s:\n%s\n", task.Action, quoteScript(command.Arguments))
		t, err := openTerminal(os.Stdin, os.Stdout)
		if err != nil {
			return nil, err
		}
		defer t.close()
		task.Terminal, task.Args = t.run, []string{"/bin/sh", "-i"}
	}
	return local.Execute(ctx, task, func(worker.Stage) {})
}

// remarks returns what a person wants to be told of an outcome. That a command failed is not among it, which
// its exit code says.
func remarks(out *worker.Outcome, action cas.Digest) string {
	end, rest, _ := strings.Cut(out.Message, "\n")
	if out.Status == worker.OK && out.Result.ExitCode <= 128 && strings.HasSuffix(end, ", action "+action.String()) {
		return rest
	}
	return out.Message
}

// keep writes the manifest and the outputs of a run to where the command line says, or says that outputs are dropped.
func (c *runConfig) keep(ctx context.Context, store cas.Store, f cas.Function, out *worker.Outcome) error {
	if c.manifest != "" {
		if err := writeManifest(ctx, store, out, c.manifest); err != nil {
			return fmt.Errorf("--manifest: %w", err)
		}
	}
	r := out.Result
	if c.outDir == "" {
		if n := len(r.OutputFiles) + len(r.OutputDirectories) + len(r.OutputSymlinks); n > 0 {
			fmt.Fprintf(os.Stderr, "cloister: outputs are dropped (%d); --out-dir DIR keeps them\n", n)
		}
		return nil
	}
	if err := os.MkdirAll(c.outDir, 0o755); err != nil {
		return fmt.Errorf("write outputs: %w", err)
	}
	dir, err := os.OpenRoot(c.outDir)
	if err != nil {
		return fmt.Errorf("write outputs: %w", err)
	}
	defer dir.Close()
	if err := tree.Extract(ctx, store, f, r, dir); err != nil {
		return fmt.Errorf("write outputs: %w", err)
	}
	return nil
}

// commandOf reads the command of an action.
func commandOf(ctx context.Context, store cas.Store, digest cas.Digest) (*repb.Command, error) {
	var action repb.Action
	if err := cas.ReadProto(ctx, store, digest, &action); err != nil {
		return nil, err
	}
	d, err := cas.FromProto(digest.Function(), action.CommandDigest)
	if err != nil {
		return nil, err
	}
	var command repb.Command
	return &command, cas.ReadProto(ctx, store, d, &command)
}
