// SPDX-License-Identifier: Apache-2.0

package queue_test

import (
	"context"
	"fmt"
	"testing"
	"testing/synctest"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/worker"
	"github.com/cloister-build/cloister/worker/queue"
)

// A logger is a Config.Logs. It numbers the logs and records how they end.
type logger struct {
	begun int
	ended []*worker.Outcome
}

func (l *logger) logs(*worker.Task) (*worker.Logs, func(*worker.Outcome)) {
	l.begun++
	logs := &worker.Logs{}
	logs.Stdout.Name, logs.Stderr.Name = fmt.Sprint("out", l.begun), fmt.Sprint("err", l.begun)
	return logs, func(out *worker.Outcome) { l.ended = append(l.ended, out) }
}

func wantNames(t *testing.T, o *queue.Operation, stage repb.ExecutionStage_Value, stdout, stderr string) {
	t.Helper()
	synctest.Wait()
	if s := state(t, o); s.Stage != stage || s.Stdout != stdout || s.Stderr != stderr {
		t.Errorf("state is %+v, want %v with logs %q and %q", s, stage, stdout, stderr)
	}
}

func TestRule127_LogNamesAreKnownWhenTheRunBegins(t *testing.T) {
	var l logger
	bubble(t, queue.Config{Slots: 1, Logs: l.logs}, func(t *testing.T, q *queue.Queue, e *executor) {
		first := submit(t, q, "x", nil)
		wantNames(t, first, repb.ExecutionStage_EXECUTING, "out1", "err1")
		shares := submit(t, q, "x", nil)
		wantNames(t, shares, repb.ExecutionStage_EXECUTING, "out1", "err1")
		waits := submit(t, q, "y", nil)
		wantNames(t, waits, repb.ExecutionStage_QUEUED, "", "")
		hit := submit(t, q, "hit", answer(&worker.Outcome{Cached: true, Result: &repb.ActionResult{}}, nil))
		wantNames(t, hit, repb.ExecutionStage_COMPLETED, "", "")
		if logs := e.begun[0].Logs; logs == nil || logs.Stdout.Name != "out1" {
			t.Errorf("logs of the run are %v, want out1", logs)
		}
		e.release("x")
		for _, o := range []*queue.Operation{first, shares} {
			wantNames(t, o, repb.ExecutionStage_COMPLETED, "out1", "err1")
		}
		wantNames(t, waits, repb.ExecutionStage_EXECUTING, "out2", "err2")
		expect.That(t, len(l.ended) == 1 && l.ended[0] != nil && l.ended[0] == state(t, first).Outcome,
			"logs ended with %v, want the outcome of the first run", l.ended)
		q.Close() // ends the second without an outcome
		expect.That(t, len(l.ended) == 2 && l.ended[1] == nil,
			"logs ended with %v, want no outcome of the second run", l.ended)
	})
}

// TestLogsEndWhateverTheExecutorDoes checks that logs end once, with an outcome only if there is one.
func TestLogsEndWhateverTheExecutorDoes(t *testing.T) {
	for name, f := range map[string]function{
		"panic": func(context.Context) (*worker.Outcome, error) { panic("defect") },
		"both": func(context.Context) (*worker.Outcome, error) {
			return &worker.Outcome{}, &worker.Fault{Kind: worker.FaultInternal}
		},
	} {
		var l logger
		bubble(t, queue.Config{Slots: 1, Executor: f, Logs: l.logs}, func(t *testing.T, q *queue.Queue, _ *executor) {
			submit(t, q, "x", nil)
			expect.That(t, len(l.ended) == 1 && l.ended[0] == nil,
				"%s: logs ended with %v, want once without an outcome", name, l.ended)
		})
	}
}
