// SPDX-License-Identifier: Apache-2.0

package escape_test

import (
	"context"
	"errors"
	"flag"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/sandbox/namespace"
	"github.com/cloister-build/cloister/sandbox/sandboxtest"
	"github.com/cloister-build/cloister/tests/must"
)

var neighbours = flag.Int("neighbours", 0, "number of compiles that TestNeighbours measures beside each action; 0 skips it")

// bombs are actions that take as much of one resource as they get, until they are killed.
var bombs = []struct{ name, script string }{
	{"nothing", "sleep 1000"},
	{"a busy process", "while :; do :; done"},
	{"128 busy processes", "for i in $(seq 127); do while :; do :; done & done; while :; do :; done"},
	{"a fork bomb", "bomb() { bomb | bomb & }; while :; do bomb; done 2>/dev/null"},
	{"memory up to its limit", "while :; do head -c 3000000000 /dev/zero | tail -n 1 >/dev/null; done"},
	{"memory beyond its limit", "head -c 8000000000 /dev/zero | tail -n 1"},
	{"writes", "while :; do dd if=/dev/zero of=f bs=1M count=1024 conv=notrunc 2>/dev/null; done"},
	{"many files", "while :; do mkdir d; for i in $(seq 10000); do :> d/$i; done; rm -r d; done"},
}

// compileScript takes about a second alone.
const compileScript = `echo '#include <regex>
int f(const char *s) { return std::regex_match(s, std::regex("a*b|c+d")); }' >f.cc && g++ -O1 -c f.cc`

// TestNeighbours prints by which factor one action is slower beside another that takes as much as it can, with and
// without control groups. It asserts nothing about time, and needs a quiet machine.
func TestNeighbours(t *testing.T) {
	if *neighbours == 0 {
		t.Skip("optional: measures only with -neighbours")
	}
	for _, without := range [][]namespace.Layer{nil, {namespace.Cgroups}} {
		b := namespace.New(namespace.Config{Without: without})
		defer b.Close()
		features, err := b.Probe(t.Context())
		if err != nil {
			sandboxtest.Unavailable(t, "namespaces", err)
		}
		var alone time.Duration
		for _, bomb := range bombs {
			took := besides(t, b, features, bomb.script)
			if alone == 0 {
				alone = took
			}
			t.Logf("neighbours: without %-9v beside %-24s %5.2f s, %.2f times", without, bomb.name, took.Seconds(), float64(took)/float64(alone))
		}
	}
}

// besides returns the median duration of compiles while another run executes script, again and again if it ends.
func besides(t *testing.T, b sandbox.Backend, features sandbox.Features, script string) time.Duration {
	ctx, cancel := context.WithCancel(t.Context())
	var bombs sync.WaitGroup
	defer bombs.Wait()
	defer cancel()
	defaults := func(s *sandbox.Spec) {
		s.Limits, s.Timeout = sandbox.DefaultLimits(), 10*time.Minute
		relax(s, features)
	}
	bombs.Go(func() {
		for ctx.Err() == nil {
			r := sandboxtest.Run{Script: script, Spec: defaults}
			if err := r.Try(ctx, t, b); err != nil && !errors.Is(err, context.Canceled) {
				t.Errorf("run %q: %v", script, err)
				return
			}
		}
	})
	var took []time.Duration
	for range *neighbours {
		r := sandboxtest.Run{Script: compileScript, Spec: defaults}
		start := time.Now()
		must.Succeed(t, r.Try(t.Context(), t, b))
		must.Be(t, r.Result.ExitCode == 0, "the compile: got exit code %d and %q, want 0", r.Result.ExitCode, r.Stderr)
		took = append(took, time.Since(start))
	}
	slices.Sort(took)
	return took[len(took)/2]
}
