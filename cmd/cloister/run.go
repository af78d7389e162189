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
			c.Args = args
			var more []os.Signal
			if c.Shell {
				more = append(more, syscall.SIGQUIT) // the terminal must be given back
			}
			ctx, cancel := interrupt.Cleanup(cmd.Context(), more...)
			defer cancel()
			if err := c.Check(cmd); err != nil {
				return err
			}
			code, err := localrun.Run(ctx, &c)
			var by *interrupt.Error
			var told *exit.Error
			switch {
			case err == nil:
			case errors.As(context.Cause(ctx), &by):
				code = by.ExitCode()
			case errors.As(err, &told):
				return told
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
	f.IntVarP(&c.Times, "times", "n", 1, "run the command so often, each time with a fresh working directory")
	f.StringVar(&c.Manifest, "manifest", "", "write the manifest of the first run to this file")
	f.StringVar(&c.Metrics, "metrics", "", "write to this file, as JSON, how long each run took and what it used")
	f.StringVar(&c.OutDir, "out-dir", "", "directory that outputs are copied to (default: the current one; of --action none)")
	f.StringVar(&c.ActionName, "action", "", "run this action of a server: HASH/SIZE, or by its history the beginning of that, or ^1 for the previous one")
	f.StringVar(&c.Target, "target", "", "what the client says that the action is for: it may choose a rule of the policy")
	f.StringVar(&c.Mnemonic, "mnemonic", "", "what the client says of the action's kind: it may choose a rule of the policy")
	f.BoolVar(&c.Shell, "shell", false, "open a shell in the action's sandbox in place of its command")
	c.From.Register(cmd)
	c.Sandbox.Register(cmd)
	return cmd
}
