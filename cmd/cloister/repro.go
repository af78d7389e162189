// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"

	"github.com/cloister-build/cloister/cmd/cloister/internal/comparison"
	"github.com/cloister-build/cloister/cmd/cloister/internal/interrupt"
	"github.com/cloister-build/cloister/cmd/cloister/internal/render"
	"github.com/cloister-build/cloister/cmd/cloister/internal/reproduction"
	"github.com/cloister-build/cloister/cmd/internal/exit"
	"github.com/cloister-build/cloister/worker/repro"
	"github.com/spf13/cobra"
)

func reproCommand() *cobra.Command {
	var c reproduction.Config
	cmd := &cobra.Command{
		Use: "repro ACTION... [-n RUNS] [--vary FACTORS] [--bisect] [--on EXECUTORS] [--report FILE]\n" +
			"  cloister repro [--in DIR] [--image IMAGE] [--out PATH]... [--env K=V]... -- COMMAND [ARG]...\n" +
			"  cloister repro --invocation ID | --failed | --target LABEL | --mnemonic NAME",
		Short: "Check whether an action is reproducible, and why not",
		Long: `Repro runs an action several times and compares outputs, exit codes, stdout and stderr. The first run is plain; others
vary factors that no output should depend on. It reports differences with likely causes and fixes, and records nothing.

ACTION is a digest or, if the server keeps a history, its first 8 digits, ^1 for the latest, or a target. Factors:
` + repro.Join(repro.AllFactors) + `.

The exit code is 0 if all runs are the same, 1 if they differ, 5 if a server is down, and 2 if they prove nothing.`,
		Example: `  cloister repro ^1                                     # the action that was executed last
  cloister repro --invocation ^1 -n 5 --vary time,path --report out.html
  cloister repro --out lib.a --in obj --bisect -- ar crU lib.a a.o b.o
  cloister repro //app:lib --on local,grpc://other.example.com:8980`,
		RunE: func(cmd *cobra.Command, args []string) error {
			c.Names, c.Verbose, c.Progress = args, verbose(cmd), unlessQuiet(cmd, cmd.ErrOrStderr())
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
				return exit.Compared(err)
			}
			if c.Fails(report) {
				return exit.New(exit.No, nil)
			}
			return nil
		},
	}
	f := cmd.Flags()
	f.StringVar(&c.Which.Invocation, "invocation", "", "all actions of this build in the server's history")
	f.StringVar(&c.Which.Target, "target", "", "all actions of this target, //pkg/... or PREFIX* in the server's history")
	f.StringVar(&c.Which.Mnemonic, "mnemonic", "", "all actions of this kind in the server's history")
	f.BoolVar(&c.Which.Failed, "failed", false, "all failed actions in the server's history")
	f.IntVarP(&c.Runs, "runs", "n", repro.DefaultRuns, "number of runs to compare")
	f.StringVar(&c.Vary, "vary", "all", "comma-separated factors to vary: all, none or names")
	f.StringSliceVar(&c.On, "on", []string{"local"}, "executors to alternate between: local, remote (--server) or addresses")
	f.BoolVar(&c.Bisect, "bisect", false, "search for the factors that cause a difference, by further runs")
	f.BoolVar(&c.TryFixes, "verify-fixes", true, "try fixes that change variables, arguments or scripts, in two runs each")
	f.StringSliceVar(&c.FailOn, "fail-on", nil, "comma-separated causes that fail the check (default any)")
	f.StringVar(&c.Report, "report", "", "file for a report: .html, .md or .json")
	f.StringVar(&c.KeepIn, "keep", "", "directory for the outputs of each run, in run1, run2 and so on")
	f.BoolVar(&c.AllowFailure, "allow-failure", false, "accept runs that all fail in the same way, and outputs of --out that no run produces")
	render.JSONFlag(f, &c.JSON, "print a JSON list", repro.Report{})
	f.BoolVar(&c.Diffoscope, "diffoscope", false, comparison.DiffoscopeHelp)
	c.ActionFlags.Register(cmd)
	c.RegisterImage(cmd)
	c.From.Register(cmd)
	c.Sandbox.Register(cmd)
	c.Sandbox.RegisterImages(cmd)
	c.Attest.Register(cmd)
	c.From.Complete(cmd)
	return cmd
}
