// SPDX-License-Identifier: Apache-2.0

package namespace_test

import (
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/sandbox/namespace"
	"github.com/cloister-build/cloister/sandbox/sandboxtest"
	"github.com/cloister-build/cloister/tests/expect"
)

const randomC = `#include <stdio.h>
#include <stdlib.h>
#include <sys/auxv.h>
#include <sys/random.h>
#include <sys/wait.h>
#include <unistd.h>
int main() {
	unsigned char b[200000]; unsigned long sum = 0;
	unsigned char *a = (unsigned char *)getauxval(AT_RANDOM);
	for (int i = 0; i < 16; i++) printf("%02x", a[i]);
	ssize_t n = getrandom(b, sizeof b, 0);
	for (ssize_t i = 0; i < n; i++) sum = sum * 31 + b[i];
	printf(" %zd %016lx", n, sum);
	printf(" %d", (int)getrandom(b, 1, 99));
	printf(" %d %d", (int)getrandom((void *)8, 1, 0), (int)getrandom(b, 0, 0));
	b[0] = 1;
	fflush(stdout);
	if (fork() == 0) { getrandom(b, 4, 0); printf(" %02x%02x%02x%02x", b[0], b[1], b[2], b[3]); return 0; }
	wait(0);
}`

const randomGo = `package main
import ("crypto/rand"; "fmt"; mrand "math/rand/v2")

// The numbers of Go's runtime are of the thread that a goroutine is on: here the first.
func init() {
	m := map[string]bool{}
	for _, s := range "abcdefghijklmnopqrstuvwxyz" { m[string(s)] = true }
	for s := range m { fmt.Print(s) }
	b := make([]byte, 8)
	rand.Read(b)
	fmt.Printf(" %x %d", b, mrand.Int64())
}

func main() {}`

const randomJava = `class Chance { public static void main(String[] a) {
	System.out.println(java.util.UUID.randomUUID());
} }`

const randomPython = `import os, random, tempfile, uuid, secrets
print(os.urandom(8).hex(), hash('text'), random.random(), uuid.uuid4(), secrets.token_hex(4), os.path.basename(tempfile.mkdtemp()))
print(open('/dev/urandom', 'rb').read(8).hex(), open('/dev/random', 'rb').read(8).hex())`

const randomShell = `head -c 8 /dev/urandom | od -An -tx1; head -c 8 /dev/urandom | od -An -tx1; head -c 8 /dev/random | od -An -tx1
ln -s /dev/urandom /tmp/link; cd /dev; head -c 8 /tmp/link | od -An -tx1; head -c 8 urandom | od -An -tx1; head -c 8 <>/dev/urandom | od -An -tx1
head -c 1000000 /dev/urandom | cksum; dd if=/dev/urandom bs=1M count=2 2>/dev/null | cksum; echo x >/dev/random
t=$(mktemp); dd if=/dev/urandom of=$t bs=8 count=1 2>/dev/null; od -An -tx1 $t
mktemp -u; mktemp -u; shuf -i 1-1000 -n 5 | tr '\n' ' '; ! cat /proc/sys/kernel/random/uuid 2>/dev/null`

// TestRandomIsSeeded: one seed gives a program the same random numbers each time, another seed gives others, and no
// seed the kernel's.
func TestRandomIsSeeded(t *testing.T) {
	t.Parallel()
	b := conditioned(t, sandbox.ConditionRandomSeed)
	dir := t.TempDir()
	for _, c := range []struct {
		clocked
		file, text string
		build      []string
	}{
		{clocked{"C", []string{"/clocks/dynamic"}}, "chance.c", randomC, []string{"gcc", "-o", "dynamic", "chance.c"}},
		{clocked{"static C", []string{"/clocks/static"}}, "chance.c", randomC, []string{"gcc", "-static", "-o", "static", "chance.c"}},
		{clocked{"Go", []string{"/clocks/go"}}, "chance.go", randomGo, []string{"go", "build", "-o", "go", "chance.go"}},
		{clocked{"Python", []string{"/usr/bin/python3", "-c", randomPython}}, "", "", nil},
		{clocked{"shell", []string{"sh", "-c", randomShell}}, "", "", nil},
		{clocked{"Java", []string{"java", "-cp", "/clocks", "Chance"}}, "Chance.java", randomJava, []string{"javac", "Chance.java"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			if c.build != nil && !build(t, dir, c.file, c.text, c.build...) {
				lacks(t, c.build[0])
			}
			if _, err := exec.LookPath(c.args[0]); err != nil && c.build == nil {
				lacks(t, c.args[0])
			}
			with := func(seed uint64) string {
				t.Helper()
				return c.prints(t, b, dir, sandbox.Conditions{RandomSeed: seed})
			}
			first, second, kernel := with(1), with(1), with(0)
			for n := 0; c.name == "Go" && first != second && n < 5; n++ {
				// Its runtime gives a thread a seed as it makes it, which happens now and then.
				first, second = second, with(1)
			}
			others := []string{kernel}
			if c.name == "C" {
				others = append(others, with(2))
			}
			expect.That(t, first == second, "with the same seed: got\n%s\nand then\n%s", first, second)
			for _, x := range others {
				words := strings.Fields(x)
				for i, w := range strings.Fields(first) {
					// What is short may be the same by chance, and what is no random number is.
					if len(w) > 7 && i < len(words) && w == words[i] {
						t.Errorf("got %q with another seed, or with none, too", w)
					}
				}
			}
			expect.That(t, len(strings.Fields(first)) == len(strings.Fields(kernel)),
				"got\n%s\nand without a seed\n%s", first, kernel)
		})
	}
}

// TestSeedsGiveNothingTwice: programs of one run get different numbers, however they read them, and cannot change them.
func TestSeedsGiveNothingTwice(t *testing.T) {
	t.Parallel()
	b := conditioned(t, sandbox.ConditionRandomSeed)
	r := sandboxtest.Run{
		Script: `for i in 1 2 3; do head -c 16 /dev/urandom | od -An -tx1; head -c 16 /dev/random | od -An -tx1; mktemp -u; done
exec 9</dev/urandom; echo x >&9 && echo written; (echo x >/proc/self/fd/9) && echo written; head -c 1 <&9 | wc -c`,
		Spec: func(s *sandbox.Spec) { s.Conditions.RandomSeed = 1 },
	}
	r.Do(t, b)
	seen := map[string]bool{}
	for line := range strings.Lines(r.Stdout) {
		expect.That(t, !seen[line], "got %q twice", line)
		seen[line] = true
	}
	if len(seen) != 10 || seen["written\n"] || !seen["1\n"] {
		t.Errorf("exit code %d: got\n%s%s", r.Result.ExitCode, r.Stdout, r.Stderr)
	}
}

// TestOtherConditionsRecordNothing: the monitor of clock, random numbers and files adds no events to a run, monitored
// or not.
func TestOtherConditionsRecordNothing(t *testing.T) {
	t.Parallel()
	b := conditioned(t, sandbox.ConditionClockOffset, sandbox.ConditionRandomSeed)
	for _, audit := range []sandbox.Audit{sandbox.AuditOff, sandbox.AuditViolations} {
		var events []string
		for _, own := range []sandbox.Conditions{{}, {ClockOffset: time.Hour, RandomSeed: 1}, {InputTime: 1, InputOwner: 4711, OutputOrder: 1}} {
			r := sandboxtest.Run{
				Script: `date >/dev/null; cat /etc/passwd >/dev/null; ls -l /etc /tmp >/dev/null; echo x >/etc/new; mount -t tmpfs x /tmp; head -c 1 /dev/random >/dev/null; true`,
				Spec:   func(s *sandbox.Spec) { s.Audit, s.Conditions = audit, own },
			}
			r.Do(t, b)
			var text strings.Builder
			for _, e := range r.Result.Events {
				text.WriteString(e.String() + "\n")
			}
			events = append(events, text.String())
		}
		if (events[0] == "") != (audit == sandbox.AuditOff) || events[0] != events[1] || events[0] != events[2] {
			t.Errorf("audit %q: got\n%s\nand under other conditions\n%s\nand\n%s", audit, events[0], events[1], events[2])
		}
	}
}

// hiddenC protects its memory from its equals (PR_SET_DUMPABLE) and reads the time.
const hiddenC = `#include <sys/prctl.h>
#include <time.h>
int main() {
	struct timespec t;
	return prctl(PR_SET_DUMPABLE, 0, 0, 0, 0) || clock_gettime(CLOCK_REALTIME, &t);
}`

// TestConditionsHoldOrTheRunFails: if an ordinary user's worker cannot replace a program's clock, the run returns an
// error.
func TestConditionsHoldOrTheRunFails(t *testing.T) {
	t.Parallel()
	b := conditioned(t, sandbox.ConditionClockOffset)
	dir := t.TempDir()
	if !build(t, dir, "hidden.c", hiddenC, "gcc", "-o", "hidden", "hidden.c") {
		lacks(t, "gcc")
	}
	r := sandboxtest.Run{}
	try := func(shift time.Duration) error {
		r.Spec = func(s *sandbox.Spec) {
			s.Args, s.Conditions.ClockOffset = []string{"/hidden/hidden"}, shift
			s.Inputs = append(s.Inputs, sandbox.Input{Target: "/hidden", Content: "x", Source: dir})
		}
		return r.Try(t.Context(), t, b)
	}
	err := try(time.Hour)
	if os.Geteuid() == 0 {
		expect.That(t, err == nil && r.Result.ExitCode == 0, "as root: %v, %+v", err, r.Result)
	} else if err == nil || !strings.Contains(err.Error(), "conditions of the run") || !strings.Contains(err.Error(), "hidden") {
		t.Errorf("got %v, want an error that says that the conditions did not hold", err)
	}
	if err := try(0); err != nil || r.Result.ExitCode != 0 {
		t.Errorf("a usual run: %v, %+v", err, r.Result)
	}
}

// TestConditionsNeedTheMonitor: a backend without the monitor does not offer these conditions.
func TestConditionsNeedTheMonitor(t *testing.T) {
	t.Parallel()
	b, f := backend(t, namespace.Config{Without: []namespace.Layer{namespace.Monitor}})
	for _, own := range []sandbox.Conditions{{ClockOffset: time.Hour}, {FrozenClock: 1}, {RandomSeed: 1}, {OutputOrder: 1}} {
		r := sandboxtest.Run{Script: "true", Spec: func(s *sandbox.Spec) { s.Conditions, s.Audit = own, sandbox.AuditOff }}
		if err := r.Try(t.Context(), t, b); err == nil || !strings.Contains(err.Error(), "this worker cannot change") {
			t.Errorf("%+v: got %v, want a refusal", own, err)
		}
	}
	for _, c := range f.Conditions {
		if c == sandbox.ConditionClockOffset || c == sandbox.ConditionFrozenClock || c == sandbox.ConditionRandomSeed || c == sandbox.ConditionFiles {
			t.Errorf("the condition %q is offered", c)
		}
	}
}

// foreignC is a program without a vDSO.
const foreignC = `#include <sys/auxv.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>
int main() {
	unsigned long fs, size = 4096;
	if (syscall(SYS_arch_prctl, 0x1003, &fs)) return 2;
	while (munmap((void *)getauxval(AT_SYSINFO_EHDR), size)) // a part of it cannot be
		if ((size += 4096) > 65536) return 3;
	return syscall(SYS_arch_prctl, 0x1002, fs) ? 1 : 0;
}`

// TestForeignProgramsEndTheRun: a run never continues under other conditions than its own, monitored or not.
func TestForeignProgramsEndTheRun(t *testing.T) {
	t.Parallel()
	b := conditioned(t, sandbox.ConditionClockOffset, sandbox.ConditionRandomSeed)
	dir := t.TempDir()
	if !build(t, dir, "foreign.c", foreignC, "gcc", "-o", "foreign", "foreign.c") {
		lacks(t, "gcc")
	}
	for _, audit := range []sandbox.Audit{sandbox.AuditOff, sandbox.AuditViolations} {
		for _, own := range []sandbox.Conditions{{}, {ClockOffset: time.Hour}, {FrozenClock: 1}, {RandomSeed: 1}} {
			r := sandboxtest.Run{Spec: func(s *sandbox.Spec) {
				s.Args, s.Conditions, s.Audit = []string{"/foreign/foreign"}, own, audit
				s.Inputs = append(s.Inputs, sandbox.Input{Target: "/foreign", Content: "x", Source: dir})
			}}
			err := r.Try(t.Context(), t, b)
			if own == (sandbox.Conditions{}) {
				expect.That(t, err == nil && r.Result.ExitCode == 0,
					"audit %q: a usual run: %v, %+v", audit, err, r.Result)
			} else if err == nil || !strings.Contains(err.Error(), "conditions of the run") {
				t.Errorf("audit %q, %+v: got %v", audit, own, err)
			}
		}
	}
}
