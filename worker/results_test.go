// SPDX-License-Identifier: Apache-2.0

package worker

import (
	"context"
	"errors"
	"os"
	"sync/atomic"
	"testing"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/worker/internal/results"
)

// TestResultsOfAnotherToolchainAreMisses: a result records the toolchain that made it, and is served only while the machine
// has that one. Results that state none are served.
func TestResultsOfAnotherToolchainAreMisses(t *testing.T) {
	b := newBench(t, compiles)
	now := "gcc 14"
	b.cfg.Fingerprint = func() string { return now }
	instances := results.Filter(b.cfg.Instances, results.OtherToolchain(b.cfg.Fingerprint))
	in, err := instances("")
	if err != nil {
		t.Fatal(err)
	}
	action := b.action(nil)
	if got := b.execution(b.do(&Task{Action: action})).Toolchain; got != now {
		t.Errorf("metadata: got toolchain %q, want %q", got, now)
	}
	foreign := cas.SHA256.Sum([]byte("an action of another program"))
	if err := in.Actions.Record(t.Context(), foreign, &repb.ActionResult{StdoutRaw: []byte("x")}); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		toolchain string
		served    bool
	}{{"gcc 14", true}, {"gcc 15", false}, {"", true}, {"gcc 14", true}} {
		now = c.toolchain
		if _, err := in.Actions.Lookup(t.Context(), action); (err == nil) != c.served || err != nil && !errors.Is(err, cas.ErrNotFound) {
			t.Errorf("toolchain %q: got %v, want the result served: %t", c.toolchain, err, c.served)
		}
		if _, err := in.Actions.Lookup(t.Context(), foreign); err != nil {
			t.Errorf("toolchain %q: a result that states no toolchain: got %v", c.toolchain, err)
		}
	}
	now = "gcc 15"
	b.cfg.Instances = instances
	if out := b.do(&Task{Action: action}); out.Cached {
		t.Error("the worker took the result of another toolchain from the action cache")
	}
	if out := b.do(&Task{Action: action}); !out.Cached {
		t.Error("the second run with the new toolchain was not answered from the action cache")
	}
}

// TestToolchainChangesDuringARun: nobody knows which toolchain such a run saw, so its result is not cached.
func TestToolchainChangesDuringARun(t *testing.T) {
	var changes atomic.Int64
	b := newBench(t, func(ctx context.Context, spec *sandbox.Spec, std sandbox.Stdio, out *os.Root) *sandbox.Result {
		changes.Add(1)
		return compiles(ctx, spec, std, out)
	})
	b.cfg.Fingerprint = func() string { return string(rune('a' + changes.Load())) }
	action := b.action(nil)
	if out := b.do(&Task{Action: action}); !out.Uncacheable || b.recorded(action) {
		t.Errorf("got uncacheable %t, recorded %t, want the result not cached", out.Uncacheable, b.recorded(action))
	}
}
