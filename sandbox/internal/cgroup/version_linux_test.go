// SPDX-License-Identifier: Apache-2.0

package cgroup

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/cloister-build/cloister/sandbox/sandboxtest"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
	"github.com/containerd/cgroups/v3"
	"github.com/containerd/cgroups/v3/cgroup1"
)

// files creates a directory of plain files that stands for a group.
func files(t *testing.T, dir string, text map[string]string) {
	t.Helper()
	must.Succeed(t, os.MkdirAll(dir, 0o700))
	for name, text := range text {
		must.Succeed(t, os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600))
	}
}

func wantFiles(t *testing.T, dir string, text map[string]string) {
	t.Helper()
	for name, want := range text {
		if b, err := os.ReadFile(filepath.Join(dir, name)); err != nil || string(b) != want {
			t.Errorf("%s: got %q, %v, want %q", name, b, err, want)
		}
	}
}

func TestLocateFindsTheGroupOfThisProcess(t *testing.T) {
	for _, c := range []struct{ name, group, shown, want string }{
		{"whole hierarchy", "/user.slice/x.scope", "/user.slice/x.scope", "/user.slice/x.scope"},
		{"container that mounts a part", "/docker/ab/c", "/c", "/c"},
		{"container that mounts its own group", "/docker/ab", "/", "/"},
		{"root", "/", "/", "/"},
		{"blank in a path", "/a b", "/a b", "/a b"},
		{"another part is mounted", "/docker/abc", "", ""},
		{"outside of the cgroup namespace", "/../x", "", ""},
		{"not in this hierarchy", "", "", ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			mount := t.TempDir()
			files(t, mount, map[string]string{"cgroup.procs": "1\n"})
			if c.shown != "" {
				files(t, filepath.Join(mount, c.shown), map[string]string{"cgroup.procs": fmt.Sprintf("1\n%d\n", os.Getpid())})
			}
			got, err := locate(mount, c.group)
			expect.That(t, got == c.want && (err == nil) == (c.want != ""), "got %q, %v, want %q", got, err, c.want)
		})
	}
}

// plainV2 returns a group of version 2 that is a directory of plain files.
func plainV2(t *testing.T) (g *Group, dir string) {
	t.Helper()
	mount := t.TempDir()
	files(t, mount, map[string]string{"cgroup.subtree_control": ""})
	files(t, filepath.Join(mount, "own"), map[string]string{
		"cgroup.controllers": "cpu io memory hugetlb pids\n", "cgroup.subtree_control": "", "cgroup.procs": fmt.Sprintln(os.Getpid()),
	})
	own := must.Get(ownV2(mount, "/own"))(t)
	if got := strings.Join(own.controllers, " "); got != "memory pids io cpu" {
		t.Fatalf("got controllers %q", got)
	}
	h := &Host{mode: V2}
	if err := h.createV2(own); err != nil { // it has no cgroup.type, as a root
		t.Fatal(err)
	}
	wantFiles(t, own.dir, map[string]string{"cgroup.subtree_control": "+memory +pids +io +cpu"})
	files(t, h.dirs["memory"], map[string]string{"cgroup.subtree_control": ""})
	dir = filepath.Join(h.dirs["memory"], "g")
	files(t, dir, map[string]string{
		"memory.max": "", "memory.swap.max": "", "memory.oom.group": "", "memory.peak": "", "pids.max": "", "io.stat": "", "cpu.max": "",
		"memory.events": "low 0\nhigh 0\nmax 7\noom 6\noom_kill 5\noom_group_kill 4\n",
		"pids.peak":     "9\n", "pids.events": "max 2\n",
		"cpu.stat": "usage_usec 1000\nuser_usec 700\nsystem_usec 300\ncore_sched.force_idle_usec 0\n",
	})
	c := must.Get(h.parent.create("g"))(t)
	g = &Group{host: h, name: "g", control: c, dirs: map[string]string{"memory": dir, "pids": dir, "io": dir, "cpu": dir, "cpuacct": dir}}
	must.Succeed(t, g.open())
	return g, dir
}

func TestV2LimitsAndCounters(t *testing.T) {
	g, dir := plainV2(t)
	must.Succeed(t, g.Reset(Limits{Memory: 1 << 20, Processes: 16, MilliCPUs: 1500, DiskRate: Unlimited}))
	wantFiles(t, dir, map[string]string{
		"memory.max": "1048576", "memory.swap.max": "0", "memory.oom.group": "1", "memory.peak": "0", "pids.max": "16",
		"cpu.max": "150000 100000",
	})
	files(t, dir, map[string]string{
		"memory.peak":   "524288\n",
		"memory.events": "low 0\nhigh 0\nmax 9\noom 9\noom_kill 6\noom_group_kill 9\n",
		"pids.peak":     "11\n", "pids.events": "max 5\n",
		"cpu.stat": "usage_usec 3000\nuser_usec 1700\nsystem_usec 1300\n",
		"io.stat":  "8:0 rbytes=4096 wbytes=512 rios=1 wios=1 dbytes=0 dios=0\n253:1 rbytes=1 wbytes=2 rios=1 wios=1\n",
	})
	want := Usage{
		User: time.Millisecond, System: time.Millisecond, PeakMemory: 1 << 19, PeakProcesses: 11,
		ReadBytes: 4097, WrittenBytes: 514, OOMKilled: true, ForksRefused: 3,
	}
	expect.Equal(t, sample(t, g), want)
	must.Succeed(t, g.Reset(noLimits))
	wantFiles(t, dir, map[string]string{"memory.max": "9223372036854775807", "pids.max": "max", "cpu.max": "max 100000"})
	files(t, dir, map[string]string{"memory.peak": "0"})
	expect.Equal(t, sample(t, g), Usage{}, "after Reset")
	files(t, dir, map[string]string{"pids.events": "max many\n"})
	if _, err := g.Sample(); err == nil {
		t.Error("Sample accepted a counter that is not a number")
	}
}

// TestV1LimitsSwap covers kernels that account swap: the limit of memory and swap is raised before that of memory.
func TestV1LimitsSwap(t *testing.T) {
	root := t.TempDir()
	dir := filepath.Join(root, "memory", "g")
	names := []string{"memory.limit_in_bytes", "memory.memsw.limit_in_bytes"}
	files(t, dir, map[string]string{names[0]: "0", names[1]: "0", "tasks": ""})
	c, err := newV1("g", map[cgroup1.Name]string{cgroup1.Memory: "/"}, []cgroup1.Subsystem{cgroup1.NewMemory(root)})
	must.Succeed(t, err)
	g := &Group{host: &Host{mode: V1}, control: c, dirs: map[string]string{"memory": dir}}
	must.Succeed(t, g.open())
	for _, limit := range []int64{2 << 20, 1 << 20, 3 << 20} {
		must.Succeed(t, g.Reset(Limits{limit, Unlimited, Unlimited, Unlimited}))
		want := fmt.Sprint(limit)
		wantFiles(t, dir, map[string]string{names[0]: want, names[1]: want})
	}
}

// eachLimit returns Limits with one of them set to v.
func eachLimit(v int64) []Limits {
	return []Limits{
		{v, Unlimited, Unlimited, Unlimited},
		{Unlimited, v, Unlimited, Unlimited},
		{Unlimited, Unlimited, v, Unlimited},
		{Unlimited, Unlimited, Unlimited, v},
	}
}

func TestLimitWithoutControllerIsUnsupported(t *testing.T) {
	g := &Group{control: v2{}}
	for _, l := range eachLimit(1) {
		expect.Error(t, g.Reset(l), errors.ErrUnsupported, "%+v", l)
	}
}

func TestResetRefusesLimitsThatAreNotPositive(t *testing.T) {
	g, dir := plainV2(t)
	for _, l := range append(eachLimit(0), eachLimit(-2)...) {
		expect.That(t, g.Reset(l) != nil, "%+v: got no error", l)
	}
	wantFiles(t, dir, map[string]string{"memory.max": "", "pids.max": "", "cpu.max": ""})
}

func TestNewRefusesAnExistingDirectory(t *testing.T) {
	dir := t.TempDir()
	files(t, filepath.Join(dir, "g"), nil)
	h := &Host{mode: V2, dirs: map[string]string{"memory": dir}}
	expect.Error(t, expect.Err(h.New("g")), os.ErrExist)
}

// coreV2 returns a version 2 Host without controllers, which hybrid hosts have as well, and the mount point.
func coreV2(t *testing.T) (*Host, string) {
	t.Helper()
	_, group, err := cgroups.ParseCgroupFileUnified("/proc/self/cgroup")
	if err != nil {
		sandboxtest.Unavailable(t, "limits", err)
	}
	mount := unifiedMount
	if cgroups.Mode() == cgroups.Hybrid {
		mount = hybridMount
	}
	own, err := ownV2(mount, group)
	if err != nil {
		sandboxtest.Unavailable(t, "limits", err)
	}
	own.controllers = nil
	h := &Host{mode: V2}
	err = h.create([]place{{own.dir, own.create}}, own.create, func(name string) map[string]string {
		return map[string]string{"cpuacct": filepath.Join(own.dir, name)}
	})
	if err != nil {
		sandboxtest.Unavailable(t, "limits", err)
	}
	closeHost(t, h)
	return h, mount
}

func TestV2RemoveKillsTheProcesses(t *testing.T) {
	h, _ := coreV2(t)
	g := newGroup(t, h, "g")
	cmd := exec.Command("/bin/sleep", "60")
	cmd.SysProcAttr = &syscall.SysProcAttr{}
	must.Succeed(t, inside(t, g, cmd, noLimits, cmd.Start))
	expect.Equal(t, processes(t, g), 1, "processes")
	for u := sample(t, g); u.User+u.System == 0; u = sample(t, g) {
		time.Sleep(time.Millisecond) // counted when the process gives up its processor
	}
	reaped := make(chan error, 1)
	go func() { reaped <- cmd.Wait() }()
	if err := g.Remove(); err != nil {
		t.Error(err)
		_ = cmd.Process.Kill()
	}
	<-reaped
	expect.Equal(t, cmd.ProcessState.Sys().(syscall.WaitStatus).Signal(), syscall.SIGKILL, "signal")
}

// TestV2WorkerMovesToLeaf: the worker makes room for groups with controllers, and stays where it was if it cannot have
// them.
func TestV2WorkerMovesToLeaf(t *testing.T) {
	h, mount := coreV2(t)
	g := newGroup(t, h, "unit")
	dir := g.dirs["cpuacct"]
	group := strings.TrimPrefix(dir, mount)
	settle := func(controllers ...string) (string, error) {
		cmd := self("settle", append([]string{mount, group}, controllers...)...)
		var out []byte
		err := inside(t, g, cmd, noLimits, func() (err error) {
			out, err = cmd.Output()
			return err
		})
		for line := range strings.Lines(string(out)) {
			if path, ok := strings.CutPrefix(line, "0::"); ok {
				return filepath.Base(strings.TrimSpace(path)), err
			}
		}
		return "", err
	}
	if cgroups.Mode() == cgroups.Hybrid { // where version 2 lacks the controller
		if in, err := settle("memory"); in != "unit" || err == nil {
			t.Errorf("without its controller: in %q, %v, want unit and an error", in, err)
		}
		expect.Error(t, expect.Err(os.Stat(filepath.Join(dir, leaf))), os.ErrNotExist, "the leaf was left behind")
	}
	if in, err := settle(); in != leaf || err != nil {
		t.Errorf("got %q, %v, want %q", in, err, leaf)
	}
	expect.Error(t, os.Remove(filepath.Join(dir, leaf)), nil)
}
