// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/disk"
	"github.com/cloister-build/cloister/cas/tree"
	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/worker"
	"github.com/spf13/cobra"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/types/known/durationpb"
)

// runConfig is what the flags of run say.
type runConfig struct {
	in      string
	out     []string
	env     []string
	timeout time.Duration
	args    []string
	outDir  string

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
		Use: "run [--in DIR] [--out PATH]... [--env K=V]... [--timeout D] [--out-dir DIR] -- COMMAND [ARG]...\n" +
			"  cloister run --action DIGEST [--cas URL] [--instance NAME] [--shell] [--out-dir DIR]",
		Short: "Runs one command, or a stored action, in the sandbox, without a server",
		Long: `Run executes one command as an action: the files of --in are its inputs, read-only, in the working
directory; the paths of --out, relative to it, are copied to --out-dir when it has ended; the
environment is exactly the variables of --env, and PATH, HOME and TMPDIR. There is no network but
loopback.

With --action it fetches an action and all its inputs from a server and executes it here, as the server
would; DIGEST is HASH/SIZE, as messages print it. Its outputs are dropped unless --out-dir says where
they go, and no result is recorded. With --shell it first says what the action's command is, and opens
a shell in its place, with the same inputs, environment and working directory.

It exits with the command's own code, 128+N if signal N ended it, and 125 if Cloister itself failed;
with --action also with 4 if blobs are absent from the server, and 5 if it cannot be reached.`,
		Example: `  cloister run -- /bin/sh -c 'id; ls -l /'
  cloister run --in src --out app -- gcc -o app main.c
  cloister run -- /bin/sh -c 'cat /etc/shadow'        # No such file or directory
  cloister run --action 9f2c...e1/142 --shell         # look around where an action failed`,
		RunE: func(cmd *cobra.Command, args []string) error {
			c.args = args
			ctx, cancel := context.WithCancelCause(cmd.Context())
			defer cancel(nil)
			signals := make(chan os.Signal, 1)
			signal.Notify(signals, os.Interrupt, syscall.SIGTERM, syscall.SIGHUP)
			if c.shell {
				signal.Notify(signals, syscall.SIGQUIT) // the terminal must be given back
			}
			go func() { cancel(&interrupted{<-signals}) }()
			// A reader that went away is an error like any other: it must not leave our files behind.
			signal.Ignore(syscall.SIGPIPE)
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
				return &exit{exitOurs, err}
			}
			if code != 0 {
				return &exit{code: code}
			}
			return nil
		},
	}
	f := cmd.Flags()
	f.StringVar(&c.in, "in", "", "directory of inputs (default: none)")
	f.StringArrayVar(&c.out, "out", nil, "path of an output, relative to the working directory; repeatable")
	f.StringArrayVar(&c.env, "env", nil, "environment variable, KEY=VALUE; repeatable")
	f.DurationVar(&c.timeout, "timeout", 0, "kill the command after this time (default: 24h)")
	f.StringVar(&c.outDir, "out-dir", "", "directory that outputs are copied to (default: the current one; of --action none)")
	f.StringVar(&c.action, "action", "", "run this action of a server: HASH/SIZE, or by its history the beginning of that, or ^1 for the previous one")
	f.StringVar(&c.target, "target", "", "what the client says that the action is for: it may choose a rule of the policy")
	f.StringVar(&c.mnemonic, "mnemonic", "", "what the client says of the action's kind, likewise")
	f.BoolVar(&c.shell, "shell", false, "open a shell in the action's sandbox in place of its command")
	c.from.register(cmd)
	c.box.register(cmd)
	return cmd
}

// interrupted is why a context ended: a signal that this process was sent.
type interrupted struct{ signal os.Signal }

func (i *interrupted) Error() string { return fmt.Sprintf("interrupted by %v", i.signal) }

// exitCode is what a shell would report.
func (i *interrupted) exitCode() int {
	if s, ok := i.signal.(syscall.Signal); ok {
		return 128 + int(s)
	}
	return exitOurs
}

// check returns what is wrong with the command line.
func (c *runConfig) check(cmd *cobra.Command) error {
	for _, f := range []struct {
		names  []string
		action bool // belongs to a stored action, and not to a command
	}{{[]string{"in", "out", "env", "timeout"}, false}, {append(c.from.who.flags(), "cas", "instance", "shell", "target", "mnemonic"), true}} {
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
	for _, kv := range c.env {
		if k, _, ok := strings.Cut(kv, "="); !ok || k == "" {
			return fmt.Errorf("--env %q: write it as KEY=VALUE", kv)
		}
	}
	for _, p := range c.out {
		if !filepath.IsLocal(p) {
			return fmt.Errorf("--out %q: write a path below the working directory", p)
		}
	}
	if c.timeout < 0 {
		return fmt.Errorf("--timeout %v: write a positive time", c.timeout)
	}
	return nil
}

// run carries the command through the same seven verbs as an action of a client, with a store that
// lasts as long as the run. It returns the command's exit code.
func run(ctx context.Context, c *runConfig) (int, error) {
	bench, err := openWorkbench(&c.box)
	if err != nil {
		return 0, err
	}
	defer bench.close()
	task := &worker.Task{Action: c.digest, Target: c.target, Mnemonic: c.mnemonic, Queued: time.Now(), Stdout: os.Stdout, Stderr: os.Stderr}
	config := worker.Config{Name: "run"}
	if c.action == "" {
		config.Grace, config.MaxTimeout = time.Second, max(c.timeout, 24*time.Hour)
		task.Action, err = ingest(ctx, bench.store, c)
	} else {
		var size int64
		if size, err = diskBytes(bench.dir); err != nil {
			return 0, err
		}
		task.Instance, err = fetch(ctx, bench.store, size/5, c)
		err = c.from.explain(err, exitOurs)
	}
	if err != nil {
		return 0, err
	}
	in, err := bench.store.Instance(task.Instance)
	if err != nil {
		return 0, err
	}
	if err := bench.start(ctx, config); err != nil {
		return 0, err
	}
	out, err := execute(ctx, bench.local, task, in.Store, c.shell)
	if err != nil {
		return 0, err
	}
	if text := remarks(out, task.Action); text != "" {
		fmt.Fprintln(os.Stderr, text)
	}
	if err := c.keep(ctx, in.Store, task.Action.Function(), out.Result); err != nil {
		return 0, fmt.Errorf("write outputs: %w", err)
	}
	if out.Code != codes.OK {
		return max(int(out.Result.ExitCode), 1), nil
	}
	return int(out.Result.ExitCode), nil
}

// execute carries the task to its outcome, with a shell in place of its command if that is wished.
func execute(ctx context.Context, local *worker.Local, task *worker.Task, store cas.Store, shell bool) (*worker.Outcome, error) {
	if shell {
		command, err := commandOf(ctx, store, task.Action)
		if err != nil {
			return nil, err
		}
		fmt.Fprintf(os.Stderr, "cloister: a shell in place of this command of action %s:\n%s\n", task.Action, quoteAll(command.Arguments))
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
	if out.Code == codes.OK && out.Result.ExitCode <= 128 && strings.HasSuffix(end, ", action "+action.String()) {
		return rest
	}
	return out.Message
}

// keep writes the outputs to where the command line says, or says that they are dropped.
func (c *runConfig) keep(ctx context.Context, store cas.Store, f cas.Function, r *repb.ActionResult) error {
	if c.outDir == "" {
		if n := len(r.OutputFiles) + len(r.OutputDirectories) + len(r.OutputSymlinks); n > 0 {
			fmt.Fprintf(os.Stderr, "cloister: outputs are dropped (%d); --out-dir DIR keeps them\n", n)
		}
		return nil
	}
	if err := os.MkdirAll(c.outDir, 0o755); err != nil {
		return err
	}
	dir, err := os.OpenRoot(c.outDir)
	if err != nil {
		return err
	}
	defer dir.Close()
	return tree.Extract(ctx, store, f, r, dir)
}

// How large an input tree may be that is fetched: as large as one that a worker executes.
const (
	maxDirectories = 200_000 // that differ
	maxFiles       = 1_000_000
)

// A budget is how much of a store may still be taken.
type budget struct{ most, taken int64 }

// take takes room for blobs, by the sizes that they state and in the blocks in which a store counts.
func (b *budget) take(ds []cas.Digest) error {
	const block = 4096
	for _, d := range ds {
		size := max(block, (min(d.Size(), math.MaxInt64-block)+block-1)/block*block)
		b.taken += min(size, math.MaxInt64-b.taken)
	}
	if b.taken > b.most {
		return fmt.Errorf("its inputs take %s (%d bytes) or more, and %s (%d bytes) are permitted: a fifth of the disk of the directory for temporary files; "+
			"set TMPDIR to one on a larger disk", sandbox.Bytes(b.taken), b.taken, sandbox.Bytes(b.most), b.most)
	}
	return nil
}

// fetch copies the stored action and all that it refers to into the instance of the same name, and returns
// that name. What takes more than most bytes, or is no message by its size, is refused before it is fetched.
func fetch(ctx context.Context, to *disk.Cache, most int64, c *runConfig) (instance string, err error) {
	from, err := c.from.open(ctx)
	if err != nil {
		return "", err
	}
	defer from.Close()
	in, err := to.Instance(from.Name())
	if err != nil {
		return "", err
	}
	var absent []cas.Digest
	room := budget{most: most}
	// present copies blobs and returns those that are there.
	present := func(ds ...cas.Digest) ([]cas.Digest, error) {
		if err := room.take(ds); err != nil {
			return nil, fmt.Errorf("action %s: %w", c.digest, err)
		}
		lost, err := from.Fetch(ctx, in.Store, ds)
		absent = append(absent, lost...)
		gone := make(map[cas.Digest]bool, len(lost))
		for _, d := range lost {
			gone[d] = true
		}
		return slices.DeleteFunc(ds, func(d cas.Digest) bool { return gone[d] }), err
	}
	// messages copies messages of one kind.
	messages := func(kind string, ds ...cas.Digest) ([]cas.Digest, error) {
		for _, d := range ds {
			if d.Size() > cas.MaxMessage {
				return nil, fmt.Errorf("%s %s is too large: %d bytes, and at most %d are read", kind, d, d.Size(), cas.MaxMessage)
			}
		}
		return present(ds...)
	}
	if _, err := messages("Action", c.digest); err != nil {
		return "", err
	}
	if len(absent) > 0 {
		return "", c.from.absent(c.digest, absent)
	}
	var action repb.Action
	if err := cas.ReadProto(ctx, in.Store, c.digest, &action); err != nil {
		return "", err
	}
	command, err := cas.FromProto(c.digest.Function(), action.CommandDigest)
	if err != nil {
		return "", fmt.Errorf("action %s: command: %w", c.digest, err)
	}
	root, err := cas.FromProto(c.digest.Function(), action.InputRootDigest)
	if err != nil {
		return "", fmt.Errorf("action %s: input root: %w", c.digest, err)
	}
	if _, err := messages("Command", command); err != nil {
		return "", err
	}
	// One level of directories at a time, each of them once; then all files. What is absent is told at the
	// end, all of it.
	var files []cas.Digest
	known, listed := map[cas.Digest]bool{root: true}, map[cas.Digest]bool{}
	for level := []cas.Digest{root}; len(level) > 0; {
		if level, err = messages("Directory", level...); err != nil {
			return "", err
		}
		var next []cas.Digest
		for _, d := range level {
			var dir repb.Directory
			if err := cas.ReadProto(ctx, in.Store, d, &dir); err != nil {
				return "", err
			}
			if files, err = newOf(d.Function(), dir.Files, listed, files); err == nil {
				next, err = newOf(d.Function(), dir.Directories, known, next)
			}
			if err != nil {
				return "", fmt.Errorf("Directory %s: %w", d, err)
			}
			if len(known) > maxDirectories || len(files) > maxFiles {
				return "", fmt.Errorf("action %s: its input tree has %d directories and %d files that differ, or more, and at most %d and %d are permitted",
					c.digest, len(known), len(files), maxDirectories, maxFiles)
			}
		}
		level = next
	}
	lost, err := from.Missing(ctx, files)
	if err != nil {
		return "", err
	}
	if absent = append(absent, lost...); len(absent) == 0 {
		_, err = present(files...)
	}
	if err == nil && len(absent) > 0 {
		err = c.from.absent(c.digest, absent)
	}
	return from.Name(), err
}

// newOf appends to ds those digests of nodes, of the function f, that are not among known, and makes them known.
func newOf[N interface{ GetDigest() *repb.Digest }](f cas.Function, nodes []N, known map[cas.Digest]bool, ds []cas.Digest) ([]cas.Digest, error) {
	for _, n := range nodes {
		d, err := cas.FromProto(f, n.GetDigest())
		if err != nil {
			return nil, err
		}
		if !known[d] {
			known[d] = true
			ds = append(ds, d)
		}
	}
	return ds, nil
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

// ingest puts the action that c describes into the default instance.
func ingest(ctx context.Context, to *disk.Cache, c *runConfig) (cas.Digest, error) {
	in, err := to.Instance("")
	if err != nil {
		return cas.Digest{}, err
	}
	store := in.Store
	cmd := &repb.Command{Arguments: c.args}
	for _, kv := range c.env {
		k, v, _ := strings.Cut(kv, "=")
		cmd.EnvironmentVariables = append(cmd.EnvironmentVariables, &repb.Command_EnvironmentVariable{Name: k, Value: v})
	}
	slices.SortFunc(cmd.EnvironmentVariables, func(a, b *repb.Command_EnvironmentVariable) int { return strings.Compare(a.Name, b.Name) })
	for _, p := range c.out {
		cmd.OutputPaths = append(cmd.OutputPaths, filepath.ToSlash(filepath.Clean(p)))
	}
	slices.Sort(cmd.OutputPaths)

	var root cas.Digest
	if c.in == "" {
		root, err = cas.PutProto(ctx, store, cas.SHA256, &repb.Directory{})
	} else {
		var dir *os.Root
		if dir, err = os.OpenRoot(c.in); err != nil {
			return cas.Digest{}, fmt.Errorf("--in: %w", err)
		}
		root, err = tree.Ingest(ctx, store, cas.SHA256, dir)
		err = errors.Join(err, dir.Close())
	}
	if err != nil {
		return cas.Digest{}, fmt.Errorf("read inputs: %w", err)
	}
	command, err := cas.PutProto(ctx, store, cas.SHA256, cmd)
	if err != nil {
		return cas.Digest{}, err
	}
	action := &repb.Action{CommandDigest: command.Proto(), InputRootDigest: root.Proto(), DoNotCache: true}
	if c.timeout > 0 {
		action.Timeout = durationpb.New(c.timeout)
	}
	return cas.PutProto(ctx, store, cas.SHA256, action)
}
