// SPDX-License-Identifier: Apache-2.0

package escape_test

import (
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/cloister-build/cloister/sandbox/gvisor"
	"github.com/cloister-build/cloister/sandbox/sandboxtest"
)

// ownKernel are the attacks that tell the host's kernel from gVisor's, and what they find there.
var ownKernel = map[string]string{
	"absent":   "/proc describes gVisor's kernel, and nothing of this machine",
	"identity": "ID maps are those of gVisor's only user namespace",
	"init":     "the namespaces and descriptors of pid 1 can be listed in /proc; its signals are in PidOneCannotBeSignalled",
	"mounts":   "the run is in a control group of gVisor's kernel, /run",
	"route":    "gVisor lacks the call with which the attack begins",
}

// useRunsc selects what make gvisor builds, unless somebody chose another.
func useRunsc(t testing.TB) {
	if built, err := filepath.Abs("../../bin/runsc"); err == nil && os.Getenv("RUNSC_PATH") == "" {
		if _, err := os.Stat(built); err == nil {
			t.Setenv("RUNSC_PATH", built)
		}
	}
}

// TestEscapesFromGVisor runs every attack in gVisor, with all of its layers.
func TestEscapesFromGVisor(t *testing.T) {
	w := newFixture(t)
	useRunsc(t)
	b := gvisor.New()
	t.Cleanup(func() { b.Close() })
	f, err := b.Probe(t.Context())
	if err != nil {
		sandboxtest.Unavailable(t, "gvisor", err)
	}
	all := w.backend(t, nil)
	for key, other := range w.backends {
		if other == all {
			w.backends[key] = b
		}
	}
	w.features[b] = f
	var rows table
	for _, g := range guarantees(w) {
		t.Run(g.name, func(t *testing.T) {
			ran := false
			defer func() { rows.add(&g, t, ran, "gVisor") }()
			if g.limit != "" && !slices.Contains(f.Limits, g.limit) {
				sandboxtest.Unavailable(t, "limits", "this worker cannot limit "+string(g.limit))
			}
			if why := ownKernel[g.name]; why != "" {
				t.Skip(why)
			}
			ran = true
			w.confined(t, &f, &g)
		})
	}
	t.Logf("guarantees of the sandbox in gVisor, tier %s:\n%s", f.Tier, rows.String())
}
