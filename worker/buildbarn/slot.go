// SPDX-License-Identifier: Apache-2.0

package buildbarn

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"time"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	remoteworkerpb "github.com/cloister-build/cloister/proto/buildbarn/remoteworker"
	"github.com/cloister-build/cloister/worker"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
)

const (
	// expireAfter is how long after a missed call a worker assumes that the scheduler has given it up. Schedulers wait
	// as long.
	expireAfter = time.Minute
	// minInterval and maxInterval bound the time to the next call, since the scheduler's clock may be wrong. Schedulers
	// ask for a call every ten seconds; one that gives workers up sooner than after a minute must still be called in
	// time.
	minInterval, maxInterval = time.Second, 10 * time.Second
	// callTimeout limits calls that the scheduler answers at once, pollTimeout those that wait for an action.
	callTimeout, pollTimeout = 30 * time.Second, 10 * time.Minute
	// goodbyeTimeout limits how long a Client whose context has ended tries to tell the scheduler.
	goodbyeTimeout = 5 * time.Second
	// maxBackoff bounds the random wait after a failed call.
	maxBackoff = 5 * time.Second
	// minStage is how long a stage must last to be reported before the next regular call. Reporting each stage of an
	// action of a few milliseconds would cost as much as the action.
	minStage = 20 * time.Millisecond
)

// A slot is one worker in the scheduler's terms.
type slot struct {
	*Client
	name string
	// state is what the slot does; nil if nothing. run is nil unless it executes.
	state *remoteworkerpb.CurrentState_Executing
	run   *run
	// reported is the last state of the run that the scheduler knows; nil if none.
	reported any
	// next is when the scheduler expects the next call, at the latest.
	next time.Time
	// assignedUntil is until when the scheduler may assume that the slot executes something; zero if it does not.
	assignedUntil time.Time
	// onlyRefused reports that assignedUntil is set only because calls failed, all of which the scheduler refused.
	onlyRefused bool
	// killed is when ctx ended; zero before.
	killed time.Time
}

// loop synchronizes with the scheduler until the slot may stop.
func (s *slot) loop(ctx context.Context) {
	defer s.stop(errUnwanted)
	for !s.mayStop(ctx) {
		if err := s.step(ctx); err != nil {
			s.link.failed(err)
			s.pause(ctx, rand.N(maxBackoff))
		}
	}
}

// mayStop reports whether the scheduler expects nothing more of the slot: it knows, or has given the slot up.
func (s *slot) mayStop(ctx context.Context) bool {
	if ctx.Err() != nil && s.killed.IsZero() {
		s.killed = time.Now()
	}
	assigned := !s.assignedUntil.IsZero()
	switch {
	case !s.stopping(ctx):
		return false
	case (!assigned || s.onlyRefused) && s.run == nil, assigned && time.Now().After(s.assignedUntil):
		return true
	}
	return !s.killed.IsZero() && time.Since(s.killed) > goodbyeTimeout
}

// pause waits, while stopping for at most a second.
func (s *slot) pause(ctx context.Context, d time.Duration) {
	if s.stopping(ctx) {
		time.Sleep(min(d, time.Second))
		return
	}
	select {
	case <-time.After(d):
	case <-s.draining:
	case <-ctx.Done():
	}
}

// step makes one call when there is something to report, and applies the answer.
func (s *slot) step(ctx context.Context) error {
	if s.run != nil {
		s.awaitNews(ctx)
	}
	completed := s.state.GetCompleted()
	request := &remoteworkerpb.SynchronizeRequest{
		WorkerId:           s.id(),
		InstanceNamePrefix: s.cfg.Prefix,
		Platform:           s.platform,
		SizeClass:          s.cfg.SizeClass,
		CurrentState:       currentState(s.state),
	}
	poll := false
	if s.run == nil {
		switch {
		case s.stopping(ctx):
		case completed != nil:
			// After a failure here, check readiness before the next action. After an outage, ask for a quick answer
			// that confirms that the result has arrived.
			poll = completed.GetStatus().GetCode() == 0 && s.Down() == "" && s.checkReady()
		case !s.assignedUntil.IsZero():
			// An answer with an action may have been lost: find out before taking one.
		case !s.checkReady():
			s.readiness.wait(ctx, s.draining)
			return nil
		default:
			poll = true
		}
		request.PreferBeingIdle = !poll
	}
	began := time.Now()
	response, err := s.call(ctx, request, poll)
	if err != nil {
		s.onlyRefused = (s.assignedUntil.IsZero() || s.onlyRefused) && isRefusal(err)
		if s.assignedUntil.IsZero() {
			s.next = time.Now()
			s.assignedUntil = s.next.Add(expireAfter) // an answer with an action may have been lost
		}
		if poll && !s.readiness.ready() {
			return nil // call ended it
		}
		return err
	}
	s.link.answered()
	s.onlyRefused = false
	s.schedule(response.GetNextSynchronizationAt().AsTime())
	if err := s.apply(ctx, response.GetDesiredState()); err != nil {
		return err
	}
	switch {
	case s.stopping(ctx):
	case poll && s.state == nil && time.Since(began) < minInterval:
		s.pause(ctx, minInterval) // the scheduler does not wait
	case completed != nil && s.state == nil && isWorkerFault(completed):
		s.pause(ctx, rand.N(maxBackoff)) // the next action would fail, too
	}
	return nil
}

// id returns the worker_id of the slot.
func (s *slot) id() map[string]string {
	id := map[string]string{workerKey: s.cfg.Worker, "slot": s.name}
	if s.cfg.Store != "" {
		id[storeKey] = s.cfg.Store
	}
	return id
}

// isWorkerFault reports whether an answer is a fault of this worker.
func isWorkerFault(r *repb.ExecuteResponse) bool {
	switch codes.Code(r.GetStatus().GetCode()) {
	case codes.Unavailable, codes.Internal, codes.ResourceExhausted:
		return true
	}
	return false
}

// isRefusal reports whether the scheduler refuses this worker and so assigned no action. RESOURCE_EXHAUSTED is not
// included, because an answer that is too large returns it, too.
func isRefusal(err error) bool {
	switch status.Code(err) {
	case codes.InvalidArgument, codes.FailedPrecondition, codes.PermissionDenied, codes.Unauthenticated,
		codes.Unimplemented:
		return true
	}
	return false
}

// toolchainKey is the key of the metadata in which a Client states the fingerprint of its toolchain. Other schedulers
// ignore it.
const toolchainKey = "cloister-toolchain"

// call makes one call. A poll ends when readiness does. When ctx ends, call cancels the run and waits only briefly for
// the scheduler.
func (s *slot) call(
	ctx context.Context, request *remoteworkerpb.SynchronizeRequest, poll bool,
) (*remoteworkerpb.SynchronizeResponse, error) {
	timeout := callTimeout
	if poll {
		timeout = pollTimeout
	} else if !s.killed.IsZero() {
		timeout = goodbyeTimeout
	}
	// The call itself outlives ctx, so that the scheduler learns the result.
	callCtx, cancel := context.WithTimeout(context.WithoutCancel(ctx), timeout)
	defer cancel()
	if poll {
		defer s.readiness.onClear(cancel)()
	} else if s.killed.IsZero() {
		answered, run := make(chan struct{}), s.run
		defer close(answered)
		defer context.AfterFunc(ctx, func() {
			if run != nil {
				run.cancel(errStopped)
			}
			select {
			case <-answered:
			case <-time.After(goodbyeTimeout):
				cancel()
			}
		})()
	}
	if has := s.cfg.Toolchain(); has != "" {
		callCtx = metadata.AppendToOutgoingContext(callCtx, toolchainKey, has)
	}
	if s.run != nil {
		callCtx = statePull(callCtx, s.run.pulling())
	}
	return s.cfg.Scheduler.Synchronize(callCtx, request)
}

// awaitNews waits until the run has ended, has been in a new stage for minStage, or the next call is due.
func (s *slot) awaitNews(ctx context.Context) {
	timer := time.NewTimer(time.Until(s.next))
	defer timer.Stop()
	done := ctx.Done()
	for waiting := true; waiting; {
		select {
		case <-timer.C:
			waiting = false
		case <-s.run.news:
			state, ended := s.run.latest()
			wait := time.Until(s.next)
			if state.ExecutionState != s.reported {
				wait = min(wait, minStage)
			}
			timer.Reset(wait)
			waiting = !ended
		case <-done:
			done = nil // then wait for the end
			s.run.cancel(errStopped)
		}
	}
	state, ended := s.run.latest()
	s.state, s.reported = state, state.ExecutionState
	if ended {
		s.run.wait()
		s.run = nil
		s.busy.Add(-1)
	}
}

// schedule records when the scheduler expects the next call.
func (s *slot) schedule(at time.Time) {
	now := time.Now()
	s.next = now.Add(min(max(at.Sub(now), minInterval), maxInterval))
}

// apply carries out the scheduler's answer.
func (s *slot) apply(ctx context.Context, desired *remoteworkerpb.DesiredState) error {
	switch {
	case desired.GetExecuting() != nil:
		s.stop(errUnwanted)
		s.assignedUntil = s.next.Add(expireAfter)
		return s.begin(ctx, desired.GetExecuting())
	case desired.GetIdle() != nil:
		s.stop(errUnwanted)
		s.assignedUntil = time.Time{}
	case desired != nil:
		s.assignedUntil = s.next.Add(expireAfter)
		return errors.New("the scheduler requests a state that this worker does not know")
	case s.run != nil:
		s.assignedUntil = s.next.Add(expireAfter)
	default:
		s.state, s.assignedUntil = nil, time.Time{}
	}
	return nil
}

// begin starts an action. One that cannot be parsed is answered as failed, or the scheduler would assign it forever.
func (s *slot) begin(ctx context.Context, e *remoteworkerpb.DesiredState_Executing) error {
	if e.ActionDigest == nil {
		return errors.New("the scheduler names no action to execute")
	}
	task, err := s.task(e)
	if err != nil {
		f := &worker.Fault{Kind: worker.FaultInvalid, Err: err}
		s.state = completed(e.ActionDigest, s.faultResponse(f, e.ActionDigest))
		return fmt.Errorf("the scheduler assigns an invalid action: %w", err)
	}
	s.state = &remoteworkerpb.CurrentState_Executing{ActionDigest: e.ActionDigest, ExecutionState: stateStarted}
	s.run, s.reported = s.start(ctx, task, e), nil
	s.busy.Add(1)
	return nil
}

// stop cancels the run, if there is one, waits for its processes to die, and forgets it.
func (s *slot) stop(why error) {
	if s.run != nil {
		s.run.cancel(why)
		s.run.wait()
		s.run = nil
		s.busy.Add(-1)
	}
	s.state = nil
}

// currentState wraps the state of a slot; nil means idle.
func currentState(executing *remoteworkerpb.CurrentState_Executing) *remoteworkerpb.CurrentState {
	if executing == nil {
		return &remoteworkerpb.CurrentState{WorkerState: stateIdle}
	}
	return &remoteworkerpb.CurrentState{WorkerState: &remoteworkerpb.CurrentState_Executing_{Executing: executing}}
}

// describe names the slot and an action for messages.
func (s *slot) describe(action *repb.Digest) string {
	return fmt.Sprintf("worker %s, slot %s, action %s/%d", s.cfg.Worker, s.name, action.GetHash(), action.GetSizeBytes())
}
