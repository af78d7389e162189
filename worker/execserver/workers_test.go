// SPDX-License-Identifier: Apache-2.0

package execserver_test

import (
	"context"
	"errors"
	"testing"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
	"github.com/cloister-build/cloister/worker"
	"github.com/cloister-build/cloister/worker/execserver"
	"github.com/cloister-build/cloister/worker/queue"
	"google.golang.org/grpc/codes"
)

// head starts a site without own slots whose actions have the given demands.
func head(t *testing.T, demands ...worker.Property) *site {
	t.Helper()
	return serve(t, nil, func(qc *queue.Config, ec *execserver.Config) {
		*qc = queue.Config{Head: true, Settle: 1} // refuse unmatched actions at once
		ec.Admit = func(context.Context, *worker.Task) (worker.Admission, error) {
			return worker.Admission{Demands: demands}, nil
		}
	})
}

// join adds slot 0 of a worker.
func (s *site) join(t *testing.T, name string, properties ...worker.Property) *queue.Slot {
	t.Helper()
	return must.Get(s.queue.Join(queue.Offer{Worker: name, Slot: "0", Properties: properties}))(t)
}

// take waits for an action.
func take(t *testing.T, s *queue.Slot) *queue.Run {
	t.Helper()
	return must.Get(s.Take(t.Context()))(t)
}

// wantMessage checks the code of r and the parts of its message.
func wantMessage(t *testing.T, r *repb.ExecuteResponse, code codes.Code, parts ...string) {
	t.Helper()
	wantCode(t, r, code)
	expect.Texts(t, r.Message, parts, "message")
}

// TestRule126_FailuresNameTheWorkerThatHadTheAction rather than the server.
func TestRule126_FailuresNameTheWorkerThatHadTheAction(t *testing.T) {
	s := head(t)
	a, b := s.join(t, "a"), s.join(t, "b\n")
	for _, slot := range []*queue.Slot{a, b} {
		st := s.execute(t.Context(), t, s.action(t, "x"), nil)
		run := take(t, slot)
		began, _ := metadataOf(t, reach(t, st, repb.ExecutionStage_EXECUTING))
		name := map[*queue.Slot]string{a: "a", b: "b"}[slot]
		expect.Equal(t, began.GetPartialExecutionMetadata().GetWorker(), name, "worker in the metadata")
		run.End(nil, &worker.Fault{Kind: worker.FaultUnavailable, Err: errors.New("its disk is full")})
		wantMessage(t, end(t, st), codes.Unavailable, "its disk is full (worker "+name+", operation ")
	}
}

// TestRule126_LossesAreReported checks that a lost action is QUEUED without a worker, and that the final fault lists
// all losses.
func TestRule126_LossesAreReported(t *testing.T) {
	s := head(t)
	st := s.execute(t.Context(), t, s.action(t, "x"), nil)
	for _, name := range []string{"a", "b", "c"} {
		slot := s.join(t, name)
		take(t, slot)
		md, _ := metadataOf(t, reach(t, st, repb.ExecutionStage_EXECUTING))
		expect.Equal(t, md.GetPartialExecutionMetadata().GetWorker(), name, "worker in the metadata")
		slot.Leave("silent for 1m0s")
		if name == "c" {
			break
		}
		md, _ = metadataOf(t, reach(t, st, repb.ExecutionStage_QUEUED))
		if p := md.GetPartialExecutionMetadata(); p.Worker != "" || p.WorkerStartTimestamp != nil {
			t.Errorf("the queued action has worker %v, want none", p)
		}
	}
	const why = " (silent for 1m0s)"
	wantMessage(t, end(t, st), codes.FailedPrecondition, "suspected of crashing its workers", "lost 3 times", "worker a"+why, "worker b"+why, "worker c"+why)
}

// TestRule126_UnmatchedActions checks that the message names the nearest worker and the server.
func TestRule126_UnmatchedActions(t *testing.T) {
	s := head(t, worker.Property{Name: "container-image", Value: "docker://x"})
	s.join(t, "a", worker.Property{Name: "container-image", Value: "docker://y"})
	wantMessage(t, end(t, s.execute(t.Context(), t, s.action(t, "x"), nil)), codes.FailedPrecondition,
		"no worker offers container-image=docker://x", "the nearest is worker a with container-image=docker://y", "offered values of container-image: docker://y", "(server smithy, operation ")
}

// TestDrainedWorkerTakesNoActions and finishes its own.
func TestDrainedWorkerTakesNoActions(t *testing.T) {
	s := head(t)
	slot := s.join(t, "a")
	first := s.execute(t.Context(), t, s.action(t, "x"), nil)
	run := take(t, slot)
	if names, running := s.queue.DrainWorker("a", "new kernel"); len(names) != 1 || running != 1 {
		t.Fatalf("DrainWorker = %v, %d; want one and 1", names, running)
	}
	second := s.execute(t.Context(), t, s.action(t, "y"), nil)
	reach(t, second, repb.ExecutionStage_QUEUED)
	run.End(&worker.Outcome{Result: &repb.ActionResult{}}, nil)
	wantCode(t, end(t, first), codes.OK)
	if d := s.queue.Demands(); len(d) != 1 || d[0].Unmet != "worker a is drained" {
		t.Errorf("Demands = %+v, want one that is drained", d)
	}
	take(t, s.join(t, "b")).End(&worker.Outcome{Result: &repb.ActionResult{}}, nil)
	wantCode(t, end(t, second), codes.OK)
}
