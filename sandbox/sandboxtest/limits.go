// SPDX-License-Identifier: Apache-2.0

package sandboxtest

import (
	"errors"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/tests/must"
)

const (
	mebibyte   = int64(1 << 20)
	halfSecond = 500 * time.Millisecond
)

// features returns the features of b, which it probes once.
func features(t *testing.T, b sandbox.Backend) *sandbox.Features {
	t.Helper()
	if f, ok := probed.Load(b); ok {
		return f.(*sandbox.Features)
	}
	f := must.Get(b.Probe(t.Context()))(t)
	probed.Store(b, &f)
	return &f
}

var probed sync.Map // *sandbox.Features by sandbox.Backend

// limited sets one limit of a spec.
func limited(l sandbox.Limit, v int64) func(*sandbox.Spec) {
	return func(s *sandbox.Spec) { s.Limits.Set(l, v) }
}

const (
	// fill is a command that writes this many mebibytes to a file in memory; hoard keeps memory in a process.
	fill  = "exec dd if=/dev/zero of=/dev/shm/x bs=1M count="
	hoard = "head -c 300000000 /dev/zero | tail -n 1" // one line, which tail keeps until its end
)

// spend is a loop of processes each of which uses little processor time.
const spend = `while :; do sh -c 'i=0; while [ $i -lt 9000 ]; do i=$((i+1)); done'; done`

func limitsEnforced(t *testing.T, b sandbox.Backend) {
	f := features(t, b)
	for _, c := range []struct {
		name   string
		limit  sandbox.Limit
		value  int64
		run    Run // goes beyond the limit
		code   int // 0 is any but success
		actual string
	}{
		{"memory of files", sandbox.LimitMemory, 64 * mebibyte, Run{Script: fill + "300"}, 137, "64.0 MiB"},
		{"memory of processes", sandbox.LimitMemory, 64 * mebibyte, Run{Script: hoard}, 137, "64.0 MiB"},
		{"time of many processes", sandbox.LimitCPU, int64(halfSecond), Run{Script: spend}, 137, ""},
		{"processes", sandbox.LimitProcesses, 20, Run{Script: `i=0; while [ $i -lt 60 ]; do sleep 60 & i=$((i+1));
			done; true`}, 0, "20"},
		{
			"output bytes", sandbox.LimitOutputBytes, 8 * mebibyte,
			Run{Script: "head -c 20000000 /dev/zero > big", Bytes: 8 * mebibyte},
			0, "8.0 MiB",
		},
		{"output files", sandbox.LimitOutputFiles, 100, Run{Script: `i=0; while [ $i -lt 200 ]; do : > f$i;
			i=$((i+1)); done`, Files: 100}, 0, "100"},
	} {
		t.Run(c.name, func(t *testing.T) {
			c.run.Spec = func(s *sandbox.Spec) {
				s.Limits.Set(c.limit, c.value)
				s.Timeout = 10 * time.Minute // for a limit that does not hold
			}
			if unsupported(t, b, f, c.limit, &c.run) {
				return
			}
			c.run.Do(t, b)
			res := c.run.Result
			if res.Stopped || res.ExitCode == 0 || c.code != 0 && res.ExitCode != c.code {
				t.Errorf("got exit code %d, stopped %v, want %d\n%s", res.ExitCode, res.Stopped, c.code, c.run.Stderr)
			}
			if c.limit == sandbox.LimitProcesses && !countsForks(f) {
				return
			}
			e := res.Exceeded
			if e == nil || e.Kind != sandbox.EventLimit || e.Subject != string(c.limit) || e.Limit != c.limit.Format(c.value) ||
				e.Count < 1 || e.LimitValue != c.value || e.ActualValue < c.value || e.Unit != c.limit.Unit() {
				t.Fatalf("got exceeded %+v, want %s", e, c.limit)
			}
			if c.actual != "" && e.Actual != c.actual {
				t.Errorf("got %q of %q, want %q", e.Actual, e.Limit, c.actual)
			}
			if !slices.Contains(res.Events, *e) {
				t.Errorf("events %v lack %v", res.Events, e)
			}
		})
	}
	t.Run("open files", func(t *testing.T) {
		r := Run{Spec: func(s *sandbox.Spec) {
			s.Args = []string{"/bin/bash", "-c", "for i in {4..60}; do exec {fd}</dev/null || exit 3; echo $fd; done"}
			s.Limits.OpenFiles = 32
		}}
		if unsupported(t, b, f, sandbox.LimitOpenFiles, &r) {
			return
		}
		r.Do(t, b)
		if n := strings.Count(r.Stdout, "\n"); n == 0 || n > 32 || r.Result.ExitCode != 3 {
			t.Errorf("%d files were opened beyond the first, exit code %d: %s", n, r.Result.ExitCode, r.Stderr)
		}
	})
	t.Run("processors", func(t *testing.T) {
		r := Run{Script: spend, Spec: limited(sandbox.LimitMilliCPUs, 100)}
		if unsupported(t, b, f, sandbox.LimitMilliCPUs, &r) {
			return
		}
		r.Spec = func(s *sandbox.Spec) { s.Limits.MilliCPUs, s.Limits.CPU = 100, halfSecond }
		r.Do(t, b)
		// It takes five seconds, or longer on a busy machine.
		if took := r.Result.End.Sub(r.Result.Start); took < 3*time.Second || r.Result.ExitCode != 137 {
			t.Errorf("%v of processor time at a tenth of a processor took %v, exit code %d", halfSecond, took, r.Result.ExitCode)
		}
	})
	t.Run("disk rate", func(t *testing.T) {
		r := Run{Script: "true", Spec: limited(sandbox.LimitDiskRate, mebibyte)}
		if unsupported(t, b, f, sandbox.LimitDiskRate, &r) {
			return
		}
		r.Do(t, b)
		if r.Result.ExitCode != 0 {
			t.Errorf("got exit code %d: %s", r.Result.ExitCode, r.Stderr)
		}
	})
	t.Run("what is within", func(t *testing.T) {
		r := run(t, b, Run{
			Script: `i=0; while [ $i -lt 9 ]; do sleep 60 & mkdir d$i || exit 3; i=$((i+1)); done;
				dd if=/dev/zero of=big bs=1M count=9`,
			Bytes: 16 * mebibyte, Files: 100,
			Spec: func(s *sandbox.Spec) {
				s.Limits = sandbox.Limits{
					Memory: 64 * mebibyte, CPU: time.Minute, Processes: 20, OpenFiles: 32,
					OutputBytes: 16 * mebibyte, OutputFiles: 100, MilliCPUs: 64_000, DiskRate: 1 << 30,
				}
				for _, l := range sandbox.AllLimits {
					if !slices.Contains(f.Limits, l) {
						s.Limits.Set(l, sandbox.Unlimited)
					}
				}
			},
		})
		if r.Result.ExitCode != 0 || r.Result.Exceeded != nil || len(r.Result.Events) > 0 {
			t.Errorf("got %+v\n%s", r.Result, r.Stderr)
		}
	})
}

// unsupported reports whether the backend does not enforce a limit, after checking that it refuses the run.
func unsupported(t *testing.T, b sandbox.Backend, f *sandbox.Features, l sandbox.Limit, r *Run) bool {
	t.Helper()
	if slices.Contains(f.Limits, l) {
		return false
	}
	err := r.Try(t.Context(), t, b)
	if !errors.Is(err, sandbox.ErrUnsupported) || !strings.Contains(err.Error(), string(l)) {
		t.Errorf("got %v, want ErrUnsupported that names the limit of %s", err, l)
	}
	what := "limits"
	if l == sandbox.LimitDiskRate { // which only version 2 enforces
		what = "disk"
	}
	if !t.Failed() {
		Unavailable(t, what, "this host cannot limit "+string(l))
	}
	return true
}

// countsForks reports whether forks that fail at the limit of processes are reported. Without control groups only the
// process itself sees it, and so it is in a kernel of the run's own.
func countsForks(f *sandbox.Features) bool {
	return slices.Contains(f.Limits, sandbox.LimitMemory) && f.Kernel == ""
}

// limitsReset: nothing of one run counts for the next, not even what its workspace still holds.
func limitsReset(t *testing.T, b sandbox.Backend) {
	f := features(t, b)
	first := Run{Script: fill + "300", Spec: limited(sandbox.LimitMemory, 64*mebibyte)}
	if unsupported(t, b, f, sandbox.LimitMemory, &first) {
		return
	}
	var measured *bool // whether the kernel can measure the peak of one run
	next := func(after string) {
		r := run(t, b, Run{Script: fill + "48", Spec: limited(sandbox.LimitMemory, 64*mebibyte)})
		if r.Result.ExitCode != 0 || r.Result.Exceeded != nil || len(r.Result.Events) > 0 {
			t.Errorf("after %s: got %+v", after, r.Result)
		}
		u := &r.Result.Usage
		if measured == nil {
			measured = &u.Measured.PeakMemory
		}
		n := u.PeakMemory
		if u.Measured.PeakMemory != *measured || *measured && (n < 32*mebibyte || n > 64*mebibyte) {
			t.Errorf("after %s: got a peak of %s, with a file of 48 MiB", after, sandbox.Bytes(n))
		}
	}
	next("nothing")
	first.Do(t, b)
	if first.Result.Exceeded == nil {
		t.Fatal("the first run was not killed")
	}
	next("a run that was ended")
	run(t, b, Run{Script: spend, Spec: limited(sandbox.LimitCPU, int64(halfSecond))})
	idle := run(t, b, Run{Script: "true", Spec: limited(sandbox.LimitCPU, int64(halfSecond))})
	if u := idle.Result.Usage; idle.Result.Exceeded != nil || u.User+u.System >= halfSecond {
		t.Errorf("a run that does nothing: got %+v", idle.Result)
	}
	if !countsForks(f) {
		return
	}
	forks := Run{Script: `i=0; while [ $i -lt 60 ]; do sleep 60 & i=$((i+1));
		done`, Spec: limited(sandbox.LimitProcesses, 20)}
	for range 2 { // the peak of processes is the group's, and the second does not exceed it
		forks.Do(t, b)
		if e := forks.Result.Exceeded; e == nil || e.Actual != "20" {
			t.Errorf("too many processes: got %+v", e)
		}
	}
	next("one that met the limit of processes")
	run(t, b, Run{
		Script: "exec dd if=/dev/zero of=/build/x bs=1M count=48",
		Spec:   limited(sandbox.LimitMemory, 64*mebibyte),
		Check:  func(testing.TB, *os.Root, string) { next("one whose outputs are still there") },
	})
}

func usage(t *testing.T, b sandbox.Backend) {
	f := features(t, b)
	if !slices.Contains(f.Limits, sandbox.LimitMemory) || !slices.Contains(f.Limits, sandbox.LimitCPU) {
		Unavailable(t, "limits", "this host cannot measure a whole run")
	}
	if f.Backend == "gvisor" { // a guest measures in its own control groups
		lacks(t, f, "limits", "memory and threads include those of the run's own kernel")
	}
	// The busy process is not waited for.
	r := Run{Script: `
mkfifo wait
(i=0; while [ $i -lt 200000 ]; do i=$((i+1)); done; echo > wait; exec sleep 600) &
i=0; while [ $i -lt 60 ]; do sleep 600 & i=$((i+1)); done
dd if=/dev/zero of=/dev/shm/x bs=1M count=32 2>/dev/null
read x < wait`}
	r.Do(t, b)
	u := r.Result.Usage
	if !u.Measured.CPU || !u.Measured.PeakProcesses || !u.Measured.PacketsRefused {
		t.Errorf("measured: got %+v", u.Measured)
	}
	if u.User+u.System < 50*time.Millisecond {
		t.Errorf("got %v of processor time", u.User+u.System)
	}
	// The shells, 60 times sleep, dd, and what just begins or ends.
	if u.PeakProcesses < 62 || u.PeakProcesses > 72 {
		t.Errorf("got a peak of %d processes, want 62 to 72", u.PeakProcesses)
	}
	if !u.Measured.PeakMemory && !t.Failed() {
		Unavailable(t, "limits", "this host cannot measure the peak of memory")
	}
	if u.PeakMemory < 32*mebibyte {
		t.Errorf("got a peak of %s of memory", sandbox.Bytes(u.PeakMemory))
	}
}
