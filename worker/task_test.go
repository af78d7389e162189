// SPDX-License-Identifier: Apache-2.0

package worker

import (
	"context"
	"maps"
	"os"
	"strings"
	"testing"
	"time"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"
	"google.golang.org/protobuf/types/known/durationpb"
)

// Task.Auxiliary follows the worker's own metadata, also in the cached result.
func TestAuxiliaryIsCopiedIntoResult(t *testing.T) {
	b := newBench(t, compiles)
	theirs := must.Get(anypb.New(&repb.RequestMetadata{TargetId: "//a"}))(t)
	unknown := &anypb.Any{TypeUrl: "type.googleapis.com/unknown.Message", Value: []byte("\xff\x00")}
	action := b.action(nil)
	out := b.do(&Task{Action: action, Auxiliary: []*anypb.Any{theirs, unknown}})
	expect.That(t, b.execution(out).Manifest != "", "the worker's own metadata is not first")
	recorded := must.Get(b.store.Lookup(t.Context(), action))(t)
	for _, r := range []*repb.ActionResult{out.Result, recorded} {
		aux := r.ExecutionMetadata.AuxiliaryMetadata
		if n := len(aux); n < 3 || !proto.Equal(aux[n-2], theirs) || !proto.Equal(aux[n-1], unknown) {
			t.Errorf("got %v", aux)
		}
	}
}

func TestAuxiliaryCountsTowardsResultSize(t *testing.T) {
	b := newBench(t, compiles)
	out := b.do(&Task{Action: b.action(nil), Auxiliary: []*anypb.Any{{TypeUrl: "x", Value: make([]byte, MaxResult)}}})
	expect.That(t, len(out.Result.OutputFiles) == 0 && strings.Contains(out.Message, "more than the"),
		"got %d outputs and %q", len(out.Result.OutputFiles), out.Message)
}

func TestSmallestTimeoutApplies(t *testing.T) {
	var got time.Duration
	b := newBench(t, func(_ context.Context, spec *sandbox.Spec, _ sandbox.Stdio, _ *os.Root) *sandbox.Result {
		got = spec.Timeout
		return &sandbox.Result{}
	})
	for _, c := range []struct{ action, task, want time.Duration }{
		{0, 0, time.Hour},
		{0, time.Minute, time.Minute},
		{0, 2 * time.Hour, time.Hour},
		{10 * time.Minute, time.Minute, time.Minute},
		{10 * time.Minute, 20 * time.Minute, 10 * time.Minute},
	} {
		b.do(&Task{SkipCacheLookup: true, Timeout: c.task, Action: b.action(func(a *repb.Action, _ *repb.Command) {
			if c.action > 0 {
				a.Timeout = durationpb.New(c.action)
			}
		})})
		expect.Equal(t, got, c.want, "action %v, task %v", c.action, c.task)
	}
}

func TestParseTrace(t *testing.T) {
	const id, span = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
	const good = "00-" + id + "-" + span + "-01"
	for name, c := range map[string]struct {
		parent, state string
		want          map[string]string
	}{
		"no headers":           {"", "", nil},
		"parent":               {good, "", map[string]string{"traceparent": good}},
		"state":                {good, " a=b,c=d ", map[string]string{"traceparent": good, "tracestate": "a=b,c=d"}},
		"only a state":         {"", "a=b", nil},
		"a later version":      {"01-" + id + "-" + span + "-01-more", "", map[string]string{"traceparent": good}},
		"more in version 00":   {good + "-more", "", nil},
		"version ff":           {"ff-" + id + "-" + span + "-01", "", nil},
		"upper case":           {strings.ToUpper(good), "", nil},
		"no trace":             {"00-" + strings.Repeat("0", 32) + "-" + span + "-01", "", nil},
		"no span":              {"00-" + id + "-" + strings.Repeat("0", 16) + "-01", "", nil},
		"a second line":        {good + "\nx", "", nil},
		"too long":             {"01-" + id + "-" + span + "-01-" + strings.Repeat("x", 1000), "", nil},
		"two parents":          {good + "," + good, "", nil},
		"state of two lines":   {good, "a=b\nc=d", map[string]string{"traceparent": good}},
		"state of 513 bytes":   {good, "a=" + strings.Repeat("b", 511), map[string]string{"traceparent": good}},
		"state of 512 bytes":   {good, "a=" + strings.Repeat("b", 510), map[string]string{"traceparent": good, "tracestate": "a=" + strings.Repeat("b", 510)}},
		"state with non-ASCII": {good, "a=\u00e9", map[string]string{"traceparent": good}},
	} {
		got := ParseTrace(func(name string) string {
			return map[string]string{"traceparent": c.parent, "tracestate": c.state, "other": "x"}[name]
		})
		expect.That(t, maps.Equal(got, c.want), "%s: got %q, want %q", name, got, c.want)
		wantID := ""
		if c.want != nil {
			wantID = id
		}
		expect.Equal(t, TraceID(got), wantID, "%s: ID", name)
	}
}
