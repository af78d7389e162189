// SPDX-License-Identifier: Apache-2.0

package reapi_test

import (
	"context"
	"fmt"
	"maps"
	"net"
	"net/http/httptest"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/internal/bazelrun"
	"github.com/cloister-build/cloister/tests/internal/loopback"
	"github.com/cloister-build/cloister/tests/must"
	"github.com/cloister-build/cloister/tests/syncbuf"
	"github.com/johannesboyne/gofakes3"
	"github.com/johannesboyne/gofakes3/backend/s3mem"
	metricspb "go.opentelemetry.io/proto/otlp/collector/metrics/v1"
	collectorpb "go.opentelemetry.io/proto/otlp/collector/trace/v1"
	commonpb "go.opentelemetry.io/proto/otlp/common/v1"
	tracepb "go.opentelemetry.io/proto/otlp/trace/v1"
	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"
	"google.golang.org/protobuf/proto"
)

const (
	traceID     = "0af7651916cd43dd8448eb211c80319c"
	traceParent = "00-" + traceID + "-b7ad6b7169203331-01"
	unsampled   = "00-1af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00"
)

// A collector receives spans and metrics over OTLP.
type collector struct {
	collectorpb.UnimplementedTraceServiceServer
	address string
	mu      sync.Mutex
	spans   []span          // guarded by mu
	metrics map[string]bool // "PROCESS NAME"; guarded by mu
}

// meter is the part of a collector that receives metrics.
type meter struct {
	metricspb.UnimplementedMetricsServiceServer
	*collector
}

// Export implements MetricsService.
func (m meter) Export(_ context.Context, r *metricspb.ExportMetricsServiceRequest) (*metricspb.ExportMetricsServiceResponse, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, from := range r.ResourceMetrics {
		for _, scope := range from.ScopeMetrics {
			for _, one := range scope.Metrics {
				m.metrics[attributes(from.Resource.Attributes)["service.name"]+" "+one.Name] = true
			}
		}
	}
	return &metricspb.ExportMetricsServiceResponse{}, nil
}

// measured reports whether a metric has arrived from a process.
func (c *collector) measured(process, name string) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.metrics[process+" "+name]
}

// A span is what the process of that name sent.
type span struct {
	process string
	*tracepb.Span
}

// collect starts a collector.
func collect(t *testing.T) *collector {
	listener := must.Get(net.Listen("tcp", "127.0.0.1:0"))(t)
	c, s := &collector{address: listener.Addr().String(), metrics: map[string]bool{}}, grpc.NewServer()
	collectorpb.RegisterTraceServiceServer(s, c)
	metricspb.RegisterMetricsServiceServer(s, meter{collector: c})
	go s.Serve(listener)
	t.Cleanup(s.Stop)
	return c
}

// Export implements TraceService.
func (c *collector) Export(_ context.Context, r *collectorpb.ExportTraceServiceRequest) (*collectorpb.ExportTraceServiceResponse, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, from := range r.ResourceSpans {
		for _, scope := range from.ScopeSpans {
			for _, s := range scope.Spans {
				c.spans = append(c.spans, span{attributes(from.Resource.Attributes)["service.name"], s})
			}
		}
	}
	return &collectorpb.ExportTraceServiceResponse{}, nil
}

// trace returns the spans of a trace so far.
func (c *collector) trace(id string) (spans []span) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, s := range c.spans {
		if fmt.Sprintf("%x", s.TraceId) == id {
			spans = append(spans, s)
		}
	}
	return spans
}

// environment returns the variables with which a process exports its spans and metrics to the collector.
func (c *collector) environment(process string) []string {
	return []string{
		"OTEL_EXPORTER_OTLP_ENDPOINT=http://" + c.address, "OTEL_SERVICE_NAME=" + process, "OTEL_BSP_SCHEDULE_DELAY=10",
		"OTEL_METRIC_EXPORT_INTERVAL=1000",
	}
}

// attributes returns the attributes of a span as text.
func attributes(list []*commonpb.KeyValue) map[string]string {
	m := map[string]string{}
	for _, a := range list {
		m[a.Key] = a.Value.GetStringValue()
		if i, ok := a.Value.Value.(*commonpb.AnyValue_IntValue); ok {
			m[a.Key] = fmt.Sprint(i.IntValue)
		}
	}
	return m
}

// tree returns the spans as sorted lines "PROCESS NAME < PROCESS NAME OF ITS PARENT", without duplicates.
func tree(spans []span) []string {
	short := func(r span) string { return r.process + " " + r.Name[strings.LastIndex(r.Name, "/")+1:] }
	byID, lines := map[string]string{}, map[string]bool{}
	for _, s := range spans {
		byID[string(s.SpanId)] = short(s)
	}
	for _, s := range spans {
		parent, ok := byID[string(s.ParentSpanId)]
		if !ok {
			parent = fmt.Sprintf("%x", s.ParentSpanId)
		}
		lines[short(s)+" < "+parent] = true
	}
	return slices.Sorted(maps.Keys(lines))
}

// stageSpans returns the lines of tree for an action that a process executes.
func stageSpans(process string) []string {
	var lines []string
	for _, s := range []string{"queue", "fetch", "confine", "stage", "run", "collect", "seal", "publish"} {
		lines = append(lines, process+" action."+s+" < "+process+" action")
	}
	return lines
}

// contains reports whether all of want are in lines.
func contains(lines, want []string) bool {
	return !slices.ContainsFunc(want, func(w string) bool { return !slices.Contains(lines, w) })
}

// traced executes an action as part of the trace of parent, and as a build would.
func (c *client) traced(j job, parent, target string) *answer {
	c.Helper()
	md := must.Get(proto.Marshal(&repb.RequestMetadata{
		ToolInvocationId: "an invocation", TargetId: target, ActionMnemonic: "Genrule",
	}))(c)
	digest := c.prepare(j)
	return answered(c.open(metadata.AppendToOutgoingContext(c.Context(), "traceparent", parent,
		"build.bazel.remote.execution.v2.requestmetadata-bin", string(md)), digest, nil))
}

// TestTraceCoversHeadAndWorker compares the spans of actions on the server itself and on a worker that joined it.
func TestTraceCoversHeadAndWorker(t *testing.T) {
	t.Parallel()
	confined(t)
	for _, c := range []struct {
		name, process string
		want          []string
		join          bool
	}{
		{"own slots", "head", append(stageSpans("head"), "head Execute < b7ad6b7169203331", "head action < head Execute"), false},
		{"worker", "worker", append(stageSpans("worker"), "head Execute < b7ad6b7169203331", "worker action < head Execute",
			"worker BatchUpdateBlobs < worker action", "head BatchUpdateBlobs < worker BatchUpdateBlobs",
			"worker UpdateActionResult < worker action", "head UpdateActionResult < worker UpdateActionResult"), true},
	} {
		to := collect(t)
		config := bazelrun.ServerConfig{Dir: filepath.Join(t.TempDir(), "store"), Env: to.environment("head")}
		workers := must.Get(loopback.Address())(t)
		if c.join {
			config.Args = []string{"--jobs", "0", "--worker-listen", workers}
		}
		head := serveAs(t, config)
		if c.join {
			w := must.Get(bazelrun.StartServer(t.Context(), bazelrun.ServerConfig{
				Binary: built.Path(t), Dir: filepath.Join(t.TempDir(), "worker"), Home: t.TempDir(), MaxSize: "1GiB",
				Join: workers, Toolchain: declaredToolchain, Env: to.environment("worker"),
			}))(t)
			t.Cleanup(func() { expect.Error(t, w.Stop(), nil) })
		}
		got := head.traced(job{script: "echo a > out; exit 3", outputs: []string{"out"}}, traceParent, "//a:b")
		expect.Equal(t, got.response.GetResult().GetExitCode(), 3, "%s: exit code", c.name)
		head.wantSuccess(c.name, head.traced(job{script: "echo a > out", outputs: []string{"out"}}, traceParent, "//a:\x1b[31m"))
		must.Hold(t, "spans of "+c.name, func() bool {
			lines := tree(to.trace(traceID))
			return contains(lines, c.want) && !slices.ContainsFunc(lines, func(l string) bool { // all parents have arrived
				_, parent, _ := strings.Cut(l, " < ")
				return parent != "b7ad6b7169203331" && !strings.Contains(parent, " ")
			})
		})
		must.Hold(t, "metrics of "+c.name, func() bool {
			return to.measured(c.process, "cloister_actions_total") && to.measured("head", "cloister_cas_bytes")
		})
		targets, codes := map[string]bool{}, map[string]bool{}
		must.Hold(t, "both actions", func() bool {
			for _, s := range to.trace(traceID) {
				a := attributes(s.Attributes)
				if s.Name == "action" {
					targets[a["reapi.target"]], codes[a["process.exit.code"]+" "+a["cloister.result"]] = true, true
					expect.Equal(t, a["reapi.invocation"]+" "+a["reapi.mnemonic"], "an invocation Genrule", "%s", c.name)
					expect.That(t, a["reapi.action.digest"] != "", "%s: no digest", c.name)
				}
			}
			return len(codes) == 2
		})
		expect.That(t, maps.Equal(targets, map[string]bool{"//a:b": true, "": true}), "%s: got targets %v", c.name, targets)
		expect.That(t, maps.Equal(codes, map[string]bool{"3 nonzero": true, "0 ok": true}), "%s: got %v", c.name, codes)
	}
}

// TestTraceCoversBucket: calls of an upstream bucket are below the action that needs them.
func TestTraceCoversBucket(t *testing.T) {
	t.Parallel()
	confined(t)
	objects := s3mem.New()
	must.Succeed(t, objects.CreateBucket("cache"))
	bucket := httptest.NewServer(gofakes3.New(objects, gofakes3.WithLogger(gofakes3.DiscardLog())).Server())
	t.Cleanup(bucket.Close)
	to := collect(t)
	server := serveAs(t, bazelrun.ServerConfig{
		Dir: filepath.Join(t.TempDir(), "store"), Args: []string{"--store", "s3://cache?endpoint=" + bucket.URL},
		Env: append(to.environment("head"), "AWS_ACCESS_KEY_ID=a", "AWS_SECRET_ACCESS_KEY=b"),
	})
	server.wantSuccess("action", server.traced(job{script: "echo a > out", outputs: []string{"out"}}, traceParent, "//a:b"))
	must.Hold(t, "the spans of the bucket", func() bool {
		return contains(tree(to.trace(traceID)), []string{"head bucket.put < head action", "head action < head Execute"})
	})
}

// TestTraceContextIsChecked checks that a malformed trace context begins a new trace, and that one that is not sampled
// exports nothing.
func TestTraceContextIsChecked(t *testing.T) {
	t.Parallel()
	confined(t)
	to := collect(t)
	server := serveAs(t, bazelrun.ServerConfig{Dir: filepath.Join(t.TempDir(), "store"), Env: to.environment("head")})
	j := job{script: "true"}
	bad := []string{
		"", "x", strings.ToUpper(traceParent), traceParent + "-more", "00-" + strings.Repeat("0", 32) + "-b7ad6b7169203331-01",
		"ff" + traceParent[2:], "01" + traceParent[2:] + "-" + strings.Repeat("x", 1000),
	}
	for _, parent := range append([]string{unsampled}, bad...) {
		server.wantSuccess(parent, server.traced(j, parent, "//a:b"))
	}
	server.wantSuccess("valid", server.traced(j, traceParent, "//a:b"))
	must.Hold(t, "all traces", func() bool {
		roots, actions := map[string]bool{}, map[string]bool{}
		to.mu.Lock()
		defer to.mu.Unlock()
		for _, s := range to.spans {
			if len(s.ParentSpanId) == 0 && strings.HasSuffix(s.Name, "/Execute") {
				roots[string(s.TraceId)] = true
			}
			if s.Name == "action" {
				actions[string(s.TraceId)] = true
			}
		}
		return len(roots) == len(bad) && len(actions) == len(bad)+1
	})
	expect.Equal(t, len(to.trace(unsampled[3:35])), 0, "spans of the trace that is not sampled")
}

// TestCollectorDown checks that a collector that does not answer costs no action, and is reported once.
func TestCollectorDown(t *testing.T) {
	t.Parallel()
	confined(t)
	log := &syncbuf.Buffer{}
	to := &collector{address: must.Get(loopback.Address())(t)}
	server := serveAs(t, bazelrun.ServerConfig{
		Dir: filepath.Join(t.TempDir(), "store"), Log: log,
		Env: append(to.environment("head"), "OTEL_EXPORTER_OTLP_TIMEOUT=100", "OTEL_BSP_MAX_QUEUE_SIZE=4", "OTEL_BSP_MAX_EXPORT_BATCH_SIZE=2"),
	})
	for range 10 {
		server.succeed(job{script: "true"})
	}
	const lost = "spans or metrics are lost"
	must.Hold(t, "a line in the log", func() bool { return strings.Contains(log.String(), lost) })
	*server.ended = true
	expect.Error(t, server.server.Stop(), nil)
	expect.Equal(t, strings.Count(log.String(), lost), 1, "lines in the log: %s", log)
}
