// SPDX-License-Identifier: Apache-2.0

package node

import (
	"bytes"
	"fmt"
	"log/slog"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/object"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/stats"
	"google.golang.org/grpc/status"
)

// TestUpstreamCallsAreCounted checks calls of a bucket and of a server.
func TestUpstreamCallsAreCounted(t *testing.T) {
	registry := prometheus.NewRegistry()
	u := newUpstreamCalls(slog.New(slog.DiscardHandler))
	u.register(registry)
	u.observe(object.Call{Kind: "put", Outcome: "ok", Requests: 3, Sent: 1000, Time: time.Second})
	u.observe(object.Call{Kind: "get", Outcome: "unavailable", Err: cas.ErrUnavailable}) // without a request
	server := callStats{upstreamCalls: u}
	for method, err := range map[string]error{
		"Read": nil, "Write": status.Error(codes.ResourceExhausted, "full"), "GetTree": status.Error(codes.Internal, "bug"),
	} {
		ctx := server.TagRPC(t.Context(), &stats.RPCTagInfo{FullMethodName: "/some.Service/" + method})
		server.HandleRPC(ctx, &stats.OutPayload{WireLength: 10})
		server.HandleRPC(ctx, &stats.InPayload{WireLength: 20})
		server.HandleRPC(ctx, &stats.End{Error: err})
	}
	const want = `
# HELP cloister_cas_upstream_bytes_total Bytes sent to the upstream and received from it.
# TYPE cloister_cas_upstream_bytes_total counter
cloister_cas_upstream_bytes_total{direction="received"} 60
cloister_cas_upstream_bytes_total{direction="sent"} 1030
# HELP cloister_cas_upstream_requests_total Requests to the upstream by kind and outcome.
# TYPE cloister_cas_upstream_requests_total counter
cloister_cas_upstream_requests_total{kind="GetTree",outcome="failed"} 1
cloister_cas_upstream_requests_total{kind="Read",outcome="ok"} 1
cloister_cas_upstream_requests_total{kind="Write",outcome="full"} 1
cloister_cas_upstream_requests_total{kind="get",outcome="unavailable"} 1
cloister_cas_upstream_requests_total{kind="put",outcome="ok"} 1
# HELP cloister_cas_upstream_retries_total Requests to a bucket that were repeated.
# TYPE cloister_cas_upstream_retries_total counter
cloister_cas_upstream_retries_total 2
`
	expect.Error(t, testutil.GatherAndCompare(registry, strings.NewReader(want), "cloister_cas_upstream_bytes_total",
		"cloister_cas_upstream_requests_total", "cloister_cas_upstream_retries_total"), nil)
	if n, err := testutil.GatherAndCount(registry, "cloister_cas_upstream_request_duration_seconds"); n != 5 || err != nil {
		t.Errorf("got %d timed kinds, %v, want 5", n, err)
	}
}

// TestRefusedCredentialsAreLogged checks that refusals of a bucket and of a server are logged once a minute.
func TestRefusedCredentialsAreLogged(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var out bytes.Buffer
		u := newUpstreamCalls(slog.New(slog.NewTextHandler(&out, nil)))
		for range 10 {
			u.observe(object.Call{Kind: "put", Outcome: "denied", Err: fmt.Errorf("grant s3:PutObject: %w", cas.ErrDenied)})
			u.observe(object.Call{Kind: "get", Outcome: "not_found", Err: cas.ErrNotFound})
		}
		time.Sleep(time.Minute)
		for range 10 {
			callStats{upstreamCalls: u}.HandleRPC(t.Context(), &stats.End{Error: status.Error(codes.PermissionDenied, "not you")})
		}
		text := out.String()
		if strings.Count(text, "\n") != 2 || !strings.Contains(text, "grant s3:PutObject") || !strings.Contains(text, "not you") {
			t.Errorf("got log %s, want one line each", text)
		}
	})
}

// TestFullCopiesAreLogged checks that copies for which a bucket has no space are logged once a minute.
func TestFullCopiesAreLogged(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var out bytes.Buffer
		u := newUpstreamCalls(slog.New(slog.NewTextHandler(&out, nil)))
		for range 2 {
			for _, kind := range []string{"copy", "put", "copy"} {
				err := fmt.Errorf("this %s: %w", kind, cas.ErrUpstreamFull)
				u.observe(object.Call{Kind: kind, Outcome: "full", Err: err})
			}
			time.Sleep(time.Minute)
		}
		text := out.String()
		expect.That(t, strings.Count(text, "\n") == 2 && strings.Count(text, "too full to renew") == 2 &&
			!strings.Contains(text, "this put"), "got log %s, want two lines about copies", text)
	})
}

// TestRefusedCopiesAreLogged checks that copies that a bucket refuses are logged once a minute as a warning, which
// leaves room for refused credentials.
func TestRefusedCopiesAreLogged(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var out bytes.Buffer
		u := newUpstreamCalls(slog.New(slog.NewTextHandler(&out, nil)))
		for _, want := range []int{1, 2} {
			for _, kind := range []string{"copy", "put", "copy", "put"} {
				u.observe(object.Call{Kind: kind, Outcome: "denied", Err: fmt.Errorf("this %s: %w", kind, cas.ErrDenied)})
			}
			warnings, failures := 0, 0
			for line := range strings.Lines(out.String()) {
				switch {
				case strings.Contains(line, "level=WARN") && strings.Contains(line, "refuses to copy") && strings.Contains(line, "this copy"):
					warnings++
				case strings.Contains(line, "level=ERROR") && strings.Contains(line, "refuses the credentials") && strings.Contains(line, "this put"):
					failures++
				default:
					t.Errorf("got the line %s", line)
				}
			}
			expect.Equal(t, warnings, want, "lines about copies")
			expect.Equal(t, failures, want, "lines about credentials")
			time.Sleep(time.Minute)
		}
	})
}
