// SPDX-License-Identifier: Apache-2.0

package console

import (
	"bufio"
	"context"
	"encoding/json"
	"net/http"
	"strings"
	"testing"

	bepb "github.com/cloister-build/cloister/proto/bazel/buildeventstream"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
	bespb "google.golang.org/genproto/googleapis/devtools/build/v1"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"
)

// A publication is the stream of events of the build with the id build.
type publication struct {
	*testing.T
	stream bespb.PublishBuildEvent_PublishBuildToolEventStreamClient
	number int64
}

// publish begins a stream.
func (s *site) publish(t *testing.T) *publication {
	t.Helper()
	conn, _, err := s.server.Dial()
	must.Succeed(t, err)
	t.Cleanup(func() { conn.Close() })
	return &publication{T: t, stream: must.Get(bespb.NewPublishBuildEventClient(conn).PublishBuildToolEventStream(t.Context()))(t)}
}

// send sends an event of Bazel's, nil for the end, and waits until it is stored.
func (p *publication) send(e *bepb.BuildEvent) {
	p.Helper()
	event := &bespb.BuildEvent{Event: &bespb.BuildEvent_ComponentStreamFinished{ComponentStreamFinished: &bespb.BuildEvent_BuildComponentStreamFinished{}}}
	if e != nil {
		value := must.Get(proto.Marshal(e))(p)
		event.Event = &bespb.BuildEvent_BazelEvent{BazelEvent: &anypb.Any{TypeUrl: "type.googleapis.com/build_event_stream.BuildEvent", Value: value}}
	}
	p.number++
	must.Succeed(p, p.stream.Send(&bespb.PublishBuildToolEventStreamRequest{OrderedBuildEvent: &bespb.OrderedBuildEvent{
		StreamId: &bespb.StreamId{InvocationId: build, BuildId: build}, SequenceNumber: p.number, Event: event,
	}}))
	must.Get(p.stream.Recv())(p)
}

func printed(text string) *bepb.BuildEvent {
	return &bepb.BuildEvent{Payload: &bepb.BuildEvent_Progress{Progress: &bepb.Progress{Stderr: text}}}
}

// A viewer reads a feed.
type viewer struct {
	*testing.T
	lines *bufio.Scanner
}

// view opens a feed until ctx ends.
func (s *site) view(ctx context.Context, t *testing.T, path string) *viewer {
	t.Helper()
	r := must.Get(http.NewRequestWithContext(ctx, http.MethodGet, s.URL+path, nil))(t)
	answer := must.Get(s.Client().Do(r))(t) //nolint:bodyclose // it is closed below
	t.Cleanup(func() { answer.Body.Close() })
	must.Be(t, answer.StatusCode == http.StatusOK, "%s: %s", path, answer.Status)
	v := &viewer{t, bufio.NewScanner(answer.Body)}
	v.lines.Buffer(nil, maxPage)
	return v
}

// next returns the next snapshot, or "" at the end.
func (v *viewer) next() (html string) {
	v.Helper()
	for v.lines.Scan() {
		if text, ok := strings.CutPrefix(v.lines.Text(), "data: "); ok {
			must.Succeed(v, json.Unmarshal([]byte(text), &html))
			return html
		}
		if v.lines.Text() == "event: over" {
			return ""
		}
	}
	v.Fatalf("the feed ended without the event over: %v", v.lines.Err())
	return ""
}

// until returns the first snapshot with a text.
func (v *viewer) until(text string) string {
	v.Helper()
	for {
		html := v.next()
		must.Be(v, html != "", "the feed ended without %q", text)
		if strings.Contains(html, text) {
			return html
		}
	}
}

// TestBuildIsFollowed: viewers of a build get what Bazel publishes until it ends, and one who leaves is forgotten.
func TestBuildIsFollowed(t *testing.T) {
	s := open(t, "")
	const feed = `data-events="/i/` + build + `/events"`
	page := func() string {
		_, body := s.get(t, "/i/"+build, nil)
		return body
	}
	expect.That(t, !strings.Contains(page(), feed), "a build without events has a feed")
	p := s.publish(t)
	p.send(printed("Loading\n"))
	expect.That(t, strings.Contains(page(), feed), "got %s", page())
	ctx, leave := context.WithCancel(t.Context())
	leaver := s.view(ctx, t, "/i/"+build[:8]+"/events")
	v := s.view(t.Context(), t, "/i/"+build+"/events")
	for _, one := range []*viewer{v, leaver} {
		expect.Text(t, one.next(), "running", "first snapshot")
	}
	p.send(&bepb.BuildEvent{
		Id:      &bepb.BuildEventId{Id: &bepb.BuildEventId_TargetConfigured{TargetConfigured: &bepb.BuildEventId_TargetConfiguredId{Label: "//a:b"}}},
		Payload: &bepb.BuildEvent_Configured{Configured: &bepb.TargetConfigured{TargetKind: "cc_test rule"}},
	})
	expect.Text(t, v.until("//a:b"), "running", "with a target")
	leave()
	must.Hold(t, "forgot the viewer who left", func() bool {
		s.live.mu.Lock()
		defer s.live.mu.Unlock()
		return s.live.total == 1 && len(s.live.snapshots) == 1
	})
	p.send(printed("and <b>more</b>\n"))
	expect.Text(t, v.until("and &lt;b&gt;more"), "Loading", "the log")
	p.send(&bepb.BuildEvent{Payload: &bepb.BuildEvent_Finished{Finished: &bepb.BuildFinished{ExitCode: &bepb.BuildFinished_ExitCode{Code: 3, Name: "TESTS_FAILED"}}}})
	p.send(nil)
	must.Succeed(t, p.stream.CloseSend())
	last := v.until("TESTS_FAILED")
	for html := last; html != ""; html = v.next() {
		last = html
	}
	expect.Text(t, last, "and &lt;b&gt;more", "the last snapshot")
	expect.That(t, !v.lines.Scan() || v.lines.Text() == "data:", "got %q after the end", v.lines.Text())
	expect.That(t, !strings.Contains(page(), feed), "an ended build has a feed")
	must.Hold(t, "forgot both viewers", func() bool {
		s.live.mu.Lock()
		defer s.live.mu.Unlock()
		return s.live.total == 0 && len(s.live.snapshots) == 0
	})
	var o overviewData
	_, body := s.get(t, "/index.json", nil)
	must.Succeed(t, json.Unmarshal([]byte(body), &o))
	expect.That(t, len(o.Builds) == 1 && o.Builds[0].Status == "failed" && o.Builds[0].Executed == 1, "got %s", body)
}
