// SPDX-License-Identifier: Apache-2.0

package node

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"path"
	"sync/atomic"
	"time"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/object"
	"github.com/cloister-build/cloister/cas/remote"
	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/stats"
	"google.golang.org/grpc/status"
)

// upstreamCalls counts the calls of an upstream, and logs that it refuses our credentials or the copy of an object, or
// has no space for the copy. It is safe for concurrent use.
type upstreamCalls struct {
	calls   *prometheus.CounterVec
	seconds *prometheus.HistogramVec
	bytes   *prometheus.CounterVec
	retries prometheus.Counter
	log     *slog.Logger
	// Unix times of the last log lines, in seconds.
	denied, deniedCopies, fullCopies atomic.Int64
}

func newUpstreamCalls(log *slog.Logger) *upstreamCalls {
	return &upstreamCalls{
		calls: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "cloister_cas_upstream_requests_total", Help: "Requests to the upstream by kind and outcome.",
		}, []string{"kind", "outcome"}),
		seconds: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: "cloister_cas_upstream_request_duration_seconds", Help: "Time of requests to the upstream by kind, with retries.",
			Buckets: prometheus.ExponentialBuckets(0.001, 4, 9),
		}, []string{"kind"}),
		bytes: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "cloister_cas_upstream_bytes_total", Help: "Bytes sent to the upstream and received from it.",
		}, []string{"direction"}),
		retries: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "cloister_cas_upstream_retries_total", Help: "Requests to a bucket that were repeated.",
		}),
		log: log,
	}
}

// register adds the metrics to a registry.
func (u *upstreamCalls) register(r *prometheus.Registry) {
	r.MustRegister(u.calls, u.seconds, u.bytes, u.retries)
}

// observe counts a call of a bucket.
func (u *upstreamCalls) observe(c object.Call) {
	u.count(c.Kind, c.Outcome, c.Time, c.Err)
	u.retries.Add(float64(max(c.Requests-1, 0)))
	u.bytes.WithLabelValues("sent").Add(float64(c.Sent))
	u.bytes.WithLabelValues("received").Add(float64(c.Received))
}

// count counts one call. It logs refused credentials, refused copies and copies without space, each at most once a
// minute.
func (u *upstreamCalls) count(kind, outcome string, d time.Duration, err error) {
	u.calls.WithLabelValues(kind, outcome).Inc()
	u.seconds.WithLabelValues(kind).Observe(d.Seconds())
	switch {
	case kind == "copy" && errors.Is(err, cas.ErrUpstreamFull) && !errors.Is(err, errors.ErrUnsupported):
		if due(&u.fullCopies) {
			u.log.Warn("the upstream is too full to renew an object, which stays usable until it expires", "err", err)
		}
	case !errors.Is(err, cas.ErrDenied):
	case kind != "copy":
		if due(&u.denied) {
			u.log.Error("the upstream refuses the credentials of this server", "err", err)
		}
	case due(&u.deniedCopies): // perhaps of one object only
		u.log.Warn("the upstream refuses to copy an object, so the object is stored again if uploads are permitted; "+
			"access to its encryption key may be revoked, or the credentials lack a permission", "err", err)
	}
}

// due reports whether a minute has passed since last, and then sets it to now.
func due(last *atomic.Int64) bool {
	now, before := time.Now().Unix(), last.Load()
	return now-before >= 60 && last.CompareAndSwap(before, now)
}

// A callStats counts the calls of a server as a gRPC stats.Handler. It sees each attempt as a call.
type callStats struct {
	*upstreamCalls
	refusal refusal
}

// methodKey is the context key of the name of a call's method.
type methodKey struct{}

// TagRPC implements stats.Handler.
func (callStats) TagRPC(ctx context.Context, info *stats.RPCTagInfo) context.Context {
	return context.WithValue(ctx, methodKey{}, path.Base(info.FullMethodName))
}

// HandleRPC implements stats.Handler.
func (c callStats) HandleRPC(ctx context.Context, s stats.RPCStats) {
	switch s := s.(type) {
	case *stats.InPayload:
		c.bytes.WithLabelValues("received").Add(float64(s.WireLength))
	case *stats.OutPayload:
		c.bytes.WithLabelValues("sent").Add(float64(s.WireLength))
	case *stats.End:
		err := s.Error
		outcome, ok := grpcOutcomes[status.Code(err)]
		if !ok {
			outcome = "failed"
		}
		if outcome == "denied" {
			err = fmt.Errorf("%w: %s", cas.ErrDenied, remote.Reason(status.Convert(c.refusal.explain(err))))
		}
		method, _ := ctx.Value(methodKey{}).(string)
		c.count(method, outcome, s.EndTime.Sub(s.BeginTime), err)
	}
}

// TagConn implements stats.Handler.
func (callStats) TagConn(ctx context.Context, _ *stats.ConnTagInfo) context.Context { return ctx }

// HandleConn implements stats.Handler.
func (callStats) HandleConn(context.Context, stats.ConnStats) {}

// grpcOutcomes are the outcomes of calls, as in object.Call; others have failed.
var grpcOutcomes = map[codes.Code]string{
	codes.OK: "ok", codes.NotFound: "not_found", codes.ResourceExhausted: "full", codes.PermissionDenied: "denied",
	codes.Unauthenticated: "denied", codes.Unavailable: "unavailable", codes.DeadlineExceeded: "unavailable",
	codes.Canceled: "canceled",
}
