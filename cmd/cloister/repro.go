// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"strings"

	"github.com/cloister-build/cloister/cmd/cloister/internal/comparison"
	"github.com/cloister-build/cloister/cmd/cloister/internal/interrupt"
	"github.com/cloister-build/cloister/cmd/cloister/internal/reproduction"
	"github.com/cloister-build/cloister/cmd/internal/exit"
	"github.com/cloister-build/cloister/worker/repro"
	"github.com/spf13/cobra"
)

func reproCommand() *cobra.Command {
	var c reproduction.Config
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
			c.Names = args
			if at := cmd.ArgsLenAtDash(); at >= 0 {
				c.Names, c.Args = args[:at], args[at:]
			}
			if err := c.CheckFlags(cmd); err != nil {
				return err
			}
			ctx, end := interrupt.Context(cmd.Context())
			defer end()
			report, err := c.Run(ctx, cmd.OutOrStdout(), cmd.ErrOrStderr())
			var by *interrupt.Error
			switch {
			case errors.As(context.Cause(ctx), &by):
				return exit.New(by.ExitCode(), errors.New("stopped"))
			case err != nil:
				return exit.New(exit.Trouble, err)
			}
			for _, v := range report {
				if v.Result != repro.Same {
					return exit.New(exit.No, nil)
				}
			}
			return nil
		},
	}
	f := cmd.Flags()
	f.StringVar(&c.Which.Invocation, "invocation", "", "all actions of this build, by the history of the server")
	f.StringVar(&c.Which.Target, "target", "", "all actions of this target, by the history of the server; * at its end stands for all that begin so")
	f.StringVar(&c.Which.Mnemonic, "mnemonic", "", "all actions of this kind, by the history of the server")
	f.BoolVar(&c.Which.Failed, "failed", false, "all actions that failed, by the history of the server")
	f.IntVarP(&c.Runs, "runs", "n", repro.DefaultRuns, "how many runs are compared")
	f.StringVar(&c.Vary, "vary", "all", "what the runs notice otherwise, divided by commas: all, none, or some")
	f.StringSliceVar(&c.On, "on", []string{"local"}, "where it runs, in turns: local, remote (the server of --cas), or addresses of servers")
	f.BoolVar(&c.Bisect, "bisect", false, "if runs differ, find what makes them, by further runs")
	f.StringVar(&c.Report, "report", "", "write what was found to this file: .html, .md or .json")
	f.StringVar(&c.KeepIn, "keep", "", "directory that the outputs of each run are copied to, as run1, run2 and so on")
	f.BoolVar(&c.JSON, "json", false, "print one JSON list")
	f.BoolVar(&c.Diffoscope, "diffoscope", false, comparison.DiffoscopeHelp)
	c.ActionFlags.Register(cmd)
	c.From.Register(cmd)
	c.Sandbox.Register(cmd)
	c.Attest.Register(cmd)
	return cmd
}
