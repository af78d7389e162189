// SPDX-License-Identifier: Apache-2.0

package sandboxtest

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/tests/must"
)

func processes(t *testing.T, b sandbox.Backend) {
	mark := fmt.Sprintf("3%d.%d", os.Getpid(), time.Now().UnixNano()%1e9)
	r := Run{Script: fmt.Sprintf(`
setsid sleep %[1]s &
(trap '' TERM HUP INT; setsid setsid sleep %[1]s) &
(sleep %[1]s & ) &
sleep 0.1
`, mark)}
	began := time.Now()
	r.Do(t, b)
	if r.Result.ExitCode != 0 {
		t.Fatalf("exit code %d: %s", r.Result.ExitCode, r.Stderr)
	}
	if d := time.Since(began); d > time.Minute {
		t.Errorf("Run waited %v for background processes", d)
	}
	if alive := Running(t, mark); len(alive) > 0 {
		t.Errorf("still alive: %v", alive)
	}
}

// Running returns the processes of this host whose command line contains mark.
func Running(t testing.TB, mark string) []string {
	t.Helper()
	lines, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil || len(lines) == 0 {
		t.Fatalf("cannot list the host's processes: %v", err)
	}
	var found []string
	for _, p := range lines {
		if text, err := os.ReadFile(p); err == nil && bytes.Contains(text, []byte(mark)) {
			found = append(found, fmt.Sprintf("%s: %q", p, text))
		}
	}
	return found
}

func otherRuns(t *testing.T, b sandbox.Backend) {
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var other sync.WaitGroup
	other.Go(func() {
		r := Run{Script: "echo started; sleep 60"}
		_ = r.Try(ctx, t, b) // ended by cancel
	})
	for range 3 {
		own := features(t, b).Kernel != "" // pid 1 is visible in a kernel of the run's own
		if got := shell(t, b, "ls /proc | grep -c '^[0-9]'"); got != "3\n" && got != "2\n" && (!own || got != "4\n") {
			t.Errorf("processes in sight: got %q, want the shell's own pipeline", got)
		}
		run(t, b, Run{Script: "kill -9 -1; true"})
	}
	cancel()
	other.Wait()
}

func stop(t *testing.T, b sandbox.Backend) {
	for _, c := range []struct {
		name, script string
		grace        time.Duration
		stdout       string
	}{
		{"a handler runs", `trap 'echo bye; exit 0' TERM; echo ready; while :; do sleep 0.05;
			done`, time.Minute, "ready\nbye\n"},
		{"one that ignores is killed", `trap '' TERM; echo ready; while :; do sleep 0.05;
			done`, 200 * time.Millisecond, "ready\n"},
		{"without grace at once", `trap 'echo bye' TERM; echo ready; while :; do sleep 0.05; done`, 0, "ready\n"},
	} {
		t.Run(c.name, func(t *testing.T) {
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			r := Run{Script: c.script, Spec: func(s *sandbox.Spec) { s.Grace = c.grace }}
			// The script prints when its trap is set.
			stdout := &signalled{want: "ready\n", then: cancel}
			res := must.Get(r.with(ctx, t, b, stdout))(t)
			if !res.Stopped {
				t.Error("the result is not Stopped")
			}
			if got := stdout.text.String(); got != c.stdout {
				t.Errorf("got output %q, want %q", got, c.stdout)
			}
		})
	}
}

// stopAnytime: a run that is stopped before, while or after its command starts ends at once and does not wait for its
// grace period.
func stopAnytime(t *testing.T, b sandbox.Backend) {
	for i := range 40 {
		ctx, cancel := context.WithTimeout(t.Context(), time.Duration(i)*500*time.Microsecond)
		r := Run{Script: "exec sleep 300", Spec: func(s *sandbox.Spec) { s.Grace = time.Hour }}
		// A run that ends before it begins returns an error.
		if err := r.Try(ctx, t, b); err == nil && !r.Result.Stopped {
			t.Errorf("stopped after %d half milliseconds: got %+v", i, r.Result)
		}
		cancel()
	}
}

// with is Try with another writer for stdout.
func (r *Run) with(ctx context.Context, t *testing.T, b sandbox.Backend, stdout *signalled) (*sandbox.Result, error) {
	w, err := b.Workspace(ctx, sandbox.Unlimited, sandbox.Unlimited)
	if err != nil {
		return nil, err
	}
	defer w.Close()
	spec := &sandbox.Spec{
		Args: []string{"/bin/sh", "-c", r.Script}, Dir: "/tmp", Env: []string{"PATH=/usr/bin:/bin"},
		Inputs: host(t), Temp: []sandbox.Temp{{Target: "/tmp", Bytes: 1 << 20}}, Limits: Limits(),
	}
	r.Spec(spec)
	return perform(ctx, b, spec, sandbox.Stdio{Stdout: stdout})
}

// A signalled is a buffer that calls then once it contains want.
type signalled struct {
	text strings.Builder
	want string
	then func()
}

func (s *signalled) Write(p []byte) (int, error) {
	s.text.Write(p)
	if strings.Contains(s.text.String(), s.want) {
		s.then()
	}
	return len(p), nil
}

func timeout(t *testing.T, b sandbox.Backend) {
	r, limit := &Run{}, 1500*time.Millisecond
	for ; r.Stdout == "" && limit < time.Minute; limit *= 6 { // a machine that stalls needs a longer one
		r = run(t, b, Run{Script: "echo begun; sleep 600", Spec: func(s *sandbox.Spec) { s.Timeout = limit }})
		if !r.Result.Stopped || r.Result.End.Sub(r.Result.Start) < limit {
			t.Errorf("with a limit of %v: got %+v", limit, r.Result)
		}
	}
	if r.Stdout != "begun\n" {
		t.Errorf("got output %q", r.Stdout)
	}
	r = run(t, b, Run{Script: "true", Spec: func(s *sandbox.Spec) { s.Timeout = time.Minute }})
	if r.Result.Stopped {
		t.Error("a run that ended in time was stopped")
	}
}

func pidOne(t *testing.T, b sandbox.Backend) {
	r := run(t, b,
		Run{Script: `for s in TERM QUIT ABRT INT HUP SEGV USR1 STOP KILL; do kill -$s 1 2>/dev/null; done
			sleep 0.1; echo alive; exit 7`})
	if r.Result.ExitCode != 7 || r.Stdout != "alive\n" || r.Stderr != "" {
		t.Errorf("got exit code %d, stdout %q, stderr %q", r.Result.ExitCode, r.Stdout, r.Stderr)
	}
}

func many(t *testing.T, b sandbox.Backend) {
	var all sync.WaitGroup
	for i := range 8 {
		all.Go(func() {
			for j := range 5 {
				r := Run{Script: fmt.Sprintf("echo %d > /tmp/mine; cat /tmp/mine; exit %d", i, j)}
				if err := r.Try(t.Context(), t, b); err != nil {
					t.Errorf("run %d of %d: %v", j, i, err)
					return
				}
				if r.Stdout != fmt.Sprintln(i) || r.Result.ExitCode != j {
					t.Errorf("run %d of %d: got %q, exit code %d", j, i, r.Stdout, r.Result.ExitCode)
				}
			}
		})
	}
	all.Wait()
}
