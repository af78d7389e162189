// SPDX-License-Identifier: Apache-2.0

package namespace_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/sandbox/namespace"
	"github.com/cloister-build/cloister/sandbox/sandboxtest"
)

// A clocked is a program that prints the time of day in nanoseconds twice.
type clocked struct {
	name string
	args []string
}

const clockC = `#include <stdio.h>
#include <sys/time.h>
#include <time.h>
int main() {
	struct timespec a, b; struct timeval v; time_t s;
	clock_gettime(CLOCK_REALTIME, &a);
	gettimeofday(&v, 0);
	time(&s);
	clock_gettime(CLOCK_REALTIME_COARSE, &b);
	printf("%lld.%09ld %lld.%06ld000 %lld.000000000 %lld.%09ld\n", (long long)a.tv_sec, a.tv_nsec, (long long)v.tv_sec, v.tv_usec, (long long)s, (long long)b.tv_sec, b.tv_nsec);
}`

const clockGo = `package main
import ("fmt"; "time")
func main() { for range 3 { t := time.Now(); fmt.Printf("%d.%09d ", t.Unix(), t.Nanosecond()) } }`

const clockJava = `class Clock { public static void main(String[] a) {
	for (int i = 0; i < 2; i++) { var t = java.time.Instant.now(); System.out.printf("%d.%09d ", t.getEpochSecond(), t.getNano()); }
} }`

// build compiles a program into dir and returns whether the host can.
func build(t *testing.T, dir, name, text string, command ...string) bool {
	t.Helper()
	if _, err := exec.LookPath(command[0]); err != nil {
		return false
	}
	if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), command[0], command[1:]...)
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0", "GO111MODULE=off", "GOFLAGS=")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Logf("%v: %v: %s", command, err, out)
		return false
	}
	return true
}

// clocks returns programs that ask for the time, and where they are.
func clocks(t *testing.T) (dir string, all []clocked) {
	dir = t.TempDir()
	for _, c := range []struct {
		clocked
		file, text string
		build      []string
	}{
		{clocked{"C", []string{"/clocks/dynamic"}}, "clock.c", clockC, []string{"gcc", "-o", "dynamic", "clock.c"}},
		{clocked{"static C", []string{"/clocks/static"}}, "clock.c", clockC, []string{"gcc", "-static", "-o", "static", "clock.c"}},
		{clocked{"Go", []string{"/clocks/go"}}, "clock.go", clockGo, []string{"go", "build", "-o", "go", "clock.go"}},
		{clocked{"Python", []string{"/usr/bin/python3", "-c", "import time\nfor i in 1, 2: t = time.time_ns(); print('%d.%09d' % divmod(t, 10**9))"}}, "", "", nil},
		{clocked{"date", []string{"date", "+%s.%N"}}, "", "", nil},
		{clocked{"bash", []string{"bash", "-c", "echo ${EPOCHREALTIME}000; date +%s.%N; printf '%(%s)T.000000000\\n'"}}, "", "", nil},
		{clocked{"Java", []string{"java", "-cp", "/clocks", "Clock"}}, "Clock.java", clockJava, []string{"javac", "Clock.java"}},
	} {
		if c.build != nil && !build(t, dir, c.file, c.text, c.build...) {
			t.Logf("%s is not here", c.name)
			continue
		}
		if _, err := exec.LookPath(c.args[0]); err != nil && c.build == nil {
			t.Logf("%s is not here", c.name)
			continue
		}
		all = append(all, c.clocked)
	}
	return dir, all
}

// run runs the program under conditions and returns the times that it printed.
func (c *clocked) run(t *testing.T, b *namespace.Backend, dir string, own sandbox.Conditions) []time.Time {
	t.Helper()
	r := sandboxtest.Run{Spec: func(s *sandbox.Spec) {
		s.Args, s.Conditions = c.args, own
		s.Timeout = time.Minute
		s.Inputs = append(s.Inputs, sandbox.Input{Target: "/clocks", Content: "x", Source: dir})
		for _, in := range s.Inputs {
			if in.Target == "/etc/alternatives" {
				s.Inputs = append(s.Inputs, javaFiles()...)
			}
		}
	}}
	r.Do(t, b)
	if r.Result.ExitCode != 0 {
		t.Fatalf("%s: exit code %d\n%s%s", c.name, r.Result.ExitCode, r.Stdout, r.Stderr)
	}
	var times []time.Time
	for word := range strings.FieldsSeq(r.Stdout) {
		sec, nsec, _ := strings.Cut(word, ".")
		s, err := strconv.ParseInt(sec, 10, 64)
		n, err2 := strconv.ParseInt(nsec, 10, 64)
		if err != nil || err2 != nil {
			t.Fatalf("%s: %q is no time", c.name, word)
		}
		times = append(times, time.Unix(s, n))
	}
	if len(times) == 0 {
		t.Fatalf("%s printed nothing", c.name)
	}
	return times
}

// javaFiles are what a JDK of the host has outside /usr.
func javaFiles() []sandbox.Input {
	var ins []sandbox.Input
	found, _ := filepath.Glob("/etc/java-*")
	for _, dir := range found {
		ins = append(ins, sandbox.Input{Target: dir, Content: "host", Source: dir})
	}
	return ins
}

// conditioned returns a backend that can have runs under these conditions.
func conditioned(t *testing.T, want ...sandbox.Condition) *namespace.Backend {
	t.Helper()
	b, f := backend(t, namespace.Config{})
	spec := sandbox.Features{Conditions: f.Conditions}
	for _, c := range want {
		found := false
		for _, have := range spec.Conditions {
			found = found || have == c
		}
		if !found {
			sandboxtest.Unavailable(t, "conditions", "this host cannot give a run another "+string(c))
		}
	}
	return b
}

// TestClockIsShifted: whatever a program is made of, it has the other time, and the next run has the true one.
func TestClockIsShifted(t *testing.T) {
	b := conditioned(t, sandbox.ConditionClockShift)
	dir, all := clocks(t)
	for _, shift := range []time.Duration{400 * 24 * time.Hour, -10 * 365 * 24 * time.Hour, 0} {
		for _, c := range all {
			before := time.Now().Add(shift).Add(-time.Second) // what is cut off
			times := c.run(t, b, dir, sandbox.Conditions{ClockShift: shift})
			for _, got := range times {
				if after := time.Now().Add(shift); got.Before(before) || got.After(after) {
					t.Errorf("%s, shifted by %v: got %v, want a time from %v to %v", c.name, shift, got, before, after)
				}
			}
		}
	}
}
