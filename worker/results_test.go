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
	cloisterpb "github.com/cloister-build/cloister/proto/cloister/v1"
	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
	"github.com/cloister-build/cloister/worker/internal/results"
	"google.golang.org/protobuf/types/known/anypb"
)

// TestResultsOfAnotherToolchainAreMisses: a result records the toolchain that made it, and is served only while the
// machine has that one. Results that state none are served.
func TestResultsOfAnotherToolchainAreMisses(t *testing.T) {
	b := newBench(t, compiles)
	now := "gcc 14"
	b.cfg.Fingerprint = func() string { return now }
	instances := results.Filter(b.cfg.Instances, results.OtherToolchain(b.cfg.Fingerprint))
	in := must.Get(instances(""))(t)
	action := b.action(nil)
	out := b.do(&Task{Action: action})
	if meta, text := b.execution(out).Toolchain, b.manifest(out).Volatile.Fingerprint; meta != now || text != now {
		t.Errorf("got toolchain %q in the metadata and %q in the manifest, want %q", meta, text, now)
	}
	foreign := cas.SHA256.Sum([]byte("an action of another program"))
	must.Succeed(t, in.Actions.Record(t.Context(), foreign, &repb.ActionResult{StdoutRaw: []byte("x")}))
	for _, c := range []struct {
		toolchain string
		served    bool
	}{{"gcc 14", true}, {"gcc 15", false}, {"", true}, {"gcc 14", true}} {
		now = c.toolchain
		if _, err := in.Actions.Lookup(t.Context(), action); (err == nil) != c.served || err != nil && !errors.Is(err, cas.ErrNotFound) {
			t.Errorf("toolchain %q: got %v, want the result served: %t", c.toolchain, err, c.served)
		}
		expect.Error(t, expect.Err(in.Actions.Lookup(t.Context(), foreign)), nil,
			"toolchain %q: a result that states no toolchain", c.toolchain)
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
	out := b.do(&Task{Action: action})
	expect.That(t, out.Uncacheable && !b.recorded(action),
		"got uncacheable %t, recorded %t, want the result not cached", out.Uncacheable, b.recorded(action))
	expect.Equal(t, b.execution(out).Toolchain, "", "metadata: toolchain")
}

// TestUnreadableToolchain: a result is not cached if the toolchain that made it cannot be identified.
func TestUnreadableToolchain(t *testing.T) {
	b := newBench(t, compiles)
	b.cfg.Fingerprint = func() string { return "" }
	action := b.action(nil)
	if out := b.do(&Task{Action: action}); !out.Uncacheable || b.recorded(action) {
		t.Errorf("got uncacheable %t, recorded %t, want the result not cached", out.Uncacheable, b.recorded(action))
	}
}

// TestResultsOfAnotherImageAreMisses: a result whose image the action does not determine is a miss unless the operator
// permits it, and one of this machine where the default properties name an image.
func TestResultsOfAnotherImageAreMisses(t *testing.T) {
	for _, c := range []struct {
		name      string
		made      *cloisterpb.Execution
		permitted bool
		byDefault bool
		served    bool
	}{
		{"of this machine", &cloisterpb.Execution{Toolchain: "a"}, false, false, true},
		{"of this machine, with a default image", &cloisterpb.Execution{Toolchain: "a"}, true, true, false},
		{"of this machine, as the action says", &cloisterpb.Execution{Toolchain: "a", Image: results.NoImage}, false, true, true},
		{"pinned", &cloisterpb.Execution{Image: "x@sha256:1"}, false, true, true},
		{"unpinned", &cloisterpb.Execution{Image: "x@sha256:1", Unpinned: true}, false, false, false},
		{"unpinned, permitted", &cloisterpb.Execution{Image: "x@sha256:1", Unpinned: true}, true, false, true},
	} {
		aux := must.Get(anypb.New(c.made))(t)
		r := &repb.ActionResult{ExecutionMetadata: &repb.ExecutedActionMetadata{AuxiliaryMetadata: []*anypb.Any{aux}}}
		refuse := results.OtherImage(c.permitted, func(string) bool { return c.byDefault })
		if why := refuse("", cas.Digest{}, r); (why == "") != c.served {
			t.Errorf("%s: got refusal %q, want it served: %t", c.name, why, c.served)
		}
	}
}
