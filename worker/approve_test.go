// SPDX-License-Identifier: Apache-2.0

package worker

import (
	"context"
	"os"
	"testing"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/tests/expect"
)

// Approve is called only for cacheable results.
func TestOnlyApprovedResultsAreCached(t *testing.T) {
	exit := 0
	b := newBench(t, func(context.Context, *sandbox.Spec, sandbox.Stdio, *os.Root) *sandbox.Result {
		return &sandbox.Result{ExitCode: exit}
	})
	action := b.action(nil)
	asked := 0
	approve := func(yes bool) func(context.Context, *Outcome) bool {
		return func(_ context.Context, out *Outcome) bool {
			if asked++; out.Result == nil || b.recorded(action) {
				t.Error("Approve was called without a result, or after it was cached")
			}
			return yes
		}
	}
	if b.do(&Task{Action: action, Approve: approve(false)}); asked != 1 || b.recorded(action) {
		t.Errorf("got %d calls, cached %v, want 1 call and no cached result", asked, b.recorded(action))
	}
	exit = 1
	b.do(&Task{Action: action, Approve: approve(true)})
	exit = 0
	b.do(&Task{Action: action, Approve: approve(true), Variation: &Variation{}})
	alone := b.action(func(a *repb.Action, _ *repb.Command) { a.DoNotCache = true })
	b.do(&Task{Action: alone, Approve: approve(true)})
	expect.That(t, asked == 1 && !b.recorded(action) && !b.recorded(alone),
		"got %d calls for uncacheable results", asked-1)
	if b.do(&Task{Action: action, Approve: approve(true)}); asked != 2 || !b.recorded(action) {
		t.Error("the approved result is not cached")
	}
}
