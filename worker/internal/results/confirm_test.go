// SPDX-License-Identifier: Apache-2.0

package results

import (
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/castest"
	"github.com/cloister-build/cloister/cas/castest/faulty"
	cloisterpb "github.com/cloister-build/cloister/proto/cloister/v1"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
	"github.com/cloister-build/cloister/tests/syncbuf"
	"google.golang.org/protobuf/types/known/anypb"
)

// A host is what scans of a toolchain find.
type host struct {
	mu        sync.Mutex
	toolchain string
	scanned   time.Time // zero for now
}

func (h *host) set(toolchain string, scanned time.Time) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.toolchain, h.scanned = toolchain, scanned
}

// scan returns the fingerprint, and when the last scan began.
func (h *host) scan() (string, time.Time) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.scanned.IsZero() {
		return h.toolchain, time.Now()
	}
	return h.toolchain, h.scanned
}

// TestResultsBeforeANoticedChange: results that were recorded since the last scan of all files are not served once a
// scan finds another toolchain. Older results, and those that another program has replaced, stay.
func TestResultsBeforeANoticedChange(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		all := castest.Instances()
		h := &host{toolchain: "old", scanned: time.Now()}
		c := NewConfirmer(all, h.scan, nil)
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
		scanned := time.Now()
		h.set("old", scanned)
		wait()
		expect.Equal(t, len(c.unconfirmed), 0, "results that await a scan")
		stale, replaced, other := record("stale", "old"), record("replaced", "old"), record("other", "")
		wait()
		want(stale, "old")
		record("replaced", "new")
		h.set("new", scanned)
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

// failing returns a Confirmer with 20 results of a toolchain that has changed since, and their action cache, which
// tests make fail.
func failing(t *testing.T, h *host) (c *Confirmer, actions *faulty.Store, log *syncbuf.Buffer) {
	t.Helper()
	memory := castest.NewMemory()
	actions, log = faulty.New(memory, memory), new(syncbuf.Buffer)
	all := func(name string) (*cas.Instance, error) {
		return &cas.Instance{Name: name, Store: memory, Actions: actions}, nil
	}
	const toolchain = "old"
	h.set(toolchain, time.Time{})
	c = NewConfirmer(all, h.scan, slog.New(slog.NewTextHandler(log, nil)))
	watched := must.Get(c.Watch(all)(""))(t).Actions
	for i := range 20 {
		e := must.Get(anypb.New(&cloisterpb.Execution{Toolchain: toolchain}))(t)
		must.Succeed(t, watched.Record(t.Context(), cas.SHA256.Sum([]byte(fmt.Sprint(i))), &repb.ActionResult{
			ExecutionMetadata: &repb.ExecutedActionMetadata{AuxiliaryMetadata: []*anypb.Any{e}},
		}))
	}
	h.set("new", time.Time{})
	return c, actions, log
}

// TestFailedCorrectionsAreRepeated: results that could not be corrected are logged together and corrected later, even
// if the host has its previous toolchain again.
func TestFailedCorrectionsAreRepeated(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var h host
		c, actions, log := failing(t, &h)
		defer c.Close()
		actions.Fail(errors.New("the store is down"), faulty.Record)
		time.Sleep(3*confirmInterval + time.Second)
		synctest.Wait()
		text := log.String()
		expect.Equal(t, strings.Count(text, "level=WARN"), 1, "warnings")
		expect.Texts(t, text, []string{"results=20", "the store is down"})
		expect.That(t, !strings.Contains(text, "marked"), "got %s, want no marked results", text)
		h.set("old", time.Time{})
		actions.Heal()
		time.Sleep(confirmInterval)
		synctest.Wait()
		for i := range 20 {
			r := must.Get(actions.Lookup(t.Context(), cas.SHA256.Sum([]byte(fmt.Sprint(i)))))(t)
			expect.Equal(t, Recorded(r).GetToolchain(), ChangedToolchain, "toolchain of result %d", i)
		}
		expect.Text(t, log.String(), "marked cached results")
		expect.Equal(t, len(c.unconfirmed), 0, "results that await a correction")
	})
}

// TestFailedCorrectionsAreLimited: a comparison ends its corrections after ten failures. The next one begins with the
// other results, so that those which always fail do not block them.
func TestFailedCorrectionsAreLimited(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c, actions, _ := failing(t, new(host))
		defer c.Close()
		recorded := actions.Calls(faulty.Record)
		actions.Fail(errors.New("the store is down"), faulty.Record)
		var want []cas.Digest
		for i := range 20 {
			want = append(want, cas.SHA256.Sum([]byte(fmt.Sprint((i+10)%20))))
		}
		time.Sleep(confirmInterval)
		synctest.Wait()
		expect.Equal(t, actions.Calls(faulty.Record), recorded+10, "calls of Record")
		var got []cas.Digest
		for _, u := range c.unconfirmed {
			got = append(got, u.action)
		}
		expect.Slices(t, got, want, "results that await a correction")
	})
}

// TestCloseEndsCorrections: Close waits only for the correction in progress, and logs no failure.
func TestCloseEndsCorrections(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c, actions, log := failing(t, new(host))
		recorded := actions.Calls(faulty.Record)
		gate := actions.Hold(faulty.Record)
		gate.Arrived()
		c.Close()
		expect.Equal(t, actions.Calls(faulty.Record), recorded+1, "calls of Record")
		expect.Equal(t, log.String(), "", "log")
	})
}
