// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"time"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cmd/cloister-bench/internal/load"
	"github.com/cloister-build/cloister/cmd/internal/exit"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// execBench is the configuration of a benchmark of actions.
type execBench struct {
	load     load.ExecConfig
	servers  serverFlags
	platform []string
	cloister string // program, for table; "" is the one beside this program, or in PATH
}

// execHelp describes the kinds of actions.
var execHelp = map[load.Kind]struct{ short, long string }{
	load.Noop: {
		"Execute actions that do nothing",
		`Execute actions without inputs and outputs whose command does nothing.`,
	},
	load.Trees: {
		"Execute actions with many input files",
		`Execute actions with 2,000 input files in 100 directories, 10 of which differ between actions. The command
does nothing, or with --read prints a checksum of all files. Two actions run alone before the clock
starts: "first" has a tree new to the server, and "next" differs from it as all others do.`,
	},
	load.Compiles: {
		"Execute actions that compile a small C++ file",
		`Execute actions that start Python, which runs g++, as the rules of Buck2 do. Each compiles a file of its own.`,
	},
	load.Outputs: {
		"Execute actions with many output files",
		`Execute actions that write 100 unique files of 1 KiB, and a directory of 20 such files.`,
	},
}

func execCommand(kind load.Kind) *cobra.Command {
	var c execBench
	w := load.Default(kind)
	cmd := &cobra.Command{
		Use:   string(kind) + " --executor [NAME=]ADDRESS [--against NAME=ADDRESS]...",
		Short: execHelp[kind].short,
		Long: execHelp[kind].long + `

All actions differ, none is looked up in the action cache, and their inputs are uploaded before the clock
starts. A wrong exit code, output or digest, or an output missing from the store, exits with 1.

The servers and the bare machine alternate round by round. Column "bare" runs the same commands without
server and sandbox, at most one per processor; "fork+exec" only starts ` + load.Program + `. Phases are the medians
that servers report. With --watch the table shows CPU time per action. "Others busy" is the number of
processors used by other processes.`,
		Example: "  cloister-bench " + string(kind) + " --executor 127.0.0.1:8980 -c 8",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			c.load.Workloads = []load.Workload{w}
			if err := c.check(); err != nil {
				return err
			}
			report, err := c.measure(cmd.Context(), cmd.ErrOrStderr())
			if err != nil {
				return err
			}
			fmt.Fprintf(cmd.OutOrStdout(), "medians of %d rounds of %d actions\n", c.load.Rounds, w.Actions)
			return report.Text(cmd.OutOrStdout())
		},
	}
	f := cmd.Flags()
	f.IntVar(&w.Actions, "actions", w.Actions, "number of actions per round")
	f.IntVarP(&w.Parallel, "concurrency", "c", w.Parallel, "number of actions in flight")
	c.register(f, defaultAddress, 3)
	if kind == load.Trees {
		f.BoolVar(&w.Tree.Read, "read", false, "read all input files")
	}
	return cmd
}

// register adds the flags common to noop, tree, outputs and table.
func (c *execBench) register(f *pflag.FlagSet, executor string, rounds int) {
	c.servers.register(f, executor)
	c.servers.registerStores(f)
	f.StringArrayVar(&c.platform, "platform", nil, "platform property of every action, KEY=VALUE; repeatable")
	f.IntVar(&c.load.Rounds, "rounds", rounds, "number of rounds, each with new actions")
	f.DurationVar(&c.load.LocalTime, "local-time", 600*time.Millisecond, "time per measurement of the bare machine")
}

// check checks the flags and completes the load.
func (c *execBench) check() error {
	for _, text := range c.platform {
		name, value, err := cutName("platform", text)
		if err != nil {
			return err
		}
		c.load.Platform = append(c.load.Platform, &repb.Platform_Property{Name: name, Value: value})
	}
	if c.load.Rounds < 1 || c.load.LocalTime <= 0 {
		return errors.New("--rounds must be at least 1, and --local-time positive")
	}
	for _, w := range c.load.Workloads {
		if w.Actions < 1 || w.Parallel < 1 {
			return errors.New("--actions and -c must be at least 1")
		}
	}
	c.load.Salt = rand.Text()
	return nil
}

// measure executes the actions, and prints its progress to info.
func (c *execBench) measure(ctx context.Context, info io.Writer) (*load.ExecReport, error) {
	c.load.Settle = c.servers.settle
	servers, err := c.servers.dial(ctx)
	for _, s := range servers {
		defer s.Close()
	}
	if err != nil {
		return nil, err
	}
	c.load.Progress = func(round int, w *load.Workload) {
		fmt.Fprintf(info, "round %d of %d, %s\n", round, c.load.Rounds, w)
	}
	report, err := load.Execute(ctx, c.load, servers)
	if err != nil {
		return nil, exit.New(exit.No, err)
	}
	return report, nil
}
