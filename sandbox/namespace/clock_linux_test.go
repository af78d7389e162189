// SPDX-License-Identifier: Apache-2.0

package namespace_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/sandbox/namespace"
	"github.com/cloister-build/cloister/sandbox/sandboxtest"
	"github.com/cloister-build/cloister/tests/must"
)

// A clocked is a program that prints the time of day.
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

// build compiles a program into dir and reports whether the host can.
func build(t *testing.T, dir, name, text string, command ...string) bool {
	t.Helper()
	if _, err := exec.LookPath(command[0]); err != nil {
		return false
	}
	must.Succeed(t, os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644))
	cmd := exec.CommandContext(t.Context(), command[0], command[1:]...)
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0", "GO111MODULE=off", "GOFLAGS=")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Logf("%v: %v: %s", command, err, out)
		return false
	}
	return true
}

// lacks skips the test because a program is missing or unusable.
func lacks(t *testing.T, program string) {
	t.Helper()
	sandboxtest.Tool(t, program)
	sandboxtest.Unavailable(t, "tools", program+" builds nothing")
}

// clocks returns programs that read the time, and their directory.
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
			t.Run(c.name, func(t *testing.T) { lacks(t, c.build[0]) })
			continue
		}
		if _, err := exec.LookPath(c.args[0]); err != nil && c.build == nil {
			t.Run(c.name, func(t *testing.T) { lacks(t, c.args[0]) })
			continue
		}
		all = append(all, c.clocked)
	}
	return dir, all
}

// prints runs the program under conditions and returns its output.
func (c *clocked) prints(t *testing.T, b *namespace.Backend, dir string, own sandbox.Conditions) string {
	t.Helper()
	r := sandboxtest.Run{Spec: func(s *sandbox.Spec) {
		s.Args, s.Conditions = c.args, own
		s.Timeout = time.Minute
		s.Inputs = append(s.Inputs, sandbox.Input{Target: "/clocks", Content: "x", Source: dir})
		s.Inputs = append(s.Inputs, javaFiles()...)
	}}
	r.Do(t, b)
	if r.Result.ExitCode != 0 {
		t.Fatalf("%s: exit code %d\n%s%s", c.name, r.Result.ExitCode, r.Stdout, r.Stderr)
	}
	return r.Stdout
}

// run is prints for programs that print times.
func (c *clocked) run(t *testing.T, b *namespace.Backend, dir string, own sandbox.Conditions) []time.Time {
	t.Helper()
	var times []time.Time
	for word := range strings.FieldsSeq(c.prints(t, b, dir, own)) {
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

// javaFiles are the files of a JDK outside /usr.
func javaFiles() []sandbox.Input {
	var ins []sandbox.Input
	found, _ := filepath.Glob("/etc/java-*")
	for _, dir := range found {
		ins = append(ins, sandbox.Input{Target: dir, Content: "host", Source: dir})
	}
	return ins
}

// conditioned returns a backend that supports these conditions.
func conditioned(t *testing.T, want ...sandbox.Condition) *namespace.Backend {
	t.Helper()
	b, f := backend(t, namespace.Config{})
	for _, c := range want {
		if !slices.Contains(f.Conditions, c) {
			sandboxtest.Unavailable(t, "conditions", "this host cannot change "+string(c))
		}
	}
	return b
}

// TestOtherClocks: programs of every kind see the run's clock.
func TestOtherClocks(t *testing.T) {
	t.Parallel()
	b := conditioned(t, sandbox.ConditionClockOffset, sandbox.ConditionFrozenClock)
	dir, all := clocks(t)
	for _, c := range all {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			for _, shift := range []time.Duration{400 * 24 * time.Hour, 0} { // the next run has the true one
				c.isShifted(t, b, dir, shift)
			}
			c.isHeld(t, b, dir)
		})
	}
}

func (c *clocked) isShifted(t *testing.T, b *namespace.Backend, dir string, shift time.Duration) {
	t.Helper()
	before := time.Now().Add(shift).Add(-time.Second) // what is cut off
	for _, got := range c.run(t, b, dir, sandbox.Conditions{ClockOffset: shift}) {
		if after := time.Now().Add(shift); got.Before(before) || got.After(after) {
			t.Errorf("shifted by %v: got %v, want a time from %v to %v", shift, got, before, after)
		}
	}
}

// isHeld checks that two runs read the same times, some microseconds after the start.
func (c *clocked) isHeld(t *testing.T, b *namespace.Backend, dir string) {
	t.Helper()
	const start = 1_000_000_000
	first := c.run(t, b, dir, sandbox.Conditions{FrozenClock: start})
	for _, got := range first {
		if since := got.Sub(time.Unix(start, 0)); since < 0 || since > 10*time.Second || since%time.Microsecond != 0 {
			t.Errorf("got %v after the start, want some microseconds", since)
		}
	}
	if c.name == "Java" {
		return // whose threads ask at any time
	}
	if second := c.run(t, b, dir, sandbox.Conditions{FrozenClock: start}); !slices.Equal(first, second) {
		t.Errorf("got %v and then %v, want the same", first, second)
	}
	later := c.run(t, b, dir, sandbox.Conditions{FrozenClock: start + 5})
	if since := later[0].Sub(first[0]); since != 5*time.Second {
		t.Errorf("held 5 s later it is %v later", since)
	}
}

// waitC waits for a time of day in every way and prints the results.
const waitC = `#include <errno.h>
#include <pthread.h>
#include <semaphore.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>
#include <sys/syscall.h>
#include <sys/time.h>
// A signal can interrupt a call that the monitor has not received yet.
static struct timespec now(clockid_t c) { struct timespec t; while (clock_gettime(c, &t) && errno == EINTR); return t; }
static struct timespec in(long ms) {
	struct timespec t = now(CLOCK_REALTIME);
	t.tv_nsec += ms % 1000 * 1000000; t.tv_sec += ms / 1000 + t.tv_nsec / 1000000000; t.tv_nsec %= 1000000000;
	return t;
}
static double since(struct timespec a, clockid_t c) { struct timespec b = now(c); return (b.tv_sec - a.tv_sec) * 1e3 + (b.tv_nsec - a.tv_nsec) / 1e6; }
static pthread_mutex_t m = PTHREAD_MUTEX_INITIALIZER, locked = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t c = PTHREAD_COND_INITIALIZER;
static int flag;
static void *waker(void *p) { usleep(30000); pthread_mutex_lock(&m); flag = 1; pthread_cond_signal(&c); pthread_mutex_unlock(&m); return p; }
static void *holder(void *p) { struct timespec t = in(50); return (void *)(long)pthread_mutex_timedlock(&locked, &t); }
static void handle(int s) { (void)s; }
static void say(const char *what, int err, struct timespec until, struct timespec real, double least) {
	printf("%s: %s%s%s\n", what, err ? strerrorname_np(err) : "0",
		err != EINTR && err != 0 && since(until, CLOCK_REALTIME) < 0 ? ", early by its clock" : "",
		since(real, CLOCK_MONOTONIC) < least ? ", early" : "");
}
int main() {
	struct timespec t, real, none = {0, 0};
	sem_t s; sem_init(&s, 0, 0);
	pthread_t p; void *r;
	setvbuf(stdout, 0, _IONBF, 0);
	pthread_mutex_lock(&m);
	real = now(CLOCK_MONOTONIC); t = in(100);
	int err = pthread_cond_timedwait(&c, &m, &t);
	while (err == 0 && !flag) err = pthread_cond_timedwait(&c, &m, &t);
	say("condition", err, t, real, 90);
	t = in(1000000); pthread_create(&p, 0, waker, 0); err = 0;
	while (err == 0 && !flag) err = pthread_cond_timedwait(&c, &m, &t);
	say("condition, woken", err, t, real, 0);
	pthread_mutex_unlock(&m); pthread_join(p, 0);
	real = now(CLOCK_MONOTONIC); t = in(100); err = sem_timedwait(&s, &t) ? errno : 0;
	say("semaphore", err, t, real, 90);
	sem_post(&s); t = in(100); real = now(CLOCK_MONOTONIC); err = sem_timedwait(&s, &t) ? errno : 0;
	say("semaphore, there", err, t, real, 0);
	pthread_mutex_lock(&locked); pthread_create(&p, 0, holder, 0); pthread_join(p, &r);
	say("mutex", (int)(long)r, none, none, 0);
	real = now(CLOCK_MONOTONIC); t = in(100); err = clock_nanosleep(CLOCK_REALTIME, TIMER_ABSTIME, &t, 0);
	say("sleep", err, t, real, 90);
	printf("sleep: %s\n", since(t, CLOCK_REALTIME) < 0 ? "early by its clock" : "its clock advanced");
	t = in(-1000); err = clock_nanosleep(CLOCK_REALTIME, TIMER_ABSTIME, &t, 0);
	say("sleep, past", err, t, real, 0);
	t.tv_nsec = -1; err = clock_nanosleep(CLOCK_REALTIME, TIMER_ABSTIME, &t, 0);
	say("sleep, wrong", err, none, none, 0);
	err = clock_nanosleep(CLOCK_REALTIME, TIMER_ABSTIME, (void *)8, 0);
	say("sleep, nowhere", err, none, none, 0);
	struct sigaction a; memset(&a, 0, sizeof a); a.sa_handler = handle; sigaction(SIGALRM, &a, 0);
	// Repeated, since the first signal may arrive before the sleep begins.
	struct itimerval i = {{0, 50000}, {0, 50000}}, stop = {}; setitimer(ITIMER_REAL, &i, 0);
	t = in(1000000); err = clock_nanosleep(CLOCK_REALTIME, TIMER_ABSTIME, &t, 0);
	setitimer(ITIMER_REAL, &stop, 0);
	say("sleep, interrupted", err, t, real, 0);
	t = now(CLOCK_REALTIME); struct timespec d = {0, 200000000}; nanosleep(&d, 0);
	printf("sleep for: %s\n", since(t, CLOCK_REALTIME) < 200 ? "its clock stood" : "its clock advanced");
	printf("nowhere: %d\n", syscall(SYS_clock_gettime, CLOCK_REALTIME, (void *)8) ? errno : 0);
}`

const waited = `condition: ETIMEDOUT
condition, woken: 0
semaphore: ETIMEDOUT
semaphore, there: 0
mutex: ETIMEDOUT
sleep: 0
sleep: its clock advanced
sleep, past: 0
sleep, wrong: EINVAL
sleep, nowhere: EFAULT
sleep, interrupted: EINTR
sleep for: its clock advanced
nowhere: 14
`

// TestTimedWaitsEnd: waits for a time of day end by the run's clock.
func TestTimedWaitsEnd(t *testing.T) {
	t.Parallel()
	b := conditioned(t, sandbox.ConditionClockOffset, sandbox.ConditionFrozenClock)
	dir := t.TempDir()
	if !build(t, dir, "wait.c", waitC, "gcc", "-D_GNU_SOURCE", "-o", "wait", "wait.c", "-lpthread") {
		lacks(t, "gcc")
	}
	for name, own := range map[string]sandbox.Conditions{
		"usual":  {},
		"future": {ClockOffset: 400 * 24 * time.Hour},
		"past":   {ClockOffset: -400 * 24 * time.Hour},
		"held":   {FrozenClock: 1_000_000_000},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := sandboxtest.Run{Spec: func(s *sandbox.Spec) {
				s.Args, s.Conditions, s.Timeout = []string{"/waits/wait"}, own, 2*time.Minute
				s.Inputs = append(s.Inputs, sandbox.Input{Target: "/waits", Content: "x", Source: dir})
			}}
			r.Do(t, b)
			if diff := cmp.Diff(waited, r.Stdout); diff != "" || r.Result.ExitCode != 0 {
				t.Errorf("exit code %d (-want +got):\n%s", r.Result.ExitCode, diff)
			}
		})
	}
}

// otherC reads, and sleeps by, rarely used time-of-day clocks and prints the results.
const otherC = `#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
int main() {
	clockid_t ids[] = {CLOCK_REALTIME_COARSE, CLOCK_REALTIME_ALARM, CLOCK_TAI};
	for (int i = 0; i < 3; i++) {
		struct timespec t = {1, 0}, d = {0, 1000};
		printf("%d: %s", ids[i], clock_gettime(ids[i], &t) ? strerrorname_np(errno) : "0");
		t.tv_sec -= t.tv_sec ? 1 : 0;
		int until = clock_nanosleep(ids[i], TIMER_ABSTIME, &t, 0), during = clock_nanosleep(ids[i], 0, &d, 0);
		printf(" %s", until ? strerrorname_np(until) : "0");
		printf(" %s\\n", during ? strerrorname_np(during) : "0");
	}
}`

// TestOtherClocksFailAsUsual: clocks that the kernel lacks fail in the same way in a run with its own clock.
func TestOtherClocksFailAsUsual(t *testing.T) {
	t.Parallel()
	b := conditioned(t, sandbox.ConditionClockOffset, sandbox.ConditionFrozenClock)
	dir := t.TempDir()
	if !build(t, dir, "other.c", otherC, "gcc", "-D_GNU_SOURCE", "-o", "other", "other.c") {
		lacks(t, "gcc")
	}
	other := clocked{"other", []string{"/clocks/other"}}
	usual := other.prints(t, b, dir, sandbox.Conditions{})
	for _, own := range []sandbox.Conditions{{ClockOffset: time.Hour}, {FrozenClock: 1_000_000_000}} {
		if diff := cmp.Diff(usual, other.prints(t, b, dir, own)); diff != "" {
			t.Errorf("%+v (-usual +got):\n%s", own, diff)
		}
	}
}
