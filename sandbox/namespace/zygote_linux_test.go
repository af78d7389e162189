// SPDX-License-Identifier: Apache-2.0

package namespace_test

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/sandbox/namespace"
	"github.com/cloister-build/cloister/sandbox/sandboxtest"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
)

// backend returns a backend and its features, or skips the test.
func backend(t *testing.T, c namespace.Config) (*namespace.Backend, sandbox.Features) {
	t.Helper()
	b := namespace.New(c)
	t.Cleanup(func() { b.Close() })
	f, err := b.Probe(t.Context())
	if err != nil {
		sandboxtest.Unavailable(t, "namespaces", err)
	}
	return b, f
}

// groups returns the directories of the control groups of this process.
func groups(t *testing.T) []string {
	t.Helper()
	var found []string
	err := filepath.WalkDir("/sys/fs/cgroup", func(p string, d fs.DirEntry, err error) error {
		if err == nil && d.IsDir() && strings.HasPrefix(d.Name(), fmt.Sprintf("cloister.%d.", os.Getpid())) {
			found = append(found, p)
		}
		return nil // other groups come and go
	})
	must.Succeed(t, err)
	return found
}

func TestRunsDieWithTheirZygote(t *testing.T) {
	before := groups(t)
	b, _ := backend(t, namespace.Config{})
	mark := fmt.Sprintf("5%d.5", os.Getpid())
	var ended sync.WaitGroup
	for range 3 {
		ended.Go(func() {
			// No process holds the run's output, and killing this many takes a moment.
			r := sandboxtest.Run{Script: "exec >/dev/null 2>&1; for i in $(seq 60); do setsid sleep " + mark + " & done; exec sleep " + mark}
			expect.That(t, r.Try(t.Context(), t, b) != nil, "a run without its zygote returned %+v", r.Result)
		})
	}
	alive := func() []string { return sandboxtest.Running(t, "sleep\x00"+mark) }
	must.Hold(t, "the runs start", func() bool { return len(alive()) == 3*61 })
	must.Succeed(t, b.KillZygote())
	ended.Wait()
	expect.Slices(t, alive(), nil, "alive after Run returned")
	r := sandboxtest.Run{Script: "exit 3"}
	r.Do(t, b)
	expect.That(t, r.Result.ExitCode == 3, "the next run: got exit code %d, want 3", r.Result.ExitCode)
	expect.Error(t, b.Close(), nil)
	expect.Slices(t, groups(t), before, "control groups were left behind")
}

// TestFortyRunsAtOnce: concurrent runs get a slot each, and later runs reuse the slots.
func TestFortyRunsAtOnce(t *testing.T) {
	t.Parallel()
	const n = 40
	b, _ := backend(t, namespace.Config{})
	for range 2 {
		ctx, cancel := context.WithCancel(t.Context())
		var started, ended sync.WaitGroup
		started.Add(n)
		for range n {
			said := sync.OnceFunc(started.Done)
			ended.Go(func() {
				defer said() // also on failure
				res, err := b.Run(ctx, script("echo started; exec sleep 600"), sandbox.Stdio{Stdout: writer(said)})
				expect.That(t, err == nil && res.Stopped, "got %+v, %v; want a stopped run", res, err)
			})
		}
		started.Wait()
		cancel()
		ended.Wait()
	}
	expect.Equal(t, b.Slots(), n, "slots")
}

// TestSlotsShowNoUser: as root each slot has its own users on the host, and two runs that are in different slots cannot
// tell.
func TestSlotsShowNoUser(t *testing.T) {
	t.Parallel()
	b, f := backend(t, namespace.Config{})
	for _, c := range []sandbox.Conditions{{}, {User: "other", UID: 4711}} {
		if c.UID != 0 && f.Covers(under(sandbox.ConditionUser)) != nil {
			continue
		}
		ctx, cancel := context.WithCancel(t.Context())
		var ended sync.WaitGroup
		var shown [2]string
		for i := range shown {
			s := script("cd /proc/self; cat uid_map gid_map projid_map setgroups; grep -E '^(Uid|Gid|Groups):' status; exec sleep 600")
			s.Conditions = c
			r, w := io.Pipe()
			ended.Go(func() {
				_, err := b.Run(ctx, s, sandbox.Stdio{Stdout: w})
				w.CloseWithError(err)
			})
			lines := bufio.NewScanner(r)
			for lines.Scan() {
				shown[i] += lines.Text() + "\n"
				if strings.HasPrefix(lines.Text(), "Groups:") {
					break
				}
			}
		}
		if n := b.Slots(); n != 2 || !strings.Contains(shown[0], "Groups:") || shown[0] != shown[1] {
			t.Errorf("under %+v a run in one of %d slots reads\n%s\nand one in another\n%s", c, n, shown[0], shown[1])
		}
		cancel()
		ended.Wait()
	}
}

// script returns a spec that runs a shell script with the host's programs and only /tmp writable.
func script(text string) *sandbox.Spec {
	return &sandbox.Spec{
		Args: []string{"/bin/sh", "-c", text}, Dir: "/tmp", Env: []string{"PATH=/usr/bin:/bin"}, Inputs: programs(),
		Temp: []sandbox.Temp{{Target: "/tmp", Bytes: 1 << 20}}, Limits: sandboxtest.Limits(),
	}
}

// A writer calls a function on every write.
type writer func()

func (w writer) Write(p []byte) (int, error) {
	w()
	return len(p), nil
}

// TestNothingAccumulates: hundreds of runs of every kind leave no descriptor or thread behind in worker and zygote.
func TestNothingAccumulates(t *testing.T) {
	b, _ := backend(t, namespace.Config{})
	runs := func(n int) {
		for range n {
			ok := script("true")
			ok.Network = sandbox.Network{Loopback: true, Allow: []sandbox.Endpoint{{Host: "192.0.2.1", Port: 443}}}
			absent := script("true")
			absent.Args = []string{"/no/such/program"}
			invalid := script("true")
			invalid.Inputs[0].Source = "/no/such/directory"
			for _, s := range []*sandbox.Spec{ok, absent, invalid} {
				if _, err := b.Run(t.Context(), s, sandbox.Stdio{}); (err != nil) != (s == invalid) {
					t.Fatal(err)
				}
			}
			r := sandboxtest.Run{Script: "echo x > /build/x"}
			r.Do(t, b)
		}
	}
	count := func(dir string) int {
		entries := must.Get(os.ReadDir(dir))(t)
		return len(entries)
	}
	zygote := fmt.Sprintf("/proc/%d/", b.Zygote())
	places := []string{"/proc/self/fd", "/proc/self/task", zygote + "fd", zygote + "task"}
	runs(5)
	var before []int
	for _, p := range places {
		before = append(before, count(p))
	}
	runs(75)
	for i, p := range places {
		slack := 0
		if strings.HasSuffix(p, "task") {
			slack = 8 // Go starts threads when it likes
		}
		// The zygote closes a run's descriptors a moment after its end.
		if !must.Poll(time.Minute, func() bool { return count(p) <= before[i]+slack }) {
			t.Errorf("%s: %d before 300 runs, %d after", p, before[i], count(p))
		}
	}
}

func TestLimitsThatNobodyCanKeep(t *testing.T) {
	t.Parallel()
	set := func(l sandbox.Limit) *sandboxtest.Run {
		return &sandboxtest.Run{Script: "true", Spec: func(s *sandbox.Spec) {
			s.Limits.OpenFiles, s.Limits.Processes = sandbox.Unlimited, sandbox.Unlimited
			s.Limits.Set(l, 100<<20)
		}}
	}
	grouped := []sandbox.Limit{sandbox.LimitMemory, sandbox.LimitCPU, sandbox.LimitMilliCPUs, sandbox.LimitDiskRate}
	for _, c := range []struct {
		without []namespace.Layer
		lacks   []sandbox.Limit
	}{
		{[]namespace.Layer{namespace.Cgroups}, grouped},
		{[]namespace.Layer{namespace.Cgroups, namespace.Rlimits}, append([]sandbox.Limit{sandbox.LimitProcesses, sandbox.LimitOpenFiles}, grouped...)},
	} {
		b, f := backend(t, namespace.Config{Without: c.without})
		for _, l := range sandbox.AllLimits {
			err := set(l).Try(t.Context(), t, b)
			if lacks := slices.Contains(c.lacks, l); lacks != errors.Is(err, sandbox.ErrUnsupported) || !lacks && err != nil {
				t.Errorf("without %v, the limit of %s: got %v", c.without, l, err)
			}
			expect.That(t, slices.Contains(c.lacks, l) != slices.Contains(f.Limits, l),
				"without %v: got features %v", c.without, f.Limits)
		}
	}
	// Resource limits replace control groups for processes.
	b, _ := backend(t, namespace.Config{Without: []namespace.Layer{namespace.Cgroups}})
	r := sandboxtest.Run{
		Script: `i=0; while [ $i -lt 60 ]; do sleep 60 & i=$((i+1)); done`,
		Spec:   func(s *sandbox.Spec) { s.Limits.Processes = 20 },
	}
	r.Do(t, b)
	expect.That(t, r.Result.ExitCode != 0, "60 processes started despite a limit of 20")
}

// TestUsageMarksWhatWasNotMeasured: without a control group only packets are measured for the whole run, and a run
// whose peak number of processes is below that of an earlier run in its slot has none measured.
func TestUsageMarksWhatWasNotMeasured(t *testing.T) {
	t.Parallel()
	b, _ := backend(t, namespace.Config{Without: []namespace.Layer{namespace.Cgroups}})
	r := sandboxtest.Run{Script: "true"}
	r.Do(t, b)
	want := sandbox.Usage{}.Measured
	want.PacketsRefused = true
	if u := r.Result.Usage; u.Measured != want || u.PeakMemory != 0 || u.PeakProcesses != 0 {
		t.Errorf("without a control group: got %+v, want only the packets measured", u)
	}

	b, f := backend(t, namespace.Config{})
	if !slices.Contains(f.Limits, sandbox.LimitMemory) {
		sandboxtest.Unavailable(t, "limits", "this host has no control groups")
	}
	for i, c := range []struct {
		script   string
		measured bool
	}{{"i=0; while [ $i -lt 40 ]; do sleep 60 & i=$((i+1)); done", true}, {"true", false}} {
		r := sandboxtest.Run{Script: c.script}
		r.Do(t, b)
		if u := r.Result.Usage; u.Measured.PeakProcesses != c.measured || u.PeakProcesses > 0 != c.measured || b.Slots() != 1 {
			t.Errorf("run %d in one of %d slots: got %+v, want the processes measured: %t", i, b.Slots(), u, c.measured)
		}
	}
}

// TestNoSlotIsWithoutItsGroup: without its control group a slot runs nothing, now and later.
func TestNoSlotIsWithoutItsGroup(t *testing.T) {
	b, f := backend(t, namespace.Config{})
	if !slices.Contains(f.Limits, sandbox.LimitMemory) {
		sandboxtest.Unavailable(t, "limits", "this host cannot limit memory")
	}
	inTheWay := groups(t)
	for i, g := range inTheWay {
		inTheWay[i] = filepath.Join(g, "slot1")
		must.Succeed(t, os.Mkdir(inTheWay[i], 0o755))
	}
	limit := func(s *sandbox.Spec) { s.Limits.Memory = 64 << 20 }
	first := sandboxtest.Run{Script: "true", Spec: limit}
	// While its workspace is open the next run gets another slot.
	first.Check = func(testing.TB, *os.Root, string) {
		second := sandboxtest.Run{Script: "exec dd if=/dev/zero of=/dev/shm/x bs=1M count=100", Spec: limit}
		expect.That(t, second.Try(t.Context(), t, b) != nil, "a run was executed without a control group")
		for _, g := range inTheWay {
			must.Succeed(t, os.Remove(g))
		}
		second.Do(t, b)
		expect.That(t, second.Result.Exceeded != nil, "the limit no longer holds: got %+v", second.Result)
	}
	first.Do(t, b)
}

// TestDiskRateReachesTheGroup: the rate of a run limits its control group until the next run.
func TestDiskRateReachesTheGroup(t *testing.T) {
	b, f := backend(t, namespace.Config{})
	if !slices.Contains(f.Limits, sandbox.LimitDiskRate) {
		sandboxtest.Unavailable(t, "disk", "needs an io controller of version 2, as in tests/vm")
	}
	for _, rate := range []int64{12 << 20, sandbox.Unlimited} {
		r := sandboxtest.Run{Script: "true", Spec: func(s *sandbox.Spec) { s.Limits.DiskRate = rate }}
		r.Do(t, b)
		limits := ""
		for _, g := range groups(t) {
			files := must.Get(filepath.Glob(g + "/slot*/io.max"))(t)
			for _, file := range files {
				limits += string(must.Get(os.ReadFile(file))(t))
			}
		}
		expect.That(t, strings.Contains(limits, "rbps=12582912 wbps=12582912") == (rate > 0),
			"rate %d: got limits %q", rate, limits)
	}
}

// TestHiddenDirectory: a run reads blobs of a directory without learning its path, and keeps reading them after they
// are replaced or removed.
func TestHiddenDirectory(t *testing.T) {
	t.Parallel()
	dir, err := filepath.EvalSymlinks(t.TempDir())
	must.Succeed(t, err)
	dir = filepath.Join(dir, "the-store")
	must.Succeed(t, os.Mkdir(dir, 0o755))
	blob := func(name, text string) string {
		p := filepath.Join(dir, name)
		must.Succeed(t, os.WriteFile(p, []byte(text), 0o444))
		return p
	}
	b, f := backend(t, namespace.Config{Hidden: []string{dir}})
	if i := slices.IndexFunc(f.Checks, func(c sandbox.Check) bool { return c.Name == string(namespace.HiddenPaths) }); i < 0 || !f.Checks[i].OK {
		sandboxtest.Unavailable(t, "namespaces", "this host cannot hide paths")
	}
	w, err := b.Workspace(t.Context(), sandbox.Unlimited, sandbox.Unlimited)
	must.Succeed(t, err)
	defer w.Close()
	must.Succeed(t, w.Root().Mkdir("out", 0o777))
	removed, replaced := blob("removed", "one"), blob("replaced", "two")
	s := script(`cat /proc/self/mountinfo /proc/self/mounts; echo ready
while ! test -e /build/go; do sleep 0.02; done
cat /in/removed /in/replaced /proc/self/mountinfo`)
	s.Workspace = w.Name()
	s.Outputs = []sandbox.Output{{Target: "/build", Source: "out"}}
	s.Inputs = append(s.Inputs,
		sandbox.Input{Target: "/in/removed", Content: "x", Source: removed},
		sandbox.Input{Target: "/in/replaced", Content: "x", Source: replaced})
	s.Timeout = time.Minute
	ours, theirs := io.Pipe()
	var said strings.Builder
	var reading sync.WaitGroup
	reading.Go(func() {
		buf, changed := make([]byte, 4096), false
		for {
			n, err := ours.Read(buf)
			said.Write(buf[:n])
			if !changed && strings.Contains(said.String(), "ready\n") {
				changed = true
				blob("new", "other")
				if err := errors.Join(os.Remove(removed), os.Rename(filepath.Join(dir, "new"), replaced), w.Root().WriteFile("out/go", nil, 0o644)); err != nil {
					t.Error(err)
				}
			}
			if err != nil {
				return
			}
		}
	})
	res, err := b.Run(t.Context(), s, sandbox.Stdio{Stdout: theirs})
	theirs.Close()
	reading.Wait()
	must.Be(t, err == nil && res.ExitCode == 0, "got %+v, %v", res, err)
	expect.That(t, strings.Contains(said.String(), "ready\nonetwo"), "the blobs changed:\n%s", &said)
	expect.That(t, strings.Contains(said.String(), " /in/removed ") && !strings.Contains(said.String(), "the-store"),
		"the mount table shows the store or lacks the inputs:\n%s", &said)
}
