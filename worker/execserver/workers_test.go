// SPDX-License-Identifier: Apache-2.0

package execserver_test

import (
	"context"
	"errors"
	"strings"
	"testing"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/worker"
	"github.com/cloister-build/cloister/worker/execserver"
	"github.com/cloister-build/cloister/worker/queue"
	"google.golang.org/grpc/codes"
)

// head starts a site whose actions run where slots join, and demand what admit says.
func head(t *testing.T, demands ...worker.Property) *site {
	t.Helper()
	return serve(t, nil, func(qc *queue.Config, ec *execserver.Config) {
		*qc = queue.Config{Head: true, Settle: 1} // which is over at once
		ec.Admit = func(context.Context, *worker.Task) (worker.Admission, error) {
			return worker.Admission{Demands: demands}, nil
		}
	})
}

// join adds the slot 0 of a worker.
func (s *site) join(t *testing.T, name string, properties ...worker.Property) *queue.Slot {
	t.Helper()
	slot, err := s.queue.Join(queue.Offer{Worker: name, Slot: "0", Properties: properties})
	if err != nil {
		t.Fatal(err)
	}
	return slot
}

// take waits for an action.
func take(t *testing.T, s *queue.Slot) *queue.Run {
	t.Helper()
	r, err := s.Take(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// wantMessage checks the code of r, and that its message has all parts.
func wantMessage(t *testing.T, r *repb.ExecuteResponse, code codes.Code, parts ...string) {
	t.Helper()
	wantCode(t, r, code)
	for _, part := range parts {
		if !strings.Contains(r.Message, part) {
			t.Errorf("message is %q, want it to contain %q", r.Message, part)
		}
	}
}

// TestRule126_FailuresNameTheWorkerThatHadTheAction, and not the server that clients talk to.
func TestRule126_FailuresNameTheWorkerThatHadTheAction(t *testing.T) {
	s := head(t)
	a, b := s.join(t, "a"), s.join(t, "b\n")
	for _, slot := range []*queue.Slot{a, b} {
		st := s.execute(t.Context(), t, s.action(t, "x"), nil)
		run := take(t, slot)
		began, _ := metadataOf(t, reach(t, st, repb.ExecutionStage_EXECUTING))
		name := map[*queue.Slot]string{a: "a", b: "b"}[slot]
		if got := began.GetPartialExecutionMetadata().GetWorker(); got != name {
			t.Errorf("the metadata name worker %q, want %q", got, name)
		}
		run.End(nil, &worker.Fault{Kind: worker.Unavailable, Err: errors.New("its disk is full")})
		wantMessage(t, end(t, st), codes.Unavailable, "its disk is full (worker "+name+", operation ")
	}
}

// TestRule126_LostWorkers: an action that was lost is QUEUED and has no worker until another one has it; one that is
// lost with each of them is said to be suspected of that, with all of them and why.
func TestRule126_LostWorkers(t *testing.T) {
	s := head(t)
	st := s.execute(t.Context(), t, s.action(t, "x"), nil)
	for _, name := range []string{"a", "b", "c"} {
		slot := s.join(t, name)
		take(t, slot)
		md, _ := metadataOf(t, reach(t, st, repb.ExecutionStage_EXECUTING))
		if got := md.GetPartialExecutionMetadata().GetWorker(); got != name {
			t.Errorf("the metadata name worker %q, want %q", got, name)
		}
		slot.Leave("silent for 1m0s")
		if name == "c" {
			break
		}
		md, _ = metadataOf(t, reach(t, st, repb.ExecutionStage_QUEUED))
		if p := md.GetPartialExecutionMetadata(); p.Worker != "" || p.WorkerStartTimestamp != nil {
			t.Errorf("what waits again has a worker: %v", p)
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

// TestDrainedWorkersTakeNothing: what waits goes to others, or waits on; what the worker executes it goes on with.
func TestDrainedWorkersTakeNothing(t *testing.T) {
	s := head(t)
	slot := s.join(t, "a")
	first := s.execute(t.Context(), t, s.action(t, "x"), nil)
	run := take(t, slot)
	if names, running := s.queue.DrainWorker("a", "new kernel"); len(names) != 1 || running != 1 {
		t.Fatalf("drained %v, %d run", names, running)
	}
	second := s.execute(t.Context(), t, s.action(t, "y"), nil)
	reach(t, second, repb.ExecutionStage_QUEUED)
	run.End(&worker.Outcome{Result: &repb.ActionResult{}}, nil)
	wantCode(t, end(t, first), codes.OK)
	if d := s.queue.Demands(); len(d) != 1 || d[0].Unmet != "worker a is drained" {
		t.Errorf("what waits: %+v", d)
	}
	take(t, s.join(t, "b")).End(&worker.Outcome{Result: &repb.ActionResult{}}, nil)
	wantCode(t, end(t, second), codes.OK)
}
