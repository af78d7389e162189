// SPDX-License-Identifier: Apache-2.0

package scale

import (
	"context"
	"fmt"
	"math/rand/v2"
	"strconv"
	"time"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	remoteworkerpb "github.com/cloister-build/cloister/proto/buildbarn/remoteworker"
	"golang.org/x/sync/errgroup"
	statuspb "google.golang.org/genproto/googleapis/rpc/status"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/emptypb"
	"google.golang.org/protobuf/types/known/timestamppb"
)

// An assignment is when a slot first got an action of a build.
type assignment struct {
	build int
	at    time.Time
}

// A slot is one of a simulated worker.
type slot struct {
	*farm
	queue remoteworkerpb.OperationQueueClient
	id    map[string]string

	running *action // nil while idle
	due     time.Time
	ended   *timestamppb.Timestamp // of the action whose result is sent; nil before
}

// join starts the slots of worker i, which end with ctx.
func (f *farm) join(ctx context.Context, group *errgroup.Group, conn *grpc.ClientConn, i int) {
	for n := range f.cfg.Slots {
		s := &slot{
			farm: f, queue: remoteworkerpb.NewOperationQueueClient(conn),
			id: map[string]string{"worker": fmt.Sprint("w", i), "slot": strconv.Itoa(n)},
		}
		group.Go(func() error { return s.work(ctx) })
	}
}

// work takes actions until ctx ends.
func (s *slot) work(ctx context.Context) error {
	for {
		answer, err := s.queue.Synchronize(ctx, &remoteworkerpb.SynchronizeRequest{WorkerId: s.id, CurrentState: s.state()})
		switch {
		case ctx.Err() != nil:
			return nil
		case status.Code(err) == codes.Unavailable: // the head restarts
			pause(ctx)
			continue
		case err != nil:
			return fmt.Errorf("slot %v: %w", s.id, err)
		}
		if err := s.obey(answer); err != nil {
			return err
		}
		s.sleep(ctx, answer.NextSynchronizationAt.AsTime())
	}
}

// obey changes the slot's state as the head demands.
func (s *slot) obey(answer *remoteworkerpb.SynchronizeResponse) error {
	switch {
	case answer.DesiredState.GetIdle() != nil:
		s.running = nil
	case answer.DesiredState.GetExecuting() != nil:
		hash := answer.DesiredState.GetExecuting().ActionDigest.GetHash()
		a := s.actions[hash]
		if a == nil {
			return fmt.Errorf("slot %v got the unknown action %q", s.id, hash)
		}
		now := time.Now()
		s.running, s.due, s.ended = a, now.Add(rand.N(2*s.cfg.Delay)), nil
		if a.given.Add(1) == 1 {
			s.mu.Lock()
			s.gave = append(s.gave, assignment{a.build, now})
			s.mu.Unlock()
		}
	}
	return nil
}

// sleep waits until the action is to end, but at most until the next call.
func (s *slot) sleep(ctx context.Context, next time.Time) {
	if s.running == nil {
		return // the head's answer takes as long as no action is ready
	}
	call := time.NewTimer(time.Until(next))
	defer call.Stop()
	end := time.NewTimer(time.Until(s.due))
	defer end.Stop()
	select {
	case <-end.C:
	case <-call.C:
		return
	case <-ctx.Done():
		return
	}
	s.mu.Lock()
	hold := s.hold
	s.mu.Unlock()
	select {
	case <-hold:
		if s.ended == nil {
			s.ended = timestamppb.Now()
		}
	case <-call.C:
	case <-ctx.Done():
	}
}

// state returns what the slot does.
func (s *slot) state() *remoteworkerpb.CurrentState {
	if s.running == nil {
		return &remoteworkerpb.CurrentState{WorkerState: &remoteworkerpb.CurrentState_Idle{Idle: &emptypb.Empty{}}}
	}
	e := &remoteworkerpb.CurrentState_Executing{ActionDigest: s.running.digest}
	if s.ended == nil {
		e.ExecutionState = &remoteworkerpb.CurrentState_Executing_Running{Running: &emptypb.Empty{}}
	} else {
		e.ExecutionState = &remoteworkerpb.CurrentState_Executing_Completed{Completed: &repb.ExecuteResponse{
			Status: &statuspb.Status{},
			Result: &repb.ActionResult{
				StdoutRaw:         []byte(s.running.digest.Hash),
				ExecutionMetadata: &repb.ExecutedActionMetadata{WorkerCompletedTimestamp: s.ended},
			},
		}}
	}
	return &remoteworkerpb.CurrentState{WorkerState: &remoteworkerpb.CurrentState_Executing_{Executing: e}}
}
