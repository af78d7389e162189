// SPDX-License-Identifier: Apache-2.0

package console

import (
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
	"github.com/cloister-build/cloister/worker/history"
)

// timed returns a page, which must be OK, and logs how long that took.
func (s *site) timed(t *testing.T, path string) string {
	t.Helper()
	begun := time.Now()
	r, body := s.get(t, path, nil)
	must.Be(t, r.StatusCode == http.StatusOK, "%s: %s: %.500s", path, r.Status, body)
	t.Logf("%s: %d bytes in %v", path, len(body), time.Since(begun))
	return body
}

// TestLargeBuildIsPaged: the pages of a build with 10,000 actions show parts of it that do not grow with it.
func TestLargeBuildIsPaged(t *testing.T) {
	s := open(t, "")
	const n = 10_000
	end := time.Now()
	for i := range n {
		s.log.Add(history.Entry{
			How: history.Executed, Time: end.Add(time.Duration(i) * time.Millisecond), Action: fmt.Sprintf("%064x/%d", i, 100), Invocation: build,
			Target: fmt.Sprintf("//pkg/%d:target", i), Mnemonic: fmt.Sprint("Kind", i%50), Worker: fmt.Sprint("worker", i%8),
			Ran: time.Duration(i%1000+1) * time.Millisecond, Result: "r", Exit: int32(i % 2),
		})
		if i%1000 == 0 { // a search waits until the buffer is written
			must.Succeed(t, s.log.Search(t.Context(), history.Filter{}, 1, func(*history.Entry) error { return nil }))
		}
	}
	page := s.timed(t, "/i/"+build)
	expect.That(t, len(page) < 512<<10, "the page has %d bytes", len(page))
	var d invocationData
	must.Succeed(t, json.Unmarshal([]byte(s.timed(t, "/i/"+build+".json")), &d))
	expect.That(t, d.Executed == n+1 && d.Failed == n/2+1, "got %d executed, %d failed", d.Executed, d.Failed)
	expect.That(t, len(d.Timeline.Bars) == maxBars && d.Timeline.Omitted == n+1-maxBars, "got %d bars and %d omitted", len(d.Timeline.Bars), d.Timeline.Omitted)
	expect.That(t, len(d.Slowest) == maxRows && len(d.Failures) == maxRows, "got %d slowest and %d failures", len(d.Slowest), len(d.Failures))
	expect.That(t, d.Timeline.Bars[0].Seconds >= 0.9, "the timeline has an action of %v s", d.Timeline.Bars[0].Seconds)
	seen := 0
	for path := "/actions.json?limit=1000&invocation=" + build; path != ""; {
		var list listData
		must.Succeed(t, json.Unmarshal([]byte(s.timed(t, path)), &list))
		seen += len(list.Rows)
		path = strings.Replace(list.Older, "/actions?", "/actions.json?", 1)
	}
	expect.Equal(t, seen, n+1, "actions on all pages")
}
