// SPDX-License-Identifier: Apache-2.0

package buildbarn

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net/url"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	remoteworkerpb "github.com/cloister-build/cloister/proto/buildbarn/remoteworker"
	"github.com/cloister-build/cloister/worker"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

const (
	// forgotten is how long after the time at which a scheduler wanted to hear of a worker that worker takes itself for
	// forgotten. Schedulers take a worker for lost after as long.
	forgotten = time.Minute
	// sooner and later bound the wait for that time: the clock of a scheduler may be wrong. Schedulers want to hear of a
	// worker every ten seconds, and one that takes workers for lost sooner than after a minute is to hear of it in time.
	sooner, later = time.Second, 10 * time.Second
	// callLimit is how long a call may take that the scheduler answers at once, and pollLimit one that waits for an action.
	callLimit, pollLimit = 30 * time.Second, 10 * time.Minute
	// farewell is how long a Client that is to end at once goes on telling the scheduler so.
	farewell = 5 * time.Second
	// maxPause bounds the wait after a call that failed, which is as long by chance as it comes.
	maxPause = 5 * time.Second
	// brief is how long a stage lasts at least of which the scheduler is told before the time at which it wants to hear of
	// the worker. A call for each stage of an action that takes milliseconds would cost as much as the action.
	brief = 20 * time.Millisecond
	// readyEvery is how often it is asked whether the worker can take actions.
	readyEvery = time.Second
)

// ClientConfig says what NewClient makes. Scheduler, Executor, Instances, Worker and Slots are required.
type ClientConfig struct {
	Scheduler remoteworkerpb.OperationQueueClient
	// Executor executes what the scheduler hands out, of as many slots at once as there are.
	Executor worker.Executor
	// Instances are the store that the Executor has, for what is said of results to people.
	Instances cas.Instances
	// Worker is the name of this machine. No other worker of the scheduler may have it.
	Worker string
	// Store, if not "", names what only one process has at a time and keeps over its end: a scheduler can tell by it a worker
	// that was started again from a second one of the same name.
	Store string
	Slots int
	// Prefix is the beginning of the names of instances whose actions are taken; "" is all.
	Prefix string
	// Properties are what actions may demand of this worker; a name may have several values. They need not be sorted.
	Properties []worker.Property
	// SizeClass is how large this worker is, by the scheduler's measure; 0 where it has none.
	SizeClass uint32
	// Ready, if not nil, says why no action can be executed now. It is asked often.
	Ready func() error
	// Browser, if not nil, is where a Buildbarn browser shows what is in the store.
	Browser *url.URL
	// Log is told of failures, and of the scheduler that does not answer; nil is nobody.
	Log *slog.Logger
}

// A Client takes actions from a scheduler: each of its slots one at a time, as a worker of its own. NewClient makes it.
type Client struct {
	ClientConfig
	platform *repb.Platform
	draining chan struct{}
	drain    sync.Once
	busy     atomic.Int64
	link     link
	gate     *gate
}

// NewClient returns a Client, which does nothing before Run. An error says what is wrong with the configuration.
func NewClient(c ClientConfig) (*Client, error) {
	if c.Worker == "" || c.Slots < 1 {
		return nil, errors.New("a worker needs a name and a slot")
	}
	if err := cas.CheckInstanceName(c.Prefix); err != nil {
		return nil, err
	}
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	if c.Ready == nil {
		c.Ready = func() error { return nil }
	}
	// Schedulers refuse what is not sorted: equal workers are to say equal things.
	sorted := slices.Clone(c.Properties)
	slices.SortFunc(sorted, worker.Property.Compare)
	platform := &repb.Platform{}
	for _, p := range slices.Compact(sorted) {
		platform.Properties = append(platform.Properties, &repb.Platform_Property{Name: p.Name, Value: p.Value})
	}
	client := &Client{ClientConfig: c, platform: platform, draining: make(chan struct{}), gate: newGate("not asked yet")}
	client.link.log = c.Log
	return client, nil
}

// Drain has Run return once no slot executes any more, and the scheduler knows. It may be called at any time, and again.
func (c *Client) Drain() { c.drain.Do(func() { close(c.draining) }) }

// Busy returns how many slots execute an action.
func (c *Client) Busy() int { return int(c.busy.Load()) }

// Down says since when the scheduler does not answer, and why, or "".
func (c *Client) Down() string { return c.link.down() }

// Run takes and executes actions until Drain is called. When ctx ends, it cancels what runs, tells the scheduler, and
// returns within seconds; nothing of an action is alive then.
func (c *Client) Run(ctx context.Context) {
	ended := make(chan struct{})
	var watch, slots sync.WaitGroup
	watch.Go(func() { c.watch(ctx, ended) })
	for i := range c.Slots {
		s := &slot{Client: c, name: strconv.Itoa(i + 1)}
		slots.Go(func() { s.loop(ctx) })
	}
	slots.Wait()
	close(ended)
	watch.Wait()
}

// leaving reports whether no more actions are to be taken.
func (c *Client) leaving(ctx context.Context) bool {
	select {
	case <-c.draining:
		return true
	default:
		return ctx.Err() != nil
	}
}

// watch opens and shuts the gate until Run has ended.
func (c *Client) watch(ctx context.Context, ended <-chan struct{}) {
	tick := time.NewTicker(readyEvery)
	defer tick.Stop()
	for !c.leaving(ctx) {
		c.able()
		select {
		case <-tick.C:
		case <-c.draining:
		case <-ctx.Done():
		case <-ended:
			return
		}
	}
	c.gate.shut("draining", true)
}

// able reports whether actions can be executed now, and moves the gate.
func (c *Client) able() bool {
	err := c.Ready()
	if err == nil {
		if c.gate.open() {
			c.Log.Info("actions can be executed", "worker", c.Worker, "slots", c.Slots)
		}
		return true
	}
	if c.gate.shut(err.Error(), false) {
		c.Log.Warn("actions cannot be executed, and none is taken", "worker", c.Worker, "why", err)
	}
	return false
}

// A slot is one worker of the scheduler's.
type slot struct {
	*Client
	name string
	// state is what it does, nil if that is nothing, and run is nil unless it executes.
	state *remoteworkerpb.CurrentState_Executing
	run   *run
	// told is the state of the run of which the scheduler was told last, nil if of none.
	told any
	// next is when the scheduler wants to hear of it, at the latest.
	next time.Time
	// believed is until when the scheduler may believe that it executes something; zero if it knows better.
	believed time.Time
	// refused says that it believes so only as far as calls may have been lost, each of which it refused.
	refused bool
	// killed is when ctx had ended.
	killed time.Time
}

// loop synchronizes with the scheduler until the slot may leave.
func (s *slot) loop(ctx context.Context) {
	defer s.stop(errUnwanted)
	for !s.mayLeave(ctx) {
		if err := s.step(ctx); err != nil {
			s.link.failed(err)
			s.pause(ctx, rand.N(maxPause))
		}
	}
}

// mayLeave reports whether nobody expects anything of the slot any more. A scheduler that was not heard of for so long
// has given it up.
func (s *slot) mayLeave(ctx context.Context) bool {
	if ctx.Err() != nil && s.killed.IsZero() {
		s.killed = time.Now()
	}
	switch {
	case !s.leaving(ctx):
		return false
	case (s.believed.IsZero() || s.refused) && s.run == nil, !s.believed.IsZero() && time.Now().After(s.believed):
		return true
	}
	return !s.killed.IsZero() && time.Since(s.killed) > farewell
}

// pause waits, but not once it is time to leave: then only long enough not to be in anybody's way.
func (s *slot) pause(ctx context.Context, d time.Duration) {
	if s.leaving(ctx) {
		time.Sleep(min(d, time.Second))
		return
	}
	select {
	case <-time.After(d):
	case <-s.draining:
	case <-ctx.Done():
	}
}

// step tells the scheduler once what the slot does, when there is something to tell, and does what it is told.
func (s *slot) step(ctx context.Context) error {
	if s.run != nil {
		s.await(ctx)
	}
	completed := s.state.GetCompleted()
	request := &remoteworkerpb.SynchronizeRequest{
		WorkerId:           s.id(),
		InstanceNamePrefix: s.Prefix,
		Platform:           s.platform,
		SizeClass:          s.SizeClass,
		CurrentState:       currentState(s.state),
	}
	// A call of a slot without an action waits for one, unless it says not to.
	poll := s.run == nil
	if poll {
		switch {
		case s.leaving(ctx):
			request.PreferBeingIdle = true
		case completed != nil:
			// After a failure of ours no action comes before it was looked whether one can be executed; and a scheduler that
			// was away is to say soon that it has the answer.
			request.PreferBeingIdle = completed.GetStatus().GetCode() != 0 || s.Down() != "" || !s.able()
		case !s.believed.IsZero():
			// It may have handed out an action, of which nothing was heard. Not before it is known is one taken.
			request.PreferBeingIdle = true
		case !s.able():
			s.gate.wait(ctx, s.draining)
			return nil
		}
		poll = !request.PreferBeingIdle
	}
	began := time.Now()
	response, err := s.call(ctx, request, poll)
	if err != nil {
		s.refused = (s.believed.IsZero() || s.refused) && refused(err)
		if s.believed.IsZero() {
			s.next = time.Now()
			s.believed = s.next.Add(forgotten) // an answer with an action may have been lost
		}
		if poll && s.gate.isShut() {
			return nil // we ended it ourselves
		}
		return err
	}
	s.link.answered()
	s.refused = false
	s.schedule(response.GetNextSynchronizationAt().AsTime())
	if err := s.obey(ctx, response.GetDesiredState()); err != nil {
		return err
	}
	switch {
	case s.leaving(ctx):
	case poll && s.state == nil && time.Since(began) < sooner:
		s.pause(ctx, sooner) // it does not let us wait
	case completed != nil && s.state == nil && ours(completed):
		s.pause(ctx, rand.N(maxPause)) // the next action could not be executed, either
	}
	return nil
}

// id is the worker_id of the slot.
func (s *slot) id() map[string]string {
	id := map[string]string{workerKey: s.Worker, "slot": s.name}
	if s.Store != "" {
		id[storeKey] = s.Store
	}
	return id
}

// ours reports whether an answer is of a fault of this worker.
func ours(r *repb.ExecuteResponse) bool {
	switch codes.Code(r.GetStatus().GetCode()) {
	case codes.Unavailable, codes.Internal, codes.ResourceExhausted:
		return true
	}
	return false
}

// refused reports whether the scheduler has said that it does not take such a worker: no action was handed out.
// RESOURCE_EXHAUSTED is none of these, since an answer that is too large is that, too.
func refused(err error) bool {
	switch status.Code(err) {
	case codes.InvalidArgument, codes.FailedPrecondition, codes.PermissionDenied, codes.Unauthenticated, codes.Unimplemented:
		return true
	}
	return false
}

// call makes one call. One that waits ends when the gate shuts. When ctx ends, what runs is cancelled, and a scheduler that
// does not answer is not waited for.
func (s *slot) call(ctx context.Context, request *remoteworkerpb.SynchronizeRequest, poll bool) (*remoteworkerpb.SynchronizeResponse, error) {
	limit := callLimit
	if poll {
		limit = pollLimit
	} else if !s.killed.IsZero() {
		limit = farewell
	}
	// What is to be told is told at the end, too.
	asked := ctx
	ctx, cancel := context.WithTimeout(context.WithoutCancel(asked), limit)
	defer cancel()
	if poll {
		defer s.gate.onShut(cancel)()
	} else if s.killed.IsZero() {
		answered, run := make(chan struct{}), s.run
		defer close(answered)
		defer context.AfterFunc(asked, func() {
			if run != nil {
				run.cancel(errStopped)
			}
			select {
			case <-answered:
			case <-time.After(farewell):
				cancel()
			}
		})()
	}
	return s.Scheduler.Synchronize(ctx, request)
}

// await waits until there is something to tell of the run: that it has ended, or has come further and stays there for
// more than a moment, or that it is time.
func (s *slot) await(ctx context.Context) {
	timer := time.NewTimer(time.Until(s.next))
	defer timer.Stop()
	done := ctx.Done()
	for waiting := true; waiting; {
		select {
		case <-timer.C:
			waiting = false
		case <-s.run.news:
			state, ended := s.run.said()
			until := s.next
			if state.ExecutionState != s.told {
				until = earlier(until, time.Now().Add(brief))
			}
			timer.Reset(time.Until(until))
			waiting = !ended
		case <-done:
			done = nil // from now on until it has ended
			s.run.cancel(errStopped)
		}
	}
	state, ended := s.run.said()
	s.state, s.told = state, state.ExecutionState
	if ended {
		s.run.wait()
		s.run = nil
		s.busy.Add(-1)
	}
}

// earlier returns the earlier of two times.
func earlier(a, b time.Time) time.Time {
	if a.Before(b) {
		return a
	}
	return b
}

// schedule notes when the scheduler wants to hear of the slot.
func (s *slot) schedule(at time.Time) {
	now := time.Now()
	s.next = now.Add(min(max(at.Sub(now), sooner), later))
}

// obey does what the scheduler wants.
func (s *slot) obey(ctx context.Context, desired *remoteworkerpb.DesiredState) error {
	switch {
	case desired.GetExecuting() != nil:
		s.stop(errUnwanted)
		s.believed = s.next.Add(forgotten)
		return s.begin(ctx, desired.GetExecuting())
	case desired.GetIdle() != nil:
		s.stop(errUnwanted)
		s.believed = time.Time{}
	case desired != nil:
		s.believed = s.next.Add(forgotten)
		return errors.New("the scheduler wants something that this worker does not know")
	case s.run != nil:
		s.believed = s.next.Add(forgotten)
	default:
		s.state, s.believed = nil, time.Time{}
	}
	return nil
}

// begin starts to execute what the scheduler wants. What cannot be understood is answered as an action that failed: the
// scheduler would hand it out again and again.
func (s *slot) begin(ctx context.Context, e *remoteworkerpb.DesiredState_Executing) error {
	if e.ActionDigest == nil {
		return errors.New("the scheduler names no action to execute")
	}
	task, err := s.task(e)
	if err != nil {
		s.state = completed(e.ActionDigest, s.faultResponse(&worker.Fault{Kind: worker.Invalid, Err: err}, e.ActionDigest))
		return fmt.Errorf("the scheduler hands out what cannot be executed: %w", err)
	}
	s.state = &remoteworkerpb.CurrentState_Executing{ActionDigest: e.ActionDigest, ExecutionState: stateStarted}
	s.run, s.told = s.start(ctx, task, e), nil
	s.busy.Add(1)
	return nil
}

// stop ends the run, if there is one, of which nothing is alive then, and forgets it.
func (s *slot) stop(why error) {
	if s.run != nil {
		s.run.cancel(why)
		s.run.wait()
		s.run = nil
		s.busy.Add(-1)
	}
	s.state = nil
}

// currentState is what a slot does, as the protocol has it.
func currentState(executing *remoteworkerpb.CurrentState_Executing) *remoteworkerpb.CurrentState {
	if executing == nil {
		return &remoteworkerpb.CurrentState{WorkerState: stateIdle}
	}
	return &remoteworkerpb.CurrentState{WorkerState: &remoteworkerpb.CurrentState_Executing_{Executing: executing}}
}

// where names a slot and its action to a person.
func (s *slot) where(action *repb.Digest) string {
	return fmt.Sprintf("worker %s, slot %s, action %s/%d", s.Worker, s.name, action.GetHash(), action.GetSizeBytes())
}
