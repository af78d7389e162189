// SPDX-License-Identifier: Apache-2.0

package results

import (
	"testing"
	"testing/synctest"
	"time"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/castest"
	cloisterpb "github.com/cloister-build/cloister/proto/cloister/v1"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
	"google.golang.org/protobuf/types/known/anypb"
)

// TestResultsBeforeANoticedChange: results that were recorded since the last scan of all files are not served once a
// scan finds another toolchain. Older results, and those that another program has replaced, stay.
func TestResultsBeforeANoticedChange(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		all := castest.Instances()
		toolchain, scanned := "old", time.Now()
		c := NewConfirmer(all, func() (string, time.Time) { return toolchain, scanned }, nil)
		defer c.Close()
		actions := must.Get(c.Watch(all)(""))(t).Actions
		record := func(text, toolchain string) cas.Digest {
			action := cas.SHA256.Sum([]byte(text))
			e := must.Get(anypb.New(&cloisterpb.Execution{Toolchain: toolchain, StableHash: text}))(t)
			must.Succeed(t, actions.Record(t.Context(), action, &repb.ActionResult{
				ExecutionMetadata: &repb.ExecutedActionMetadata{AuxiliaryMetadata: []*anypb.Any{e}},
			}))
			return action
		}
		wait := func() {
			time.Sleep(2 * confirmInterval)
			synctest.Wait()
		}
		want := func(action cas.Digest, toolchain string) {
			t.Helper()
			e := Recorded(must.Get(must.Get(all(""))(t).Actions.Lookup(t.Context(), action))(t))
			expect.Equal(t, e.GetToolchain(), toolchain, "result %s", e.GetStableHash())
		}
		confirmed := record("confirmed", "old")
		wait()
		time.Sleep(time.Second)
		scanned = time.Now()
		wait()
		expect.Equal(t, len(c.unconfirmed), 0, "results that await a scan")
		stale, replaced, other := record("stale", "old"), record("replaced", "old"), record("other", "")
		wait()
		want(stale, "old")
		record("replaced", "new")
		toolchain = "new"
		wait()
		want(confirmed, "old")
		want(stale, ChangedToolchain)
		want(replaced, "new")
		want(other, "")
		for _, required := range []string{"old", "new"} {
			shown := must.Get(Filter(all, OtherToolchain(func() string { return required }))(""))(t).Actions
			expect.Error(t, expect.Err(shown.Lookup(t.Context(), stale)), cas.ErrNotFound, "for the toolchain %s", required)
		}
	})
}
