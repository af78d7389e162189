// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"io"
	"os"
	"slices"
	"text/tabwriter"

	"github.com/cloister-build/cloister/cmd/cloister-bench/internal/load"
	"github.com/cloister-build/cloister/cmd/internal/exit"
	"github.com/spf13/cobra"
)

func tableCommand() *cobra.Command {
	var c execBench
	cmd := &cobra.Command{
		Use:   "table [--executor [NAME=]ADDRESS] [--against NAME=ADDRESS]...",
		Short: "Execute all kinds of actions and compare with the targets",
		Long: `Run noop, tree, outputs and compile in sequence and print their tables. The last table compares the
measurements with the project's targets, which are ratios to the bare machine in the same run. A missed
target is no error; a wrong result exits with 1.

Without --executor it starts cloister serve with a new store on a free port, and stops it at the end.`,
		Example: `  cloister-bench table
  cloister-bench table --executor cloister=127.0.0.1:8980 --against other=127.0.0.1:9092`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			c.load.Workloads = tableWorkloads()
			if err := c.check(); err != nil {
				return err
			}
			report, err := c.measureTable(cmd.Context(), cmd.ErrOrStderr())
			if err != nil {
				return err
			}
			out := cmd.OutOrStdout()
			if err := report.Text(out); err != nil {
				return err
			}
			fmt.Fprintf(out, "\nmedians of %d rounds, %d processors\n", report.Rounds, report.Processors)
			return printTable(out, report)
		},
	}
	c.register(cmd.Flags(), "", 5)
	return cmd
}

// measureTable measures the named servers, or its own server if none is named.
func (c *execBench) measureTable(ctx context.Context, info io.Writer) (*load.ExecReport, error) {
	if c.servers.executor != "" {
		return c.measure(ctx, info)
	}
	dir, err := os.MkdirTemp("", "cloister-bench-")
	if err != nil {
		return nil, exit.New(exit.Environment, err)
	}
	defer os.RemoveAll(dir) // contains plain files; the server mounts only in its own namespaces
	stop, err := c.startServer(ctx, dir, info)
	if err != nil {
		return nil, exit.New(exit.Environment, err)
	}
	report, err := c.measure(ctx, info)
	if stopErr := stop(); err == nil && stopErr != nil {
		err = exit.New(exit.Environment, fmt.Errorf("stop cloister serve: %w", stopErr))
	}
	return report, err
}

// table lists the workloads and their targets.
var table = []struct {
	kind              load.Kind
	actions, parallel int
	read              bool
	targets           []target
}{
	{load.Noop, 200, 1, false, []target{minSpawnRatio(0.40)}},
	{load.Noop, 400, 8, false, []target{minSpawnRatio(0.30), maxExtraCPU(2)}},
	{load.Trees, 100, 2, false, []target{minSpawnRatio(400.0 / 3000), maxFirstExtra(30)}},
	{load.Trees, 50, 2, true, []target{maxLocalRatio(1.15)}},
	{load.Outputs, 60, 2, false, []target{minSpawnRatio(150.0 / 3000)}},
	{load.Compiles, 60, 2, false, []target{maxLocalRatio(1.05)}}, // the last, since a machine may lack its programs
}

// tableWorkloads returns the workloads of table whose programs this machine has.
func tableWorkloads() []load.Workload {
	var workloads []load.Workload
	for _, row := range table {
		w := load.Default(row.kind)
		w.Actions, w.Parallel, w.Tree.Read = row.actions, row.parallel, row.read
		if w.Missing() == "" {
			workloads = append(workloads, w)
		}
	}
	return workloads
}

// A target limits one measurement of a workload.
type target struct {
	text  string
	check func(m *load.WorkloadReport, s *load.ExecResult) verdict
}

// A verdict compares a server with a target: the measurements of the server and of the bare machine, their ratio or
// difference, and whether the target is met.
type verdict struct{ measured, local, ratio, met string }

func met(ok bool) string {
	if ok {
		return "yes"
	}
	return "NO"
}

// minSpawnRatio sets a minimum rate relative to starting processes.
func minSpawnRatio(least float64) target {
	return target{
		fmt.Sprintf("rate >= %.3f of fork+exec", least),
		func(m *load.WorkloadReport, s *load.ExecResult) verdict {
			local := fmt.Sprintf("%.0f /s, %d at a time", m.Local.Spawn(), m.Local.Parallel)
			ratio := s.SpawnRatio(&m.Local)
			return verdict{fmt.Sprintf("%.0f /s", s.Rate()), local, fmt.Sprintf("%.3f", ratio), met(ratio >= least)}
		},
	}
}

// maxLocalRatio sets a maximum median time relative to the bare command.
func maxLocalRatio(most float64) target {
	return target{
		fmt.Sprintf("p50 <= %.2f of bare command", most),
		func(m *load.WorkloadReport, s *load.ExecResult) verdict {
			local := fmt.Sprintf("%.2f ms, %d at a time", m.Local.P50(), m.Local.Parallel)
			ratio := s.P50Ratio(&m.Local)
			return verdict{fmt.Sprintf("%.2f ms", s.P50()), local, fmt.Sprintf("%.2f", ratio), met(ratio <= most)}
		},
	}
}

// maxFirstExtra sets how many milliseconds longer the first action on a tree may take than the next one.
func maxFirstExtra(most float64) target {
	return target{
		fmt.Sprintf("first <= next + %.0f ms", most),
		func(_ *load.WorkloadReport, s *load.ExecResult) verdict {
			first, next, extra := s.FirstExtra()
			return verdict{
				fmt.Sprintf("%.2f ms", first), fmt.Sprintf("next %.2f ms", next),
				fmt.Sprintf("%+.2f ms", extra), met(extra <= most),
			}
		},
	}
}

// maxExtraCPU sets how many milliseconds of CPU time an action may take beyond the bare command.
func maxExtraCPU(most float64) target { //nolint:unparam // a parameter like those of other targets
	return target{
		fmt.Sprintf("CPU <= bare command + %.0f ms", most),
		func(m *load.WorkloadReport, s *load.ExecResult) verdict {
			if !s.Watched {
				return verdict{"not watched", "", "", "-"}
			}
			extra := s.AllCPU() - m.Local.CPU()
			return verdict{
				fmt.Sprintf("%.2f ms", s.AllCPU()), fmt.Sprintf("%.2f ms", m.Local.CPU()),
				fmt.Sprintf("%+.2f ms", extra), met(extra <= most),
			}
		},
	}
}

// maxMemory is the target for a server's memory in bytes: 150 MiB and the input cache, which serve reports at startup.
const maxMemory = (150 + 64) << 20

// printTable prints the measurements of each server and its targets.
func printTable(out io.Writer, r *load.ExecReport) error {
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	row := func(cells ...any) { fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%s\t%s\n", cells...) }
	for i, server := range r.Workloads[0].Servers {
		row(server.Name, "target", "measured", "local", "ratio", "met")
		peak := int64(0)
		var others []float64
		for n := range r.Workloads {
			m := &r.Workloads[n]
			s := &m.Servers[i]
			peak = max(peak, s.PeakRSS)
			others = append(others, s.Others...)
			for _, t := range table[n].targets {
				v := t.check(m, s)
				row(&m.Workload, t.text, v.measured, v.local, v.ratio, v.met)
			}
		}
		for _, skipped := range table[len(r.Workloads):] {
			w := load.Default(skipped.kind)
			row(skipped.kind, skipped.targets[0].text, "not measured: "+w.Missing()+" is missing", "", "", "-")
		}
		if server.Watched {
			row("all", fmt.Sprintf("peak memory <= %d MiB", maxMemory>>20), fmt.Sprintf("%d MiB", peak>>20), "",
				fmt.Sprintf("%.2f", float64(peak)/maxMemory), met(peak <= maxMemory))
		}
		if len(others) > 0 {
			busy := fmt.Sprintf("%.1f to %.1f processors", slices.Min(others), slices.Max(others))
			row("all", "others busy", busy, "", "", "")
		}
	}
	return w.Flush()
}
