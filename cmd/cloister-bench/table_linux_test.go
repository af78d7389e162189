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
	"github.com/cloister-build/cloister/sandbox/namespace"
	"github.com/cloister-build/cloister/sandbox/sandboxtest"
)

// programDir holds cloister while the tests run.
var programDir string

func TestMain(m *testing.M) { os.Exit(runTests(m)) }

func runTests(m *testing.M) int {
	var err error
	if programDir, err = os.MkdirTemp("", "cloister-bench-test-"); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer os.RemoveAll(programDir) // the program and nothing else
	return m.Run()
}

var build = sync.OnceValue(func() error {
	out, err := exec.Command("go", "build", "-o", programDir, "github.com/cloister-build/cloister/cmd/cloister").CombinedOutput()
	if err != nil {
		return fmt.Errorf("%w\n%s", err, out)
	}
	return nil
})

// program returns the path of cloister. It skips the test where cloister cannot confine actions.
func program(t *testing.T) string {
	t.Helper()
	b := namespace.New(namespace.Config{})
	defer b.Close()
	if _, err := b.Probe(t.Context()); err != nil {
		sandboxtest.Unavailable(t, "namespaces", err)
	}
	if err := build(); err != nil {
		t.Fatal(err)
	}
	return filepath.Join(programDir, "cloister")
}

// TestTableStartsServer has the server that table starts execute a few actions in the sandbox.
func TestTableStartsServer(t *testing.T) {
	c := benchExec{cloister: program(t), json: filepath.Join(t.TempDir(), "report.json")}
	c.load = load.ExecConfig{Rounds: 1, LocalTime: time.Millisecond, Dir: t.TempDir()}
	for _, w := range tableWorks() {
		w.Actions = 2
		w.Tree.Files, w.Tree.Dirs = w.Tree.Files/50, w.Tree.Dirs/50
		c.load.Works = append(c.load.Works, w)
	}
	if err := c.check(); err != nil {
		t.Fatal(err)
	}
	report, err := c.measureTable(t.Context(), io.Discard)
	if err != nil {
		t.Fatal(err)
	}
	var out strings.Builder
	if err := printTable(&out, report); err != nil {
		t.Fatal(err)
	}
	// A headline, all bars, the memory, and what disturbed it.
	if lines := strings.Count(out.String(), "\n"); lines != 10 || strings.Contains(out.String(), "not watched") {
		t.Errorf("%d lines\n%s", lines, out.String())
	}
	// On a busy machine a short command has ended when the worker sees that it has begun: Phases.Run is 0 then.
	if s := report.Works[1].Servers[0]; s.PeakRSS == 0 || s.Phases.Queue <= 0 || s.Phases.Run < 0 || s.Phases.Rest <= 0 {
		t.Errorf("measured %+v", s)
	}
	if left, err := os.ReadDir(c.load.Dir); err != nil || len(left) > 0 {
		t.Errorf("%d files stay, %v", len(left), err)
	}
}

// TestOwnServerEnds, however the measurement ends.
func TestOwnServerEnds(t *testing.T) {
	program := program(t)
	for name, end := range map[string]func(stop func() error, cancel func()) error{
		"stopped":   func(stop func() error, _ func()) error { return stop() },
		"cancelled": func(stop func() error, cancel func()) error { cancel(); _ = stop(); return nil },
	} {
		t.Run(name, func(t *testing.T) {
			c := benchExec{cloister: program}
			dir := t.TempDir()
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			stop, err := c.startServer(ctx, dir, io.Discard)
			if err != nil {
				t.Fatal(err)
			}
			out, code := command(t, "noop", "--executor", c.peers.executor, "--watch", c.peers.watch[0], "-n", "3", "-c", "2",
				"--rounds", "2", "--local-time", "1ms", "--salt", "s")
			if code != 0 || !strings.Contains(out, "medians of 2 rounds, salt s\nnoop: /bin/true; 3 actions, 2 in flight\n") || !strings.Contains(out, " cloister ") {
				t.Errorf("exit code %d\n%s", code, out)
			}
			pid, err := readPID(filepath.Join(dir, "pid"))
			if err != nil {
				t.Fatal(err)
			}
			if err := end(stop, cancel); err != nil {
				t.Error(err)
			}
			if err := syscall.Kill(pid, 0); err == nil {
				t.Errorf("the server, process %d, is alive", pid)
			}
		})
	}
}

// TestServerThatDoesNotStart says so, and is not waited for.
func TestServerThatDoesNotStart(t *testing.T) {
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "store"), nil, 0o600); err != nil { // where a directory should be
		t.Fatal(err)
	}
	c := benchExec{cloister: program(t)}
	if _, err := c.startServer(t.Context(), dir, io.Discard); err == nil || !strings.Contains(err.Error(), "has ended") {
		t.Errorf("got %v", err)
	}
}

// TestVerdicts: a bar is met at its value, and missed beyond it.
func TestVerdicts(t *testing.T) {
	m := &load.WorkReport{}
	m.Local.CPU = 1
	for _, c := range []struct {
		bar  bar
		s    load.ExecResult
		want string
	}{
		{ofSpawn(0.4), load.ExecResult{OfSpawn: 0.4}, "yes"},
		{ofSpawn(0.4), load.ExecResult{OfSpawn: 0.39}, "NO"},
		{timesBare(1.15), load.ExecResult{Times: 1.15}, "yes"},
		{timesBare(1.15), load.ExecResult{Times: 1.16}, "NO"},
		{firstMore(30), load.ExecResult{More: 30}, "yes"},
		{firstMore(30), load.ExecResult{More: 30.5}, "NO"},
		{addedCPU(2), load.ExecResult{Watched: true, AllCPU: 3}, "yes"},
		{addedCPU(2), load.ExecResult{Watched: true, AllCPU: 3.1}, "NO"},
		{addedCPU(2), load.ExecResult{}, "-"},
	} {
		if v := c.bar.judge(m, &c.s); v.met != c.want {
			t.Errorf("%s: %+v, want %s", c.bar.text, v, c.want)
		}
	}
}
