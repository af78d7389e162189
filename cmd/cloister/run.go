// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"os"
	"syscall"

	"github.com/cloister-build/cloister/cmd/cloister/internal/interrupt"
	"github.com/cloister-build/cloister/cmd/cloister/internal/localrun"
	"github.com/cloister-build/cloister/cmd/internal/exit"
	"github.com/spf13/cobra"
)

func runCommand() *cobra.Command {
	var c localrun.Config
	cmd := &cobra.Command{
		Use: "run [-it] [--in DIR | --git DIR@REVISION] [--image IMAGE] [--out PATH]... [--env K=V]... -- COMMAND [ARG]...\n" +
			"  cloister run --action DIGEST [--server URL] [--instance NAME] [--shell] [--out-dir DIR]",
		Short: "Run a command or a stored action in the sandbox",
		Long: `Run executes a command as an action. The files of --in or --git are its read-only inputs in the working directory; the
paths of --out are copied to --out-dir afterwards. Its environment has PATH, HOME, TMPDIR and what --env, --pass-env and
--seed set; its network has loopback and --allow. A piped stdin is passed on, except with -n, --manifest or --metrics.

The exit code is that of the command, or of the first run that fails; 1 if an output of --out is missing; 4 if
violations make it fail; 128+N after signal N; 125 if Cloister failed. --action runs a stored action here and drops its
outputs unless --out-dir is set; the exit code is also 4 if the server lacks blobs, and 5 if it cannot be reached.`,
		Example: `  cloister run --in src --out app --memory 2GiB --summary -- gcc -o app main.c
  cloister run --git .@v1.2 --seed 7 -n 10 --manifest run.txt -- ./simulate   # the files of a tag, not of the worktree
  cloister run -it --image docker.io/library/gcc:14 --in . -- bash   # a shell in the sandbox, in a container image
  cloister run --action 9f2c...e1/142 --shell            # look around where an action failed`,
		RunE: func(cmd *cobra.Command, args []string) error {
			c.Args, c.Notes = args, unlessQuiet(cmd, cmd.ErrOrStderr())
			var more []os.Signal
			if c.Shell || c.TTY {
				more = append(more, syscall.SIGQUIT) // the terminal must be given back
			}
			ctx, cancel := interrupt.Context(cmd.Context(), more...)
			defer cancel()
			interrupt.IgnoreBrokenPipe()
			if err := c.Check(cmd); err != nil {
				return err
			}
			code, err := localrun.Run(ctx, &c)
			var by *interrupt.Error
			var exitErr *exit.Error
			switch {
			case err == nil:
			case errors.As(context.Cause(ctx), &by):
				code = by.ExitCode()
			case errors.As(err, &exitErr):
				return exitErr
			default:
				return exit.New(exit.Internal, err)
			}
			if code != 0 {
				return exit.New(code, nil)
			}
			return nil
		},
	}
	f := cmd.Flags()
	c.ActionFlags.Register(cmd)
	c.RegisterRoot(cmd)
	c.RegisterImage(cmd)
	c.RegisterLimits(cmd)
	c.RegisterOnViolation(cmd)
	f.IntVarP(&c.Runs, "runs", "n", 1, "number of runs, each with a fresh working directory")
	f.StringVar(&c.Manifest, "manifest", "", "file for the manifest of the first run")
	f.StringVar(&c.Metrics, "metrics", "", "JSON file for the times and the resource usage of the runs")
	f.BoolVar(&c.Summary, "summary", false, "print time, peak memory, disk use and violations at the end, on stderr")
	f.StringVar(&c.OutDir, "out-dir", "", "directory for outputs (default: the current one, with --action none)")
	f.StringVar(&c.ActionName, "action", "", "stored action to run: a digest, its first 8 digits, ^1 for the latest, or a target")
	f.StringVar(&c.Target, "target", "", "target label for the rules of the policy")
	f.StringVar(&c.Mnemonic, "mnemonic", "", "action mnemonic for the rules of the policy")
	f.BoolVarP(&c.Interactive, "interactive", "i", false, "pass on stdin even if it is a terminal")
	f.BoolVarP(&c.TTY, "tty", "t", false, "run the command on a terminal of its own, connected to this one")
	f.BoolVar(&c.Shell, "shell", false, "open a shell in the action's sandbox instead of running its command")
	c.From.Register(cmd)
	c.Sandbox.Register(cmd)
	c.Sandbox.RegisterImages(cmd)
	c.From.Complete(cmd)
	return cmd
}
