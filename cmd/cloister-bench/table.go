// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/cloister-build/cloister/cmd/cloister-bench/internal/load"
	"github.com/cloister-build/cloister/cmd/internal/exit"
	"github.com/cloister-build/cloister/worker"
	"github.com/spf13/cobra"
)

func benchTableCommand() *cobra.Command {
	var c benchExec
	var brief bool
	cmd := &cobra.Command{
		Use:   "table [--executor [NAME=]ADDRESS] [--against NAME=ADDRESS]...",
		Short: "Execute actions of all kinds and compare with targets",
		Long: `Table runs noop, tree and outputs in order and prints their reports. At the end it compares the measurements with the
project's bars, which are ratios to the machine itself in the same run. A missed bar is not an error. The exit code is
1 if a result is wrong.

Without --executor it starts cloister serve on a new store and a free port, and ends it afterwards.`,
		Example: `  cloister-bench table
  cloister-bench table --executor cloister=127.0.0.1:8980 --against other=127.0.0.1:9092`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			c.load.Works = tableWorks()
			if err := c.check(); err != nil {
				return err
			}
			report, err := c.measureTable(cmd.Context(), cmd.ErrOrStderr())
			if err != nil {
				return err
			}
			out := cmd.OutOrStdout()
			if !brief {
				if err := report.Text(out); err != nil {
					return err
				}
				fmt.Fprintln(out)
			}
			fmt.Fprintf(out, "medians of %d rounds, %d processors, salt %s\n", c.load.Rounds, report.Processors, c.load.Salt)
			return printTable(out, report)
		},
	}
	f := cmd.Flags()
	c.peers.register(f, "")
	c.register(f, 5)
	f.StringVar(&c.cloister, "cloister", "", "program to start as server without --executor (default: beside cloister-bench, else in PATH)")
	f.BoolVar(&brief, "brief", false, "print only the final table")
	return cmd
}

// measureTable measures, with a server of its own if none is named.
func (c *benchExec) measureTable(ctx context.Context, info io.Writer) (report *load.ExecReport, err error) {
	if c.peers.executor != "" {
		return c.measure(ctx, info)
	}
	dir, err := os.MkdirTemp(c.load.Dir, "cloister-bench-")
	if err != nil {
		return nil, exit.New(exit.Environment, err)
	}
	defer os.RemoveAll(dir) // plain files of ours: what a server mounts is in namespaces of its own
	stop, err := c.startServer(ctx, dir, info)
	if err != nil {
		return nil, exit.New(exit.Environment, err)
	}
	report, err = c.measure(ctx, info)
	if stopErr := stop(); err == nil && stopErr != nil {
		err = exit.New(exit.Environment, fmt.Errorf("end cloister serve: %w", stopErr))
	}
	return report, err
}

// table is the measured works and their bars.
var table = []struct {
	kind              load.Kind
	actions, parallel int
	read              bool
	bars              []bar
}{
	{load.Noop, 200, 1, false, []bar{ofSpawn(0.40)}},
	{load.Noop, 400, 8, false, []bar{ofSpawn(0.30), addedCPU(2)}},
	{load.Trees, 100, 2, false, []bar{ofSpawn(400.0 / 3000), firstMore(30)}},
	{load.Trees, 50, 2, true, []bar{timesBare(1.15)}},
	{load.Outputs, 60, 2, false, []bar{ofSpawn(150.0 / 3000)}},
}

// tableWorks returns the works of the table.
func tableWorks() []load.Work {
	works := make([]load.Work, len(table))
	for i, row := range table {
		works[i] = defaultWork(row.kind)
		works[i].Actions, works[i].Parallel, works[i].Tree.Read = row.actions, row.parallel, row.read
	}
	return works
}

// A bar is a target for servers.
type bar struct {
	text  string
	judge func(m *load.WorkReport, s *load.ExecResult) verdict
}

// A verdict is a row of the table: the measurements of a server and of the machine, their ratio, and whether it meets
// the bar.
type verdict struct{ measured, local, ratio, met string }

func met(ok bool) string {
	if ok {
		return "yes"
	}
	return "NO"
}

// ofSpawn requires a minimum fraction of the rate at which processes start.
func ofSpawn(least float64) bar {
	return bar{fmt.Sprintf("rate >= %.3f of fork+exec", least), func(m *load.WorkReport, s *load.ExecResult) verdict {
		return verdict{
			fmt.Sprintf("%.0f /s", s.Rate), fmt.Sprintf("%.0f /s, %d at a time", m.Local.Spawn, m.Local.Parallel),
			fmt.Sprintf("%.3f", s.OfSpawn), met(s.OfSpawn >= least),
		}
	}}
}

// timesBare limits the time of an action to a multiple of that of the bare command.
func timesBare(most float64) bar {
	return bar{fmt.Sprintf("p50 <= %.2f of bare command", most), func(m *load.WorkReport, s *load.ExecResult) verdict {
		return verdict{
			fmt.Sprintf("%.2f ms", s.P50), fmt.Sprintf("%.2f ms, %d at a time", m.Local.P50, m.Local.Parallel),
			fmt.Sprintf("%.2f", s.Times), met(s.Times <= most),
		}
	}}
}

// firstMore limits, in milliseconds, the extra time of the first action on a tree.
func firstMore(most float64) bar {
	return bar{fmt.Sprintf("first <= next + %.0f ms", most), func(_ *load.WorkReport, s *load.ExecResult) verdict {
		return verdict{
			fmt.Sprintf("%.2f ms", s.First), fmt.Sprintf("next %.2f ms", s.Next),
			fmt.Sprintf("%+.2f ms", s.More), met(s.More <= most),
		}
	}}
}

// addedCPU limits, in milliseconds, the CPU time of an action beyond that of the bare command.
func addedCPU(most float64) bar {
	return bar{fmt.Sprintf("CPU <= bare command + %.0f ms", most), func(m *load.WorkReport, s *load.ExecResult) verdict {
		if !s.Watched {
			return verdict{"not watched", "", "", "-"}
		}
		more := s.AllCPU - m.Local.CPU
		return verdict{
			fmt.Sprintf("%.2f ms", s.AllCPU), fmt.Sprintf("%.2f ms", m.Local.CPU),
			fmt.Sprintf("%+.2f ms", more), met(more <= most),
		}
	}}
}

// mostMemory is the memory bar of a server, in bytes: 150 MiB, and its announced cache.
const mostMemory = 150<<20 + worker.DefaultCacheBytes

// printTable prints the measurements of each server beside the bars.
func printTable(out io.Writer, r *load.ExecReport) error {
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	for i, server := range r.Works[0].Servers {
		fmt.Fprintf(w, "%s\tbar\tmeasured\tlocal\tratio\tmet\n", server.Name)
		row := func(work, bar string, v verdict) {
			fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%s\t%s\n", work, bar, v.measured, v.local, v.ratio, v.met)
		}
		peak := int64(0)
		var others []float64
		for n := range r.Works {
			m := &r.Works[n]
			peak = max(peak, m.Servers[i].PeakRSS)
			others = append(others, m.Servers[i].Others...)
			work := fmt.Sprintf("%s, %d in flight", m.Kind, m.Parallel)
			if m.Tree.Read {
				work = fmt.Sprintf("%s, read, %d in flight", m.Kind, m.Parallel)
			}
			for _, b := range table[n].bars {
				row(work, b.text, b.judge(m, &m.Servers[i]))
			}
		}
		if server.Watched {
			row("all of it", fmt.Sprintf("memory <= %d MiB at peak", mostMemory>>20), verdict{
				fmt.Sprintf("%d MiB", peak>>20), "", fmt.Sprintf("%.2f", float64(peak)/mostMemory), met(peak <= mostMemory),
			})
		}
		if len(others) > 0 {
			note := fmt.Sprintf("%.1f to %.1f processors", slices.Min(others), slices.Max(others))
			row("all of it", "others busy", verdict{measured: note})
		}
	}
	return w.Flush()
}

// findProgram returns the path of cloister: that of --cloister, else beside this program, else in PATH.
func (c *benchExec) findProgram() (string, error) {
	if c.cloister != "" {
		return c.cloister, nil
	}
	if self, err := os.Executable(); err == nil {
		beside := filepath.Join(filepath.Dir(self), "cloister")
		if _, err := os.Stat(beside); err == nil {
			return beside, nil
		}
	}
	program, err := exec.LookPath("cloister")
	if err != nil {
		return "", fmt.Errorf("%w; pass --cloister or --executor", err)
	}
	return program, nil
}

// startServer starts cloister serve with a new store in dir, and makes it the measured server. The caller calls stop,
// which returns when it has ended.
func (c *benchExec) startServer(ctx context.Context, dir string, info io.Writer) (stop func() error, err error) {
	program, err := c.findProgram()
	if err != nil {
		return nil, err
	}
	cmd := exec.CommandContext(ctx, program, "serve", "--dir", filepath.Join(dir, "store"), "--listen", "127.0.0.1:0")
	cmd.Stderr = info
	cmd.Cancel = func() error { return cmd.Process.Signal(os.Interrupt) }
	cmd.WaitDelay = 30 * time.Second
	printed, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	end := func() error {
		_, err := io.Copy(io.Discard, printed)
		return errors.Join(err, cmd.Wait())
	}
	// It prints its address when it is ready, and continues to print a status.
	lines := bufio.NewScanner(printed)
	for lines.Scan() {
		_, rest, ok := strings.Cut(lines.Text(), "--remote_executor=grpc://")
		if !ok {
			continue
		}
		pidfile := filepath.Join(dir, "pid")
		if err := os.WriteFile(pidfile, []byte(strconv.Itoa(cmd.Process.Pid)), 0o600); err != nil {
			return nil, errors.Join(err, cmd.Process.Kill(), end())
		}
		c.peers.executor = "cloister=" + strings.Fields(rest)[0]
		c.peers.watch = append(c.peers.watch, "cloister="+pidfile)
		ended := make(chan error, 1)
		go func() { ended <- end() }()
		return func() error {
			err := cmd.Process.Signal(os.Interrupt)
			return errors.Join(err, <-ended)
		}, nil
	}
	return nil, fmt.Errorf("cloister serve has ended: %w", end())
}
