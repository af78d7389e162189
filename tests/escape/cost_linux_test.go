// SPDX-License-Identifier: Apache-2.0

package escape_test

import (
	"slices"
	"testing"
	"time"

	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/sandbox/gvisor"
	"github.com/cloister-build/cloister/sandbox/microvm"
	"github.com/cloister-build/cloister/sandbox/namespace"
	"github.com/cloister-build/cloister/sandbox/sandboxtest"
	"github.com/cloister-build/cloister/tests/guestkernel"
	"github.com/cloister-build/cloister/tests/must"
)

// BenchmarkBackends measures one run at a time in each backend: its first run, which starts what later ones reuse, and
// the minimum, median and maximum of the others; and the median time until the command starts and of processor time, in
// gVisor with that of gVisor.
func BenchmarkBackends(b *testing.B) {
	guestkernel.Use()
	useRunsc(b)
	for _, backend := range []struct {
		name string
		make func() sandbox.Backend
	}{
		{"namespace", func() sandbox.Backend { return namespace.New(namespace.Config{}) }},
		{"gvisor", gvisor.New},
		{"qemu-tcg", func() sandbox.Backend { return microvm.NewQEMU(true) }},
	} {
		for _, work := range []struct{ name, script string }{
			{"true", "exec /bin/true"},
			{"compile", "printf '#include <stdio.h>\nint main(void) { return puts(\"x\") < 0; }\n' > a.c && gcc -c a.c"},
			{"write1000", "for i in $(seq 1000); do echo > f$i; done"},
			{"read1000", "for i in $(seq 1000); do : < /bin/sh; done"},
		} {
			b.Run(backend.name+"/"+work.name, func(b *testing.B) {
				if why := guestkernel.Missing(); backend.name == "qemu-tcg" && why != "" {
					sandboxtest.Unavailable(b, "qemu", why)
				}
				measure(b, backend.make(), work.script)
			})
		}
	}
}

func measure(b *testing.B, backend sandbox.Backend, script string) {
	defer backend.Close()
	var total, before, cpu []time.Duration
	run := func() time.Duration {
		r := sandboxtest.Run{Script: script}
		began := time.Now()
		r.Do(b, backend)
		took := time.Since(began)
		must.Be(b, r.Result.ExitCode == 0, "exit code %d: %s", r.Result.ExitCode, r.Stderr)
		total, before = append(total, took), append(before, r.Result.Start.Sub(began))
		cpu = append(cpu, r.Result.Usage.User+r.Result.Usage.System)
		return took
	}
	first := run()
	run() // fills caches
	total, before, cpu = nil, nil, nil
	for b.Loop() {
		run()
	}
	for _, d := range [][]time.Duration{total, before, cpu} {
		slices.Sort(d)
	}
	report := func(d time.Duration, name string) { b.ReportMetric(float64(d.Microseconds())/1000, "ms-"+name) }
	report(first, "first")
	report(total[0], "min")
	report(total[len(total)/2], "median")
	report(total[len(total)-1], "max")
	report(before[len(before)/2], "until-start")
	report(cpu[len(cpu)/2], "cpu")
}
