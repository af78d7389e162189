// SPDX-License-Identifier: Apache-2.0

package cgroup

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// Each role is what this executable does when a test starts it again.
var roles = map[string]func(args []string) error{
	// Touches 128 MiB of memory, then ends.
	"hog": func(args []string) error {
		b, err := unix.Mmap(-1, 0, 128<<20, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
		for i := 0; i < len(b); i += os.Getpagesize() {
			b[i] = 1
		}
		return err
	},
	// A worker that dies without a word.
	"worker": func(args []string) error {
		h, err := Open()
		if err != nil {
			return err
		}
		g, err := h.New("left")
		if err != nil {
			return err
		}
		fmt.Println(strings.Join(g.dirs, "\n"))
		return nil
	},
	// An ordinary user's worker.
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
		detail, fix := h.Why()
		fmt.Printf("%s\n%s\n%s\n", h.Mode(), detail, fix)
		_, err = h.New("g")
		fmt.Println(errors.Is(err, errors.ErrUnsupported))
		return h.Close()
	},
	// A worker in a group of its own on version 2.
	"settle": func(args []string) error {
		err := settle(args[0], args[1:])
		b, readErr := os.ReadFile("/proc/self/cgroup")
		os.Stdout.Write(b)
		return errors.Join(err, readErr)
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

// unavailable skips a test for want of something; root may be required to have it.
func unavailable(t testing.TB, what string) {
	t.Helper()
	if os.Getuid() == 0 && slices.Contains(strings.Split(os.Getenv("CLOISTER_REQUIRE"), ","), "namespaces") {
		t.Fatal("required, but missing: " + what)
	}
	t.Skip("missing: " + what)
}

func openHost(t testing.TB) *Host {
	t.Helper()
	h, err := Open()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := h.Close(); err != nil {
			t.Error(err)
		}
	})
	if h.Mode() == None {
		detail, fix := h.Why()
		unavailable(t, "control groups: "+detail+" ("+fix+")")
	}
	return h
}

func newGroup(t testing.TB, h *Host, name string) *Group {
	t.Helper()
	g, err := h.New(name)
	if err != nil {
		t.Fatal(err)
	}
	return g
}

// inside calls f where what cmd starts is in g.
func inside(t testing.TB, g *Group, cmd *exec.Cmd, l Limits, f func() error) error {
	t.Helper()
	// The thread of the last call may not quite have vanished.
	for range 1000 {
		b, err := os.ReadFile(filepath.Join(g.host.controllers["pids"], g.name, "pids.current"))
		if err != nil || string(b) == "0\n" {
			break
		}
		time.Sleep(time.Millisecond)
	}
	var err error
	once(func() {
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
	u, err := g.Sample()
	if err != nil {
		t.Fatal(err)
	}
	return u
}

func TestOpenTellsWhatTheHostCan(t *testing.T) {
	h := openHost(t)
	detail, fix := h.Why()
	t.Logf("%s %+v %q %q", h.Mode(), h.Can(), detail, fix)
	if c := h.Can(); (c.LimitMemory && c.LimitProcesses) != (detail == "") {
		t.Errorf("can %+v, but %q", c, detail)
	}
}

func TestMemoryIsLimitedAndCounted(t *testing.T) {
	h := openHost(t)
	if !h.Can().LimitMemory || !h.Can().CountMemory {
		unavailable(t, "a memory controller")
	}
	g, other := newGroup(t, h, "g"), newGroup(t, h, "other")
	if err := other.Reset(Limits{Unlimited, Unlimited}); err != nil {
		t.Fatal(err)
	}
	const limit = 64 << 20
	cmd := self("hog")
	err := inside(t, g, cmd, Limits{limit, Unlimited}, cmd.Run)
	if ws, ok := cmd.ProcessState.Sys().(syscall.WaitStatus); !ok || ws.Signal() != syscall.SIGKILL {
		t.Fatalf("the hog: %v, want it killed", err)
	}
	u := sample(t, g)
	if u.OOMKills != 1 || u.PeakMemory < limit*9/10 || u.PeakMemory > limit || u.User+u.System == 0 {
		t.Errorf("got %+v, want one kill at %d, and processor time", u, limit)
	}
	if u := sample(t, other); u != (Usage{}) {
		t.Errorf("another group counted %+v", u)
	}
	if err := g.Reset(Limits{Unlimited, Unlimited}); err != nil {
		t.Fatal(err)
	}
	if u := sample(t, g); u != (Usage{}) {
		t.Errorf("after Reset: got %+v, want nothing", u)
	}
	// The next run has its own limit and counts.
	cmd = self("hog")
	if err := inside(t, g, cmd, Limits{4 * limit, Unlimited}, cmd.Run); err != nil {
		t.Fatal(err)
	}
	if u := sample(t, g); u.OOMKills != 0 || u.PeakMemory < 2*limit || u.PeakMemory > 4*limit {
		t.Errorf("got %+v, want no kill and %d", u, 2*limit)
	}
}

func TestProcessesAreLimitedAndCounted(t *testing.T) {
	h := openHost(t)
	if !h.Can().LimitProcesses {
		unavailable(t, "a pids controller")
	}
	// The orphans of the shell become children of this process.
	if err := unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); err != nil {
		t.Fatal(err)
	}
	defer unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
	g := newGroup(t, h, "g")
	run := func(limit int64, sleepers int) (Usage, error) {
		cmd := exec.Command("/bin/sh", "-c", strings.Repeat("sleep 5 & ", sleepers)+"exit 7")
		cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
		var u Usage
		err := inside(t, g, cmd, Limits{Unlimited, limit}, func() error {
			_ = cmd.Run() // a shell that cannot fork fails
			n, procsErr := g.Procs()
			if left := int(limit) - 1; procsErr != nil || n != min(left, sleepers) {
				t.Errorf("%d processes (%v), want %d", n, procsErr, min(left, sleepers))
			}
			u = sample(t, g)
			if cmd.Process == nil {
				return errors.New("the shell did not start")
			}
			_ = syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL)
			// What died counts until it was waited for.
			for range 2 * sleepers {
				if _, err := syscall.Wait4(-cmd.Process.Pid, nil, 0, nil); err == syscall.ECHILD {
					break
				}
			}
			return nil
		})
		return u, err
	}
	u, err := run(4, 2)
	if err != nil || u.ForksRefused != 0 || u.PeakProcesses != 3 {
		t.Errorf("3 of 4 processes: %v, %+v", err, u)
	}
	u, err = run(4, 4)
	if err != nil || u.ForksRefused == 0 || u.PeakProcesses != 4 {
		t.Errorf("5 of 4 processes: %v, %+v", err, u)
	}
	// The kernel does not forget the peak of 4.
	u, err = run(4, 1)
	if err != nil || u.ForksRefused != 0 || u.PeakProcesses != 0 {
		t.Errorf("2 of 4 processes, after a run of 4: %v, %+v", err, u)
	}
}

func TestGroupsOfDeadWorkersAreRemoved(t *testing.T) {
	h := openHost(t)
	g := newGroup(t, h, "living")
	out, err := self("worker").Output()
	if err != nil {
		t.Fatal(err)
	}
	left := strings.Fields(string(out))
	if len(left) == 0 {
		t.Fatal("the worker had no groups")
	}
	for _, d := range left {
		if _, err := os.Stat(d); err != nil {
			t.Fatal("the dead worker left nothing:", err)
		}
	}
	openHost(t)
	for _, d := range left {
		if _, err := os.Stat(filepath.Dir(d)); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("%s: %v, want it removed", d, err)
		}
	}
	for _, d := range g.dirs {
		if _, err := os.Stat(d); err != nil {
			t.Errorf("a living worker's group: %v", err)
		}
	}
}

func TestCloseRemovesEverything(t *testing.T) {
	h := openHost(t)
	g := newGroup(t, h, "g")
	if err := h.Close(); err != nil {
		t.Fatal(err)
	}
	for _, d := range g.dirs {
		if _, err := os.Stat(filepath.Dir(d)); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("%s: %v, want it removed", d, err)
		}
	}
}

func TestOrdinaryUserIsTold(t *testing.T) {
	if os.Getuid() != 0 {
		h, err := Open()
		if err != nil {
			t.Fatal(err)
		}
		defer h.Close()
		if detail, fix := h.Why(); h.Mode() == None && (detail == "" || fix == "") {
			t.Errorf("got %q, %q", detail, fix)
		}
		return
	}
	openHost(t)
	out, err := self("user").CombinedOutput()
	lines := strings.Split(string(out), "\n")
	if err != nil || len(lines) != 5 || lines[0] != "none" || lines[1] == "" || lines[2] == "" || lines[3] != "true" {
		t.Errorf("%v, got:\n%s", err, out)
	}
	t.Logf("%s", out)
}

func BenchmarkResetAndSample(b *testing.B) {
	h := openHost(b)
	g := newGroup(b, h, "g")
	for b.Loop() {
		if err := g.Reset(Limits{1 << 30, 128}); err != nil {
			b.Fatal(err)
		}
		sample(b, g)
	}
}
