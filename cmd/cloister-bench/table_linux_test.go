// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/cloister-build/cloister/cmd/cloister-bench/internal/load"
	"github.com/cloister-build/cloister/cmd/cloister-bench/internal/soak"
	"github.com/cloister-build/cloister/sandbox/namespace"
	"github.com/cloister-build/cloister/sandbox/sandboxtest"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
)

// programDir contains the compiled cloister.
var programDir string

func TestMain(m *testing.M) {
	namespace.Init()
	os.Exit(runTests(m))
}

func runTests(m *testing.M) int {
	var err error
	if programDir, err = os.MkdirTemp("", "cloister-bench-test-"); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer os.RemoveAll(programDir) // contains only the program
	return m.Run()
}

var build = sync.OnceValue(func() error {
	// go run caches the linked program, which tests of other packages use as well.
	out, err := exec.Command("go", "run", "-ldflags=-s -w", "-exec=cp",
		"github.com/cloister-build/cloister/cmd/cloister", filepath.Join(programDir, "cloister")).CombinedOutput()
	if err != nil {
		return fmt.Errorf("%w\n%s", err, out)
	}
	return nil
})

// program returns the path of cloister. It skips the test if this machine does not support the sandbox.
func program(t *testing.T) string {
	t.Helper()
	b := namespace.New(namespace.Config{})
	defer b.Close()
	if _, err := b.Probe(t.Context()); err != nil {
		sandboxtest.Unavailable(t, "namespaces", err)
	}
	must.Succeed(t, build())
	return filepath.Join(programDir, "cloister")
}

// scratch makes a new temporary directory that of the process.
func scratch(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	t.Setenv("TMPDIR", dir)
	return dir
}

// TestTableMeasuresOwnServer executes a few actions in the sandbox.
func TestTableMeasuresOwnServer(t *testing.T) {
	c := execBench{cloister: program(t), load: load.ExecConfig{Rounds: 1, LocalTime: time.Millisecond}}
	dir := scratch(t)
	for _, w := range tableWorkloads() {
		w.Actions = 2
		w.Tree.Files, w.Tree.Dirs = w.Tree.Files/50, w.Tree.Dirs/50
		c.load.Workloads = append(c.load.Workloads, w)
	}
	must.Succeed(t, c.check())
	report := must.Get(c.measureTable(t.Context(), io.Discard))(t)
	var out strings.Builder
	must.Succeed(t, printTable(&out, report))
	if lines := strings.Count(out.String(), "\n"); lines != 11 || strings.Contains(out.String(), "not watched") {
		t.Errorf("got %d lines, want 11 with the server watched:\n%s", lines, out.String())
	}
	// On a busy machine a short command may end before the worker sees its start: its execution takes 0 ms then.
	if s := report.Workloads[1].Servers[0]; s.PeakRSS == 0 || s.Phases[0][0] <= 0 || s.Phases[2][0] < 0 || s.Phases[4][0] <= 0 {
		t.Errorf("got %+v, want positive measurements", s)
	}
	expect.Equal(t, len(must.Get(os.ReadDir(dir))(t)), 0)
}

func TestOwnServerEnds(t *testing.T) {
	program := program(t)
	for name, end := range map[string]func(stop func() error, cancel func()) error{
		"stopped":   func(stop func() error, _ func()) error { return stop() },
		"cancelled": func(stop func() error, cancel func()) error { cancel(); _ = stop(); return nil },
	} {
		t.Run(name, func(t *testing.T) {
			c := execBench{cloister: program}
			dir := t.TempDir()
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			stop := must.Get(c.startServer(ctx, dir, io.Discard))(t)
			out, code := command(t, "noop", "--executor", c.servers.executor, "--watch", c.servers.watch[0],
				"--actions", "3", "-c", "2", "--rounds", "2", "--local-time", "1ms")
			const want = "medians of 2 rounds of 3 actions\nnoop, 2 in flight\n"
			expect.That(t, code == 0 && strings.Contains(out, want) && strings.Contains(out, " cloister\n"),
				"got exit code %d and\n%s\nwant 0 and %q", code, out, want)
			pid := must.Get(readPID(filepath.Join(dir, "pid")))(t)
			must.Succeed(t, end(stop, cancel))
			expect.That(t, syscall.Kill(pid, 0) != nil, "the server (process %d) is still running", pid)
		})
	}
}

func TestServerThatDoesNotStart(t *testing.T) {
	dir := t.TempDir()
	must.Succeed(t, os.WriteFile(filepath.Join(dir, "store"), nil, 0o600))
	c := execBench{cloister: program(t)}
	expect.Message(t, expect.Err(c.startServer(t.Context(), dir, io.Discard)), "cloister serve ended")
}

// TestTargets checks that a target is met at its value and missed beyond it.
func TestTargets(t *testing.T) {
	one := []float64{1}
	m := &load.WorkloadReport{Local: load.LocalResult{Spawns: one, P50s: one, CPUs: one}}
	ratio := func(v float64) load.ExecResult {
		return load.ExecResult{Rates: []float64{v}, P50s: []float64{v}, Took: []float64{v}, Firsts: []float64{v + 1}, Nexts: one}
	}
	watched := func(v float64) load.ExecResult { return load.ExecResult{Watched: true, AllCPUs: []float64{v}} }
	for _, c := range []struct {
		target target
		s      load.ExecResult
		want   string
	}{
		{minSpawnRatio(0.4), ratio(0.4), "yes"},
		{minSpawnRatio(0.4), ratio(0.39), "NO"},
		{maxLocalRatio(1.15), ratio(1.15), "yes"},
		{maxLocalRatio(1.15), ratio(1.16), "NO"},
		{maxFirstExtra(30), ratio(30), "yes"},
		{maxFirstExtra(30), ratio(30.5), "NO"},
		{maxExtraCPU(2), watched(3), "yes"},
		{maxExtraCPU(2), watched(3.1), "NO"},
		{maxExtraCPU(2), load.ExecResult{}, "-"},
	} {
		if v := c.target.check(m, &c.s); v.met != c.want {
			t.Errorf("%s: got %+v, want %s", c.target.text, v, c.want)
		}
	}
}

// TestSoakMeasuresOwnServer runs one round of load and checks that nothing is left.
func TestSoakMeasuresOwnServer(t *testing.T) {
	c := soakBench{cloister: program(t), duration: time.Nanosecond}
	dir := scratch(t)
	var out, info strings.Builder
	if err := c.run(t.Context(), &out, &info); err != nil {
		t.Fatalf("%v\n%s%s", err, &out, &info)
	}
	for _, m := range soak.Bounds(soakStore) {
		expect.Text(t, out.String(), m.Name, "the table")
	}
	expect.Equal(t, len(must.Get(os.ReadDir(dir))(t)), 0)
}
