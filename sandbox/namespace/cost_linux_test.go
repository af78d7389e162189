// SPDX-License-Identifier: Apache-2.0

package namespace_test

import (
	"os"
	"os/exec"
	"slices"
	"testing"

	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/sandbox/namespace"
	"github.com/cloister-build/cloister/sandbox/sandboxtest"
)

// BenchmarkCost measures each layer: every workload without a sandbox, in bare namespaces, and with more and more
// layers.
func BenchmarkCost(b *testing.B) {
	bare := slices.Concat(namespace.NamespacesOnly, []namespace.Layer{namespace.Cgroups, namespace.Rlimits, namespace.Capabilities})
	for _, w := range []struct{ name, script string }{
		{"true", ""},
		{"compile", "printf '#include <stdio.h>\nint main(void) { return puts(\"x\") < 0; }\n' > a.c && gcc -c a.c"},
		{"write1000", "for i in $(seq 1000); do echo > f$i; done"},
		{"read1000", "for i in $(seq 1000); do : < /bin/sh; done"},
	} {
		args := []string{"/bin/sh", "-c", w.script}
		if w.script == "" {
			args = []string{"/bin/true"}
		}
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
					if r.Result.ExitCode != 0 {
						b.Fatalf("exit code %d: %s", r.Result.ExitCode, r.Stderr)
					}
				}
			})
		}
	}
}
