// SPDX-License-Identifier: Apache-2.0

package namespace_test

import (
	"os"
	"os/exec"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/sandbox/namespace"
	"github.com/cloister-build/cloister/sandbox/sandboxtest"
	"github.com/cloister-build/cloister/tests/must"
)

// workloads are commands whose cost is measured.
var workloads = []struct {
	name string
	args []string
}{
	{"true", []string{"/bin/true"}},
	{"compile", shell("printf '#include <stdio.h>\nint main(void) { return puts(\"x\") < 0; }\n' > a.c && gcc -c a.c")},
	{"write1000", shell("for i in $(seq 1000); do echo > f$i; done")},
	{"read1000", shell("for i in $(seq 1000); do : < /bin/sh; done")},
}

func shell(script string) []string { return []string{"/bin/sh", "-c", script} }

// BenchmarkCost measures each layer: every workload without a sandbox, in bare namespaces, and with more and more
// layers.
func BenchmarkCost(b *testing.B) {
	bare := slices.Concat(namespace.NamespacesOnly, []namespace.Layer{namespace.Cgroups, namespace.Rlimits, namespace.Capabilities})
	for _, w := range workloads {
		args := w.args
		b.Run(w.name+"/none", func(b *testing.B) {
			for b.Loop() {
				dir, err := os.MkdirTemp("/dev/shm", "cost")
				if err != nil {
					b.Skip(err)
				}
				cmd := exec.Command(args[0], args[1:]...)
				cmd.Dir = dir
				if out, err := cmd.CombinedOutput(); err != nil {
					b.Fatalf("%v: %s", err, out)
				}
				os.RemoveAll(dir)
			}
		})
		for _, c := range []struct {
			name    string
			without []namespace.Layer
			audit   sandbox.Audit
		}{
			{"bare", bare, sandbox.AuditOff},
			{"limits", namespace.NamespacesOnly, sandbox.AuditOff},
			{"landlock", []namespace.Layer{namespace.Seccomp, namespace.Monitor}, sandbox.AuditOff},
			{"seccomp", nil, sandbox.AuditOff},
			{"default", nil, sandbox.AuditViolations},
			{"full-audit", nil, sandbox.AuditFull}, // and with a source tree, as serve --source-tree has it
		} {
			b.Run(w.name+"/"+c.name, func(b *testing.B) {
				config := namespace.Config{Without: c.without}
				if c.audit == sandbox.AuditFull {
					dir := b.TempDir()
					config.Source = map[string]string{"/build": dir, dir: dir}
				}
				be := namespace.New(config)
				defer be.Close()
				if _, err := be.Probe(b.Context()); err != nil {
					sandboxtest.Unavailable(b, "namespaces", err)
				}
				r := sandboxtest.Run{Spec: func(s *sandbox.Spec) {
					s.Args, s.Audit = args, c.audit
					if slices.Contains(c.without, namespace.Rlimits) {
						s.Limits.Processes, s.Limits.OpenFiles = sandbox.Unlimited, sandbox.Unlimited
					}
				}}
				for b.Loop() {
					r.Do(b, be)
					must.Be(b, r.Result.ExitCode == 0, "exit code %d: %s", r.Result.ExitCode, r.Stderr)
				}
			})
		}
	}
}

// BenchmarkObservation compares runs with the syscall monitor and without it, by the CPU time of the runs and of this
// process, which monitors them. Both alternate; the median, least and greatest ratio of batches are reported.
// The slots are not counted: they do less with a monitor, because they then know whether a run has used its network.
func BenchmarkObservation(b *testing.B) {
	const batch = 30
	audits := []sandbox.Audit{sandbox.AuditOff, sandbox.AuditViolations}
	be := namespace.New(namespace.Config{})
	defer be.Close()
	if _, err := be.Probe(b.Context()); err != nil {
		sandboxtest.Unavailable(b, "namespaces", err)
	}
	for _, w := range workloads {
		b.Run(w.name, func(b *testing.B) {
			var ratios []float64
			for b.Loop() {
				var took [2]time.Duration
				for i := range 2 * batch {
					observed := (len(ratios) + i) % 2 // each is first in half of the pairs
					r := sandboxtest.Run{Spec: func(s *sandbox.Spec) { s.Args, s.Audit = w.args, audits[observed] }}
					before := ownCPU(b)
					if r.Do(b, be); r.Result.ExitCode != 0 {
						b.Fatalf("exit code %d: %s", r.Result.ExitCode, r.Stderr)
					}
					took[observed] += ownCPU(b) - before + r.Result.Usage.User + r.Result.Usage.System
				}
				ratios = append(ratios, float64(took[1])/float64(took[0]))
			}
			slices.Sort(ratios)
			b.ReportMetric(ratios[len(ratios)/2], "median")
			b.ReportMetric(ratios[0], "least")
			b.ReportMetric(ratios[len(ratios)-1], "greatest")
			b.ReportMetric(0, "ns/op") // which others on this machine change
		})
	}
}

// ownCPU returns the CPU time of this process.
func ownCPU(b *testing.B) time.Duration {
	b.Helper()
	var u unix.Rusage
	must.Succeed(b, unix.Getrusage(unix.RUSAGE_SELF, &u))
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}
