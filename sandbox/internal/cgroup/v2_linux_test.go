// SPDX-License-Identifier: Apache-2.0

package cgroup

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"
)

func TestPlaces(t *testing.T) {
	const hybridMounts = `30 25 0:26 / /sys/fs/cgroup ro - tmpfs tmpfs ro,mode=755
31 30 0:27 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw
32 30 0:28 / /sys/fs/cgroup/systemd rw - cgroup cgroup rw,xattr,name=systemd
33 30 0:29 / /sys/fs/cgroup/cpu,cpuacct rw shared:9 - cgroup cgroup rw,cpu,cpuacct
34 30 0:30 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory
`
	for _, c := range []struct{ name, cgroups, mounts, want string }{
		{"hybrid", "5:name=systemd:/\n4:cpu,cpuacct:/a\n3:memory:/a b\n0::/u\n", hybridMounts,
			"cpu,cpuacct=/sys/fs/cgroup/cpu,cpuacct/a memory=/sys/fs/cgroup/memory/a b =/sys/fs/cgroup/unified/u"},
		{"version 2", "0::/user.slice/x.scope\n", "25 20 0:22 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n",
			"=/sys/fs/cgroup/user.slice/x.scope"},
		{"a container sees a part", "3:memory:/docker/ab/c\n", "34 30 0:30 /docker/ab /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n",
			"memory=/sys/fs/cgroup/memory/c"},
		{"a part that is elsewhere", "3:memory:/docker/abc\n", "34 30 0:30 /docker/ab /m rw - cgroup cgroup rw,memory\n", ""},
		{"outside of the namespace", "0::/../x\n", "25 20 0:22 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n", ""},
		{"a blank in a path", "0::/\n", `25 20 0:22 / /a\040b rw - cgroup2 cgroup2 rw`, "=/a b"},
		{"nothing is mounted", "3:memory:/\n0::/\n", "25 20 0:22 / / rw - ext4 /dev/vda rw\n", ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			var got []string
			for _, p := range places(c.cgroups, c.mounts) {
				got = append(got, strings.Join(p.controllers, ",")+"="+p.dir)
			}
			if strings.Join(got, " ") != c.want {
				t.Errorf("got %q, want %q", got, c.want)
			}
		})
	}
}

// TestVersion2Files reads and writes a group that is a directory of plain files.
func TestVersion2Files(t *testing.T) {
	parent := t.TempDir()
	dir := filepath.Join(parent, "g")
	put := func(name, text string) {
		t.Helper()
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"memory.max", "memory.swap.max", "memory.oom.group", "memory.peak", "pids.max", "cgroup.kill"} {
		put(name, "")
	}
	put("memory.events", "low 0\nhigh 0\nmax 7\noom 6\noom_kill 5\noom_group_kill 4\n")
	put("pids.peak", "9\n")
	put("pids.events", "max 2\n")
	put("cpu.stat", "usage_usec 1000\nuser_usec 700\nsystem_usec 300\ncore_sched.force_idle_usec 0\n")
	put("io.stat", "")
	put("cgroup.procs", "12\n34\n")
	h := &Host{mode: V2, controllers: map[string]string{"memory": parent, "pids": parent, "io": parent, "cpuacct": parent}}
	g := &Group{host: h, name: "g", dirs: []string{dir}}
	if err := g.open(); err != nil {
		t.Fatal(err)
	}
	if err := g.Reset(Limits{Memory: 1 << 20, Processes: 16}); err != nil {
		t.Fatal(err)
	}
	if err := g.Kill(); err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]string{"memory.max": "1048576", "memory.swap.max": "0", "memory.oom.group": "1",
		"memory.peak": "0", "pids.max": "16", "cgroup.kill": "1"} {
		if b, err := os.ReadFile(filepath.Join(dir, name)); err != nil || string(b) != want {
			t.Errorf("%s: %q, %v, want %q", name, b, err, want)
		}
	}
	put("memory.peak", "524288\n")
	put("memory.events", "low 0\nhigh 0\nmax 9\noom 9\noom_kill 6\noom_group_kill 9\n")
	put("pids.peak", "11\n")
	put("pids.events", "max 5\n")
	put("cpu.stat", "usage_usec 3000\nuser_usec 1700\nsystem_usec 1300\n")
	put("io.stat", "8:0 rbytes=4096 wbytes=512 rios=1 wios=1 dbytes=0 dios=0\n253:1 rbytes=1 wbytes=2 rios=1 wios=1\n")
	want := Usage{User: time.Millisecond, System: time.Millisecond, PeakMemory: 1 << 19, PeakProcesses: 11,
		ReadBytes: 4097, WrittenBytes: 514, OOMKills: 1, ForksRefused: 3}
	if u := sample(t, g); u != want {
		t.Errorf("got %+v, want %+v", u, want)
	}
	if n, err := g.Procs(); n != 2 || err != nil {
		t.Errorf("got %d processes, %v, want 2", n, err)
	}
	put("memory.max", "") // plain files keep what is longer than what is written
	put("pids.max", "")
	if err := g.Reset(Limits{Unlimited, Unlimited}); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"memory.max", "pids.max"} {
		if b, err := os.ReadFile(filepath.Join(dir, name)); err != nil || string(b) != "max" {
			t.Errorf("%s: %q, %v, want no limit", name, b, err)
		}
	}
	put("memory.peak", "0")
	if u := sample(t, g); u != (Usage{}) {
		t.Errorf("after Reset: %+v", u)
	}
	put("pids.events", "max many\n")
	if _, err := g.Sample(); err == nil {
		t.Error("a number that is none was read")
	}
}

// TestVersion1LimitsSwap: where the kernel counts swap, what is limited is memory and swap together.
func TestVersion1LimitsSwap(t *testing.T) {
	parent := t.TempDir()
	h := &Host{mode: V1, controllers: map[string]string{"memory": parent}}
	g := &Group{host: h, name: "g", dirs: []string{filepath.Join(parent, "g")}}
	if err := os.Mkdir(g.dirs[0], 0o700); err != nil {
		t.Fatal(err)
	}
	files := []string{"memory.limit_in_bytes", "memory.memsw.limit_in_bytes"}
	for _, name := range append(files, "tasks") {
		if err := os.WriteFile(filepath.Join(g.dirs[0], name), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := g.open(); err != nil {
		t.Fatal(err)
	}
	if err := g.Reset(Limits{1 << 20, Unlimited}); err != nil {
		t.Fatal(err)
	}
	for _, name := range files {
		if b, err := os.ReadFile(filepath.Join(g.dirs[0], name)); err != nil || string(b) != "1048576" {
			t.Errorf("%s: %q, %v", name, b, err)
		}
	}
}

// TestUnkeptLimitIsRefused: a group without the controller of a limit does not take it.
func TestUnkeptLimitIsRefused(t *testing.T) {
	g := &Group{host: &Host{mode: V2}}
	for _, l := range []Limits{{1, Unlimited}, {Unlimited, 1}} {
		if err := g.Reset(l); !errors.Is(err, errors.ErrUnsupported) {
			t.Errorf("%+v: got %v", l, err)
		}
	}
	if err := g.Reset(Limits{Unlimited, Unlimited}); err != nil {
		t.Error(err)
	}
	if err := g.Kill(); !errors.Is(err, errors.ErrUnsupported) {
		t.Errorf("kill: got %v", err)
	}
}

func TestControllersAreEnabled(t *testing.T) {
	dir := t.TempDir()
	for name, text := range map[string]string{"cgroup.controllers": "cpu io memory hugetlb\n", "cgroup.subtree_control": ""} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	cs, err := available(dir, "memory", "pids")
	if err != nil || !slices.Equal(cs, []string{"memory"}) {
		t.Fatalf("got %v, %v", cs, err)
	}
	if err := settle(dir, cs); err != nil { // a root: it has no cgroup.type
		t.Fatal(err)
	}
	if b, err := os.ReadFile(filepath.Join(dir, "cgroup.subtree_control")); string(b) != "+memory" {
		t.Errorf("got %q, %v", b, err)
	}
}

// core returns a host of version 2 without controllers, which a hybrid host has, too.
func core(t *testing.T) *Host {
	t.Helper()
	cgroups, err := os.ReadFile("/proc/self/cgroup")
	if err != nil {
		unavailable(t, err.Error())
	}
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		t.Fatal(err)
	}
	ps := places(string(cgroups), string(mounts))
	i := slices.IndexFunc(ps, place.unified)
	if i < 0 {
		unavailable(t, "control groups of version 2")
	}
	p, err := newParent(ps[i].dir)
	if err != nil {
		unavailable(t, err.Error())
	}
	h := &Host{mode: V2, parents: []parent{p}, controllers: map[string]string{"cpuacct": p.dir}}
	t.Cleanup(func() {
		if err := h.Close(); err != nil {
			t.Error(err)
		}
	})
	return h
}

func TestVersion2GroupIsKilled(t *testing.T) {
	g := newGroup(t, core(t), "g")
	cmd := exec.Command("/bin/sleep", "60")
	cmd.SysProcAttr = &syscall.SysProcAttr{}
	err := inside(t, g, cmd, Limits{Unlimited, Unlimited}, cmd.Start)
	if err != nil {
		t.Fatal(err)
	}
	if n, err := g.Procs(); n != 1 || err != nil {
		t.Errorf("got %d processes, %v, want 1", n, err)
	}
	if err := g.Kill(); err != nil {
		t.Error(err)
		_ = cmd.Process.Kill()
	}
	_ = cmd.Wait()
	if s := cmd.ProcessState.Sys().(syscall.WaitStatus).Signal(); s != syscall.SIGKILL {
		t.Errorf("ended by %v", s)
	}
	if u := sample(t, g); u.User+u.System == 0 {
		t.Error("no processor time was counted")
	}
}

// TestWorkerSettlesInALeaf: on version 2 the worker makes way for groups with controllers, and stays where
// it was if it cannot have them.
func TestWorkerSettlesInALeaf(t *testing.T) {
	g := newGroup(t, core(t), "unit")
	settled := func(controllers ...string) (string, error) {
		cmd := self("settle", append([]string{g.dirs[0]}, controllers...)...)
		var out []byte
		err := inside(t, g, cmd, Limits{Unlimited, Unlimited}, func() (err error) {
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
	if where, err := settled("none"); where != "unit" || err == nil {
		t.Errorf("without its controller: in %q, %v", where, err)
	}
	if _, err := os.Stat(filepath.Join(g.dirs[0], leaf)); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the leaf was left behind: %v", err)
	}
	if where, err := settled(); where != leaf || err != nil {
		t.Errorf("got %q, %v, want %q", where, err, leaf)
	}
	if err := remove(filepath.Join(g.dirs[0], leaf)); err != nil {
		t.Error(err)
	}
}
