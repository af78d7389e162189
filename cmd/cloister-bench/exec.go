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

// benchExec is the flags of a benchmark of actions.
type benchExec struct {
	load     load.ExecConfig
	work     load.Work
	peers    peers
	platform []string
	json     string
	cloister string // program for the table
}

// execTexts are the help texts of each kind.
var execTexts = map[load.Kind]struct{ short, long string }{
	load.Noop: {
		"Execute actions that do nothing",
		`Noop has servers execute actions without inputs and outputs whose command does nothing.`,
	},
	load.Trees: {
		"Execute actions with many input files",
		`Tree has servers execute actions with an input tree, of which each changes a few files. The command does
nothing, or with --read prints a checksum of all files. Before the clock starts two actions are executed
alone: the first has a tree that the server has not seen; "next" differs from it as all others do.`,
	},
	load.Outputs: {
		"Execute actions with many output files",
		`Outputs has servers execute actions that write files of 1 KiB, others in each action, and a directory of
such files.`,
	},
	load.Mixed: {
		"Execute actions of all kinds",
		`Mixed has servers execute actions of which three in five do nothing, one reads an input tree, and one
writes files.`,
	},
}

func benchExecCommand(kind load.Kind) *cobra.Command {
	c := benchExec{work: defaultWork(kind)}
	name := string(kind)
	cmd := &cobra.Command{
		Use:   name + " --executor [NAME=]ADDRESS [--against NAME=ADDRESS]...",
		Short: execTexts[kind].short,
		Long: execTexts[kind].long + `

No two actions are equal, and none is looked up in the action cache. Everything they need is uploaded
before the clock starts. Exit codes, what was printed, and the digests of all outputs are compared with
what they must be, and outputs must be in the store: it exits with 1 if one is wrong.

Servers and the machine itself take turns, round by round. The column "bare" is the machine: the same
commands, started one by one without a server and without a sandbox, as many at a time as are in flight,
but not more than there are processors. "fork+exec" is what it takes to start --program and to wait for
it. Phases are medians of what the servers say. With --watch the table shows the CPU time for an action:
of the server's processes alone, and with their ended descendants. "Others
busy" is how many processors were busy meanwhile with neither this program nor a watched server.`,
		Example: "  cloister-bench " + name + " --executor 127.0.0.1:8980 -c 8\n" +
			"  cloister-bench " + name + " --executor cloister=127.0.0.1:8980 --against other=127.0.0.1:9092/main --watch other=other.pid",
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			c.load.Works = []load.Work{c.work}
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
	f.IntVarP(&c.work.Actions, "actions", "n", c.work.Actions, "actions per round")
	f.IntVarP(&c.work.Parallel, "concurrency", "c", c.work.Parallel, "actions in flight")
	c.peers.register(f, defaultAddress)
	c.register(f, 3)
	w := &c.work
	if kind != load.Outputs {
		f.StringVar(&w.Program, "program", w.Program, "program that does nothing, here and on the server")
	}
	if kind == load.Trees || kind == load.Mixed {
		f.IntVar(&w.Tree.Dirs, "dirs", w.Tree.Dirs, "directories of the input tree")
		f.IntVar(&w.Tree.Changed, "changed", w.Tree.Changed, "files of the input tree that differ in each action")
		f.Var(&sizes{&w.Tree}, "size", "size of an input file, 4KiB, or from and to, 1KiB..8KiB")
	}
	switch kind {
	case load.Trees:
		f.IntVar(&w.Tree.Files, "files", w.Tree.Files, "files of the input tree")
		f.BoolVar(&w.Tree.Read, "read", w.Tree.Read, "read all files of the tree")
	case load.Mixed:
		f.IntVar(&w.Tree.Files, "files", w.Tree.Files, "files of the input tree")
	case load.Outputs:
		f.IntVar(&w.Files, "files", w.Files, "output files")
		f.IntVar(&w.Inner, "in-directory", w.Inner, "files of the output directory; 0: there is none")
	}
	return cmd
}

// register adds the flags that all kinds share, except those of servers; rounds is the default of one.
func (c *benchExec) register(f *pflag.FlagSet, rounds int) {
	c.peers.registerStores(f)
	f.StringArrayVar(&c.platform, "platform", nil, "platform property of every action, KEY=VALUE; repeatable")
	f.IntVar(&c.load.Rounds, "rounds", rounds, "number of rounds, each with different actions")
	registerLocal(f, &c.load, &c.json)
}

// registerLocal adds the flags that do not concern servers.
func registerLocal(f *pflag.FlagSet, c *load.ExecConfig, json *string) {
	f.DurationVar(&c.LocalTime, "local-time", 600*time.Millisecond, "time for each measurement of the machine itself")
	f.StringVar(&c.Salt, "salt", "", "seed of actions and inputs (default: random)")
	f.StringVar(&c.Dir, "dir", "", "working directory for the machine itself (default: that of temporary files)")
	f.StringVar(json, "json", "", "JSON file for all measurements")
}

// defaultWork returns the default work of a kind.
func defaultWork(kind load.Kind) load.Work {
	w := load.Work{Kind: kind, Program: "/bin/true", Actions: 100, Parallel: 2}
	tree := load.Tree{Files: 2000, Dirs: 100, Changed: 10, Smallest: 1 << 10, Largest: 8 << 10}
	switch kind {
	case load.Noop:
		w.Actions, w.Parallel = 300, 1
	case load.Trees:
		w.Tree = tree
	case load.Outputs:
		w.Files, w.Inner = 100, 20
	case load.Mixed:
		w.Tree, w.Files, w.Inner = tree, 100, 20
		w.Tree.Files, w.Tree.Dirs, w.Tree.Read = 200, 10, true
	}
	return w
}

// sizes is a flag with a range of input file sizes.
type sizes struct{ tree *load.Tree }

func (s *sizes) Set(text string) error {
	from, to, ok := strings.Cut(text, "..")
	if !ok {
		to = from
	}
	if err := (*flags.Bytes)(&s.tree.Smallest).Set(from); err != nil {
		return errors.New("write 4KiB or 1KiB..8KiB")
	}
	if err := (*flags.Bytes)(&s.tree.Largest).Set(to); err != nil {
		return errors.New("write 4KiB or 1KiB..8KiB")
	}
	return nil
}

func (s *sizes) String() string {
	if s.tree == nil {
		return ""
	}
	return (*flags.Bytes)(&s.tree.Smallest).String() + ".." + (*flags.Bytes)(&s.tree.Largest).String()
}

func (*sizes) Type() string { return "size" }

// check validates the flags and completes the configuration of the load.
func (c *benchExec) check() error {
	if c.load.Rounds < 1 || c.load.LocalTime <= 0 {
		return errors.New("--rounds takes a number from 1, and --local-time a positive time")
	}
	for i := range c.load.Works {
		if err := c.load.Works[i].Check(); err != nil {
			return err
		}
	}
	for _, text := range c.platform {
		name, value, err := named("platform", text)
		if err != nil {
			return err
		}
		c.load.Platform = append(c.load.Platform, &repb.Platform_Property{Name: name, Value: value})
	}
	if c.load.Salt == "" {
		c.load.Salt = rand.Text()
	}
	return nil
}

// measure measures, and prints its progress to info.
func (c *benchExec) measure(ctx context.Context, info io.Writer) (*load.ExecReport, error) {
	servers, err := c.peers.dial(ctx)
	for _, s := range servers {
		defer s.Close()
	}
	if err != nil {
		return nil, err
	}
	c.load.Progress = func(round int, w *load.Work) {
		fmt.Fprintf(info, "round %d of %d, %s\n", round, c.load.Rounds, w)
	}
	report, err := load.Execute(ctx, c.load, servers)
	if err != nil {
		return nil, exit.New(exit.No, err)
	}
	return report, writeReport(c.json, report)
}

func benchLocalCommand() *cobra.Command {
	var c load.ExecConfig
	var file string
	tree, outputs := defaultWork(load.Trees), defaultWork(load.Outputs)
	tree.Tree.Read = true
	cmd := &cobra.Command{
		Use:   "local",
		Short: "Measure this machine without a server",
		Long: `Local starts processes, one at a time and as many as there are processors, reads an input tree and writes
outputs with the commands of bench tree --read and bench outputs, and lays the tree out by hard links
and by copies. Files are those of the file system of --dir: a server that lets actions write to memory can
be faster.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if c.Rounds < 1 || c.LocalTime <= 0 {
				return errors.New("--rounds takes a number from 1, and --local-time a positive time")
			}
			for _, w := range []*load.Work{&tree, &outputs} {
				if err := w.Check(); err != nil {
					return err
				}
			}
			if c.Salt == "" {
				c.Salt = rand.Text()
			}
			c.Progress = func(round int, _ *load.Work) { fmt.Fprintf(cmd.ErrOrStderr(), "round %d of %d\n", round, c.Rounds) }
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
	f.IntVar(&tree.Tree.Files, "files", tree.Tree.Files, "files of the tree")
	f.IntVar(&tree.Tree.Dirs, "dirs", tree.Tree.Dirs, "directories of the tree")
	f.Var(&sizes{&tree.Tree}, "size", "size of a file, 4KiB, or from and to, 1KiB..8KiB")
	f.IntVar(&c.Rounds, "rounds", 3, "number of rounds")
	registerLocal(f, &c, &file)
	return cmd
}
