// SPDX-License-Identifier: Apache-2.0

package localrun

import (
	"encoding/json"
	"os"
	"path/filepath"
	"testing"
	"time"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
	"github.com/cloister-build/cloister/worker"
)

// TestMetricsAreOfAllRuns: percentiles cover all runs in any order.
func TestMetricsAreOfAllRuns(t *testing.T) {
	for _, c := range []struct{ runs, p50, p95 int }{{1, 1, 1}, {2, 1, 2}, {20, 10, 19}, {21, 11, 20}, {100, 50, 95}} {
		var m metrics
		base := time.Now()
		for i := range c.runs {
			took := time.Duration(i*11%c.runs+1) * time.Second // each from 1 to their number, since 11 divides none of these
			m.add(base, base.Add(50*time.Second), &worker.Outcome{
				Result: &repb.ActionResult{}, StableHash: "same", Started: base.Add(time.Minute), Ended: base.Add(time.Minute + took),
			})
		}
		name := filepath.Join(t.TempDir(), "m.json")
		m.finish()
		must.Succeed(t, m.write(name))
		b := must.Get(os.ReadFile(name))(t)
		var got metrics
		must.Succeed(t, json.Unmarshal(b, &got))
		want := Spread{time.Duration(c.p50) * time.Second, time.Duration(c.p95) * time.Second}
		if got.Run != want || got.SetUp != (Spread{time.Minute, time.Minute}) ||
			got.Guard != (Spread{10 * time.Second, 10 * time.Second}) || !got.Equal || len(got.Runs) != c.runs {
			t.Errorf("%d runs: got %+v, want %+v", c.runs, got.Run, want)
		}
		m.add(base, base, &worker.Outcome{Result: &repb.ActionResult{}, StableHash: "other"})
		expect.Equal(t, m.StableHashes, 2, "stable hashes")
	}
}

// TestUnmeasuredPeaksAreAbsent: a peak of 0 was not measured; 0 bytes were.
func TestUnmeasuredPeaksAreAbsent(t *testing.T) {
	b := must.Get(json.Marshal(runMetrics{PeakResident: 1}))(t)
	var got map[string]any
	must.Succeed(t, json.Unmarshal(b, &got))
	for name, want := range map[string]bool{
		"peak_memory_bytes": false, "peak_processes": false, "peak_resident_bytes": true, "read_bytes": true, "written_bytes": true,
	} {
		if _, is := got[name]; is != want {
			t.Errorf("%s is present: got %v, want %v", name, is, want)
		}
	}
}
