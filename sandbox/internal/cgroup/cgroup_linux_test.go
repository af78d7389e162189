// SPDX-License-Identifier: Apache-2.0

package cgroup

import (
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/cloister-build/cloister/sandbox/sandboxtest"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
	"github.com/containerd/cgroups/v3/cgroup1"
	"golang.org/x/sys/unix"
)

// roles are what this executable does when a test starts it again.
var roles = map[string]func(args []string) error{
	// Touches 128 MiB of memory.
	"hog": func(args []string) error {
		b, err := unix.Mmap(-1, 0, 128<<20, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
		for i := 0; i < len(b); i += os.Getpagesize() {
			b[i] = 1
		}
		return err
	},
	// Keeps the first processor busy until it is killed.
	"spin": func(args []string) error {
		runtime.LockOSThread()
		var first unix.CPUSet
		first.Set(0)
		if err := unix.SchedSetaffinity(0, &first); err != nil {
			return err
		}
		for {
			os.Getppid()
		}
	},
	// Reads 4 MiB from a disk, past the page cache.
	"read": func(args []string) error {
		disk, err := unix.Open(args[0], unix.O_RDONLY|unix.O_DIRECT|unix.O_CLOEXEC, 0)
		if err != nil {
			return err
		}
		b, err := unix.Mmap(-1, 0, 1<<20, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
		for n, left := 0, 4<<20; left > 0 && err == nil; left -= n {
			if n, err = unix.Read(disk, b); n == 0 && err == nil {
				err = io.ErrUnexpectedEOF
			}
		}
		return err
	},
	// A worker that exits without closing its Host, and has groups until then.
	"worker": func(args []string) error {
		h, err := Open()
		if err != nil {
			return err
		}
		g, err := h.New("left")
		if err != nil {
			return err
		}
		for _, dir := range g.dirs {
			if _, err := os.Stat(dir); err != nil {
				return err
			}
			fmt.Println(dir)
		}
		return nil
	},
	// A worker of an ordinary user.
	"user": func(args []string) error {
		for _, err := range []error{syscall.Setgroups(nil), syscall.Setgid(63210), syscall.Setuid(63210)} {
			if err != nil {
				return err
			}
		}
		h, err := Open()
		if err != nil {
			return err
		}
		reason, fix := h.Missing()
		fmt.Printf("%s\n%s\n%s\n", h.Mode(), reason, fix)
		_, err = h.New("g")
		fmt.Println(errors.Is(err, errors.ErrUnsupported))
		return h.Close()
	},
	// A worker in a version 2 group of its own, with controllers. It prints which group it is in then.
	"settle": func(args []string) error {
		own, err := ownV2(args[0], args[1])
		if err != nil {
			return err
		}
		own.controllers = args[2:]
		h := &Host{mode: V2}
		err = h.createV2(own)
		b, readErr := os.ReadFile("/proc/self/cgroup")
		os.Stdout.Write(b)
		return errors.Join(err, readErr, h.Close())
	},
}

func TestMain(m *testing.M) {
	if role, ok := roles[os.Getenv("CGROUP_TEST_ROLE")]; ok {
		if err := role(os.Args[1:]); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}

func self(role string, args ...string) *exec.Cmd {
	cmd := exec.Command("/proc/self/exe", args...)
	cmd.Env = append(os.Environ(), "CGROUP_TEST_ROLE="+role)
	cmd.SysProcAttr = &syscall.SysProcAttr{}
	return cmd
}

func openHost(t testing.TB) *Host {
	t.Helper()
	h := must.Get(Open())(t)
	closeHost(t, h)
	if h.Mode() == None {
		reason, fix := h.Missing()
		sandboxtest.Unavailable(t, "limits", "control groups: "+reason+" ("+fix+")")
	}
	return h
}

func closeHost(t testing.TB, h *Host) {
	t.Cleanup(func() {
		expect.Error(t, h.Close(), nil)
	})
}

func newGroup(t testing.TB, h *Host, name string) *Group {
	t.Helper()
	g := must.Get(h.New(name))(t)
	return g
}

// inside limits g and calls f in a thread whose children, and those of cmd, are in g.
func inside(t testing.TB, g *Group, cmd *exec.Cmd, l Limits, f func() error) error {
	t.Helper()
	// The thread of the last call may still be on its way out.
	for range 60_000 {
		b, err := os.ReadFile(filepath.Join(g.dirs["pids"], "pids.current"))
		if err != nil || string(b) == "0\n" {
			break
		}
		time.Sleep(time.Millisecond)
	}
	var err error
	inThread(func() {
		dir, tasks := g.Join()
		for _, file := range tasks {
			if _, err = file.WriteString("0"); err != nil {
				return
			}
		}
		cmd.SysProcAttr.UseCgroupFD, cmd.SysProcAttr.CgroupFD = dir >= 0, dir
		if err = g.Reset(l); err == nil {
			err = f()
		}
	})
	return err
}

func sample(t testing.TB, g *Group) Usage {
	t.Helper()
	u := must.Get(g.Sample())(t)
	return u
}

// processes counts the processes in g without the thread that joined.
func processes(t testing.TB, g *Group) int {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(g.dirs["cpuacct"], "cgroup.procs"))
	expect.Error(t, err, nil)
	return strings.Count(string(b), "\n") - int(g.joined())
}

func TestMissingExplainsWhatCannotBeLimited(t *testing.T) {
	h := openHost(t)
	reason, fix := h.Missing()
	t.Logf("%s %+v %q %q", h.Mode(), h.Capabilities(), reason, fix)
	if c := h.Capabilities(); (c.LimitMemory && c.LimitProcesses) != (reason == "") {
		t.Errorf("capabilities %+v with reason %q", c, reason)
	}
}

func TestMemoryIsLimitedAndCounted(t *testing.T) {
	h := openHost(t)
	if !h.Capabilities().LimitMemory {
		sandboxtest.Unavailable(t, "limits", "no memory controller")
	}
	// peaked checks the peak where the kernel can reset it.
	peaked := func(u Usage, least, most int64) bool {
		if !h.Capabilities().CountMemory {
			return u.PeakMemory == 0
		}
		return least <= u.PeakMemory && u.PeakMemory <= most
	}
	g, other := newGroup(t, h, "g"), newGroup(t, h, "other")
	must.Succeed(t, other.Reset(noLimits))
	const limit = 64 << 20
	cmd := self("hog")
	err := inside(t, g, cmd, Limits{limit, Unlimited, Unlimited, Unlimited}, cmd.Run)
	if ws, ok := cmd.ProcessState.Sys().(syscall.WaitStatus); !ok || ws.Signal() != syscall.SIGKILL {
		t.Fatalf("hog: got %v, want it killed", err)
	}
	u := sample(t, g)
	// Version 2 lets a dying process exceed the limit by a few pages.
	expect.That(t, u.OOMKilled && peaked(u, limit*9/10, limit+limit/100) && u.User+u.System != 0,
		"got %+v, want a kill at %d and processor time", u, limit)
	expect.Equal(t, sample(t, other), Usage{}, "use of another group")
	must.Succeed(t, g.Reset(noLimits))
	// The last steps of a dying process count after its parent has reaped it.
	after := sample(t, g)
	if cpu := after.User + after.System; cpu > (u.User+u.System)/2 {
		t.Errorf("after Reset: got %v of processor time, want almost none of %v", cpu, u.User+u.System)
	}
	if after.User, after.System = 0, 0; after != (Usage{}) {
		t.Errorf("after Reset: got %+v, want zeros", after)
	}
	// The next run has its own limit and counters.
	cmd = self("hog")
	must.Succeed(t, inside(t, g, cmd, Limits{4 * limit, Unlimited, Unlimited, Unlimited}, cmd.Run))
	if u := sample(t, g); u.OOMKilled || !peaked(u, 2*limit, 4*limit) {
		t.Errorf("got %+v, want no kill and a peak of %d", u, 2*limit)
	}
}

func TestProcessesAreLimitedAndCounted(t *testing.T) {
	h := openHost(t)
	if !h.Capabilities().LimitProcesses {
		sandboxtest.Unavailable(t, "limits", "no pids controller")
	}
	// Orphans of the shell become children of this process.
	must.Succeed(t, unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0))
	defer unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
	g := newGroup(t, h, "g")
	run := func(limit int64, sleepers int) (u Usage) {
		cmd := exec.Command("/bin/sh", "-c", strings.Repeat("sleep 5 & ", sleepers)+"exit 7")
		cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
		err := inside(t, g, cmd, Limits{Unlimited, limit, Unlimited, Unlimited}, func() error {
			_ = cmd.Run() // a shell that cannot fork fails
			expect.Equal(t, processes(t, g), min(int(limit)-1, sleepers), "processes")
			u = sample(t, g)
			if cmd.Process == nil {
				return errors.New("the shell did not start")
			}
			_ = syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL)
			// Dead processes count until they are reaped.
			for range 2 * sleepers {
				if _, err := syscall.Wait4(-cmd.Process.Pid, nil, 0, nil); err == syscall.ECHILD {
					break
				}
			}
			return nil
		})
		expect.Error(t, err, nil)
		return u
	}
	if u := run(4, 2); u.ForksRefused != 0 || u.PeakProcesses != 3 {
		t.Errorf("3 of 4 processes: got %+v", u)
	}
	if u := run(4, 4); u.ForksRefused == 0 || u.PeakProcesses != 4 {
		t.Errorf("5 of 4 processes: got %+v", u)
	}
	// The kernel keeps the peak of 4.
	if u := run(4, 1); u.ForksRefused != 0 || u.PeakProcesses != 0 {
		t.Errorf("2 of 4 processes after a run with 4: got %+v", u)
	}
}

// TestProcessorIsSharedByGroups: four processes in one group get no more of a processor than one in another.
func TestProcessorIsSharedByGroups(t *testing.T) {
	h := openHost(t)
	if h.mode != V2 || h.dirs["cpu"] == "" {
		t.Skip("needs a cpu controller of version 2, as in tests/vm")
	}
	one, four := newGroup(t, h, "one"), newGroup(t, h, "four")
	for _, g := range []*Group{four, four, four, four, one} {
		cmd := self("spin")
		dir, _ := g.Join()
		cmd.SysProcAttr.UseCgroupFD, cmd.SysProcAttr.CgroupFD = true, dir
		must.Succeed(t, cmd.Start())
		defer func() {
			_ = cmd.Process.Kill()
			_ = cmd.Wait() // killed
		}()
	}
	used := func(g *Group) time.Duration {
		u := sample(t, g)
		return u.User + u.System
	}
	for used(one) == 0 { // starting takes time, too
		time.Sleep(time.Millisecond)
	}
	for _, g := range []*Group{one, four} {
		must.Succeed(t, g.Reset(noLimits))
	}
	for used(one)+used(four) < 2*time.Second {
		time.Sleep(time.Millisecond)
	}
	// If processors were divided by thread, it would be a quarter.
	if one, four := used(one), used(four); 3*one < four {
		t.Errorf("one process got %v and the group of four %v, want equal shares", one, four)
	}
}

// TestProcessorsAreLimited: the kernel delays a busy process that may use a tenth of a processor, until the limit is
// lifted. On a busy machine it takes longer, but never less time.
func TestProcessorsAreLimited(t *testing.T) {
	h := openHost(t)
	if !h.Capabilities().LimitCPUs {
		sandboxtest.Unavailable(t, "limits", "no cpu controller with quotas")
	}
	g, tenth := newGroup(t, h, "g"), Limits{Unlimited, Unlimited, 100, Unlimited}
	cmd := self("spin")
	must.Succeed(t, inside(t, g, cmd, tenth, cmd.Start))
	defer func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait() // killed
	}()
	delays := func() int64 {
		var s scanner
		n := s.value([]byte(g.value("cpu", "cpu.stat", "cpu.stat")), "nr_throttled")
		must.Succeed(t, s.err)
		return n
	}
	const cpu = 300 * time.Millisecond
	// spend returns how long this processor time takes, and in how many periods the process was delayed.
	spend := func(l Limits) (time.Duration, int64) {
		must.Succeed(t, g.Reset(l))
		before, start := delays(), time.Now()
		for u := sample(t, g); u.User+u.System < cpu; u = sample(t, g) {
			time.Sleep(time.Millisecond)
		}
		return time.Since(start), delays() - before
	}
	elapsed, n := spend(tenth)
	if quota := g.value("cpu", "cpu.cfs_quota_us", "cpu.max"); elapsed < 2*time.Second || !strings.HasPrefix(quota, "10000") {
		t.Errorf("a tenth of a processor: %v took %v with %d delays and the quota %s, want 3s", cpu, elapsed, n, quota)
	}
	if elapsed, n := spend(noLimits); n > 1 { // one that began before Reset
		t.Errorf("without a limit: %v took %v with %d delays", cpu, elapsed, n)
	}
}

// TestProcessorLimitAboveThatOfAParent: version 1 refuses a higher quota than that of a group above, which applies
// then.
func TestProcessorLimitAboveThatOfAParent(t *testing.T) {
	h := openHost(t)
	if h.mode != V1 {
		t.Skip("version 2 accepts any quota")
	}
	if !h.Capabilities().LimitCPUs {
		sandboxtest.Unavailable(t, "limits", "no cpu controller of version 1 with quotas")
	}
	above := h.dirs["cpu"]
	if shares, want := must.Get(os.ReadFile(filepath.Join(above, "cpu.shares")))(t), fmt.Sprintf("%d\n", 1024*runtime.NumCPU()); string(shares) != want {
		t.Errorf("all groups together: got %q shares, want %q", shares, want)
	}
	g := newGroup(t, h, "g")
	must.Succeed(t, os.WriteFile(filepath.Join(above, "cpu.cfs_quota_us"), []byte("20000"), 0))
	for milliCPUs, want := range map[int64]string{100: "10000", 500: "-1"} {
		must.Succeed(t, g.Reset(Limits{Unlimited, Unlimited, milliCPUs, Unlimited}))
		expect.Equal(t, g.value("cpu", "cpu.cfs_quota_us", ""), want, "quota of %d thousandths below 200", milliCPUs)
	}
	expect.Error(t, g.Reset(Limits{Unlimited, Unlimited, 1, Unlimited}), unix.EINVAL,
		"less than the kernel can enforce")
}

// TestDisksAreLimited: 4 MiB at 1 MiB per second take seconds, or longer on a busy machine.
func TestDisksAreLimited(t *testing.T) {
	const disk = "/dev/vda"
	h := openHost(t)
	if !h.Capabilities().LimitDisks || unix.Access(disk, unix.R_OK) != nil {
		sandboxtest.Unavailable(t, "disk", "needs an io controller of version 2 and a readable "+disk+", as in tests/vm")
	}
	g, cmd := newGroup(t, h, "g"), self("read", disk)
	start := time.Now()
	must.Succeed(t, inside(t, g, cmd, Limits{Unlimited, Unlimited, Unlimited, 1 << 20}, cmd.Run))
	if took, u := time.Since(start), sample(t, g); took < 2*time.Second || u.ReadBytes < 4<<20 {
		t.Errorf("%d bytes took %v, want 4 MiB in 4s", u.ReadBytes, took)
	}
	if limits := g.value("io", "", "io.max"); strings.Count(limits, "rbps=1048576 wbps=1048576") == 0 {
		t.Errorf("got limits %q", limits)
	}
	must.Succeed(t, g.Reset(noLimits))
	expect.Equal(t, g.value("io", "", "io.max"), "", "limits after Reset")
}

func TestGroupsOfDeadWorkersAreRemoved(t *testing.T) {
	h := openHost(t)
	g := newGroup(t, h, "living")
	out := must.Get(self("worker").Output())(t)
	left := strings.Fields(string(out))
	must.Be(t, len(left) != 0, "the worker had no groups")
	openHost(t) // or any other worker of this host, which may have been faster
	for _, d := range left {
		expect.Error(t, expect.Err(os.Stat(filepath.Dir(d))), os.ErrNotExist, "%s", d)
	}
	for _, d := range g.dirs {
		expect.Error(t, expect.Err(os.Stat(d)), nil, "group of a living worker")
	}
}

// TestGroupsAreFoundBelowEscapedNames: systemd writes a hyphen in the name of a unit as \x2d.
func TestGroupsAreFoundBelowEscapedNames(t *testing.T) {
	dir := filepath.Join(t.TempDir(), `system-a\x2db.slice`)
	for _, name := range []string{prefix + "1.0", "other"} {
		must.Succeed(t, os.MkdirAll(filepath.Join(dir, name), 0o755))
	}
	p := place{dir, func(string) (control, error) { return nil, errors.ErrUnsupported }}
	expect.Slices(t, p.sweep(time.Now()), []string{prefix + "1.0"})
}

// A worker may have been in another group of one hierarchy and in the same group of the next.
func TestGroupsInOneHierarchyAreRemoved(t *testing.T) {
	h := openHost(t)
	for controller, dir := range h.dirs {
		left := filepath.Join(filepath.Dir(dir), fmt.Sprintf("%s%d.left-%s", prefix, os.Getpid(), controller))
		must.Succeed(t, os.MkdirAll(filepath.Join(left, "slot"), 0o755))
		openHost(t)
		expect.Error(t, expect.Err(os.Stat(left)), os.ErrNotExist, "%s", left)
	}
}

func TestCloseRemovesEveryGroup(t *testing.T) {
	h := openHost(t)
	g := newGroup(t, h, "g")
	must.Succeed(t, h.Close())
	for _, d := range g.dirs {
		expect.Error(t, expect.Err(os.Stat(filepath.Dir(d))), os.ErrNotExist, "%s", d)
	}
}

func TestOrdinaryUserGetsReasonAndFix(t *testing.T) {
	if os.Getuid() != 0 {
		h := must.Get(Open())(t)
		closeHost(t, h)
		if reason, fix := h.Missing(); h.Mode() == None && (reason == "" || fix == "") {
			t.Errorf("got %q, %q", reason, fix)
		}
		return
	}
	openHost(t)
	out, err := self("user").CombinedOutput()
	lines := strings.Split(string(out), "\n")
	if err != nil || len(lines) != 5 || lines[0] != "none" || lines[1] == "" || lines[2] == "" || lines[3] != "true" {
		t.Errorf("%v, got:\n%s", err, out)
	}
}

func BenchmarkResetAndSample(b *testing.B) {
	h := openHost(b)
	g := newGroup(b, h, "g")
	for b.Loop() {
		must.Succeed(b, g.Reset(Limits{1 << 30, 128, Unlimited, Unlimited}))
		sample(b, g)
	}
}

// BenchmarkModuleStat reads the counters through the module, as Reset and Sample would.
func BenchmarkModuleStat(b *testing.B) {
	h := openHost(b)
	g := newGroup(b, h, "g")
	for b.Loop() {
		for range 2 {
			var err error
			switch c := g.control.(type) {
			case v1:
				_, err = c.Stat(cgroup1.IgnoreNotExist)
			case v2:
				_, err = c.Stat()
			}
			must.Succeed(b, err)
		}
	}
}
