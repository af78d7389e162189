// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cmd/cloister-bench/internal/load"
	"github.com/cloister-build/cloister/cmd/internal/exit"
	"github.com/cloister-build/cloister/cmd/internal/flags"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// execBench is the configuration of a benchmark of actions.
type execBench struct {
	load     load.ExecConfig
	workload load.Workload
	servers  serverFlags
	platform []string
	report   string
	cloister string // program, for table
}

// execHelp describes the kinds of actions.
var execHelp = map[load.Kind]struct{ short, long string }{
	load.Noop: {
		"Execute actions that do nothing",
		`Execute actions without inputs and outputs whose command does nothing.`,
	},
	load.Trees: {
		"Execute actions with many input files",
		`Execute actions whose input trees differ in a few files. The command does nothing, or with --read prints a
checksum of all files. Two actions run alone before the clock starts: "first" has a tree new to the
server, and "next" differs from it as all others do.`,
	},
	load.Outputs: {
		"Execute actions with many output files",
		`Execute actions that write unique files of 1 KiB, and a directory of such files.`,
	},
	load.Mixed: {
		"Execute a mix of actions",
		`Execute actions of which three in five do nothing, one reads an input tree, and one writes files.`,
	},
}

func execCommand(kind load.Kind) *cobra.Command {
	c := execBench{workload: defaultWorkload(kind)}
	name, w := string(kind), &c.workload
	cmd := &cobra.Command{
		Use:   name + " --executor [NAME=]ADDRESS [--against NAME=ADDRESS]...",
		Short: execHelp[kind].short,
		Long: execHelp[kind].long + `

All actions differ, none is looked up in the action cache, and their inputs are uploaded before the clock
starts. A wrong exit code, output or digest, or an output missing from the store, exits with 1.

The servers and the bare machine alternate round by round. Column "bare" runs the same commands without
server and sandbox, at most one per processor; "fork+exec" only starts --program. Phases are the medians
that servers report. With --watch the table shows CPU time per action. "Others busy" is the number of
processors used by other processes.`,
		Example: "  cloister-bench " + name + " --executor 127.0.0.1:8980 -c 8\n" +
			"  cloister-bench " + name + " --executor cloister=127.0.0.1:8980 --against other=127.0.0.1:9092/main " +
			"--watch other=other.pid",
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			c.load.Workloads = []load.Workload{c.workload}
			if err := c.check(); err != nil {
				return err
			}
			report, err := c.measure(cmd.Context(), cmd.ErrOrStderr())
			if err != nil {
				return err
			}
			fmt.Fprintf(cmd.OutOrStdout(), "medians of %d rounds, salt %s\n", c.load.Rounds, c.load.Salt)
			return report.Text(cmd.OutOrStdout())
		},
	}
	f := cmd.Flags()
	f.IntVar(&w.Actions, "actions", w.Actions, "number of actions per round")
	f.IntVarP(&w.Parallel, "concurrency", "c", w.Parallel, "number of actions in flight")
	c.servers.register(f, defaultAddress)
	c.register(f, 3)
	if kind == load.Outputs {
		f.IntVar(&w.Files, "files", w.Files, "number of output files")
		f.IntVar(&w.InDirectory, "in-directory", w.InDirectory, "number of files in the output directory; 0 omits it")
	} else {
		f.StringVar(&w.Program, "program", w.Program, "program that does nothing, here and on the server")
	}
	if kind == load.Trees || kind == load.Mixed {
		registerTree(f, &w.Tree)
		f.IntVar(&w.Tree.Changed, "changed", w.Tree.Changed, "number of input files changed per action")
	}
	if kind == load.Trees {
		f.BoolVar(&w.Tree.Read, "read", w.Tree.Read, "read all input files")
	}
	return cmd
}

// register adds the flags common to noop, tree, outputs, mixed and table, apart from serverFlags.register.
func (c *execBench) register(f *pflag.FlagSet, rounds int) {
	c.servers.registerStores(f)
	f.StringArrayVar(&c.platform, "platform", nil, "platform property of every action, KEY=VALUE; repeatable")
	registerLocal(f, &c.load, rounds, &c.report)
}

// registerLocal adds the flags that need no server.
func registerLocal(f *pflag.FlagSet, c *load.ExecConfig, rounds int, report *string) {
	f.IntVar(&c.Rounds, "rounds", rounds, "number of rounds, each with new actions")
	f.DurationVar(&c.LocalTime, "local-time", 600*time.Millisecond, "time per measurement of the bare machine")
	f.StringVar(&c.Salt, "salt", "", "seed of actions and inputs (default: random)")
	f.StringVar(&c.Dir, "dir", "", "scratch directory of the bare machine (default: the temporary directory)")
	f.StringVar(report, "report", "", "file for all measurements, as JSON")
}

// registerTree adds the flags of the input tree's shape.
func registerTree(f *pflag.FlagSet, t *load.Tree) {
	f.IntVar(&t.Files, "files", t.Files, "number of files in the input tree")
	f.IntVar(&t.Dirs, "dirs", t.Dirs, "number of directories in the input tree")
	f.Var(&sizeRange{t}, "size", "size of an input file, such as 4KiB or 1KiB..8KiB")
}

// defaultWorkload returns the workload of a kind unless flags change it.
func defaultWorkload(kind load.Kind) load.Workload {
	w := load.Workload{Kind: kind, Program: "/bin/true", Actions: 100, Parallel: 2}
	tree := load.Tree{Files: 2000, Dirs: 100, Changed: 10, Smallest: 1 << 10, Largest: 8 << 10}
	switch kind {
	case load.Noop:
		w.Actions, w.Parallel = 300, 1
	case load.Trees:
		w.Tree = tree
	case load.Outputs:
		w.Files, w.InDirectory = 100, 20
	case load.Mixed:
		w.Tree, w.Files, w.InDirectory = tree, 100, 20
		w.Tree.Files, w.Tree.Dirs, w.Tree.Read = 200, 10, true
	}
	return w
}

// sizeRange is a flag of the smallest and largest size of input files.
type sizeRange struct{ tree *load.Tree }

func (s *sizeRange) Set(text string) error {
	from, to, ok := strings.Cut(text, "..")
	if !ok {
		to = from
	}
	if (*flags.Bytes)(&s.tree.Smallest).Set(from) != nil || (*flags.Bytes)(&s.tree.Largest).Set(to) != nil {
		return errors.New("write 4KiB or 1KiB..8KiB")
	}
	return nil
}

func (s *sizeRange) String() string {
	if s.tree == nil {
		return ""
	}
	return (*flags.Bytes)(&s.tree.Smallest).String() + ".." + (*flags.Bytes)(&s.tree.Largest).String()
}

func (*sizeRange) Type() string { return "size" }

// check checks the flags and completes the load.
func (c *execBench) check() error {
	for _, text := range c.platform {
		name, value, err := cutName("platform", text)
		if err != nil {
			return err
		}
		c.load.Platform = append(c.load.Platform, &repb.Platform_Property{Name: name, Value: value})
	}
	return checkLoad(&c.load, c.load.Workloads)
}

// checkLoad checks flags and workloads, and sets a random salt unless there is one.
func checkLoad(c *load.ExecConfig, workloads []load.Workload) error {
	if c.Rounds < 1 || c.LocalTime <= 0 {
		return errors.New("--rounds must be at least 1, and --local-time positive")
	}
	for _, w := range workloads {
		if err := w.Check(); err != nil {
			return err
		}
	}
	if c.Salt == "" {
		c.Salt = rand.Text()
	}
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
	return report, writeReport(c.report, report)
}

func localCommand() *cobra.Command {
	var c load.ExecConfig
	var file string
	tree, outputs := defaultWorkload(load.Trees), defaultWorkload(load.Outputs)
	tree.Tree.Read = true
	cmd := &cobra.Command{
		Use:   "local",
		Short: "Measure this machine without a server",
		Long: `Start processes, one at a time and one per processor, read an input tree and write outputs with the
commands of tree --read and outputs, and materialize the tree by hard links and by copies. Files are in
the file system of --dir: a server whose actions write to memory can be faster.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := checkLoad(&c, []load.Workload{tree, outputs}); err != nil {
				return err
			}
			c.Progress = func(round int, _ *load.Workload) {
				fmt.Fprintf(cmd.ErrOrStderr(), "round %d of %d\n", round, c.Rounds)
			}
			report, err := load.RunLocal(cmd.Context(), c, &tree, &outputs)
			if err != nil {
				return exit.New(exit.Environment, err)
			}
			if err := writeReport(file, report); err != nil {
				return err
			}
			return report.Text(cmd.OutOrStdout())
		},
	}
	f := cmd.Flags()
	f.StringVar(&tree.Program, "program", tree.Program, "program that does nothing")
	registerTree(f, &tree.Tree)
	registerLocal(f, &c, 3, &file)
	return cmd
}
