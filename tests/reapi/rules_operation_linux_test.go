// SPDX-License-Identifier: Apache-2.0

package reapi_test

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"cloud.google.com/go/longrunning/autogen/longrunningpb"
	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/sandbox/sandboxtest"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/internal/bazelrun"
	"github.com/cloister-build/cloister/tests/must"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/stats"
	"google.golang.org/protobuf/proto"
)

// operationRules are the rules about operations.
var operationRules = []rule{
	{88, "exec", "the first message of an operation", execution, firstOperation},
	{89, "exec", "stages and their order", execution, stagesInOrder},
	{90, "exec", "an operation is done once and last", execution, doneOnce},
	{91, "exec", "progress messages while an action runs", execution, signsOfLife},
	{92, "exec", "WaitExecution before and after the end", execution, waitExecutions},
	{93, "exec", "clients that disconnect", execution, leaving},
	{94, "exec", "action cache hits and skip_cache_lookup", execution, hitsAndSkips},
	{95, "exec", "equal actions in flight are merged", execution, merging},
	{96, "exec", "do_not_cache", execution, notCached},
	{97, "exec", "operations after a restart", ownServer, lostOperations},
}

// stageOf decodes the metadata of an operation.
func stageOf(op *longrunningpb.Operation) (*repb.ExecuteOperationMetadata, error) {
	m := &repb.ExecuteOperationMetadata{}
	if err := op.GetMetadata().UnmarshalTo(m); err != nil {
		return nil, fmt.Errorf("metadata of operation %q: %w", op.GetName(), err)
	}
	return m, nil
}

func firstOperation(c *client) {
	d := c.prepare(job{steps: []string{"sleep 1s"}})
	a := c.request(d, nil)
	c.wantResult("sleep", a)
	first := a.ops[0]
	m := must.Get(stageOf(first))(c)
	if first.GetName() == "" || first.GetDone() || m.GetStage() != repb.ExecutionStage_QUEUED &&
		m.GetStage() != repb.ExecutionStage_CACHE_CHECK {
		c.Errorf("first message: got %v with stage %v, want a name and stage CACHE_CHECK or QUEUED", first, m.GetStage())
	}
	expect.That(c, proto.Equal(m.GetActionDigest(), d), "first message: got action %v, want %v", m.GetActionDigest(), d)
	for _, op := range a.ops {
		expect.Equal(c, op.GetName(), first.GetName(), "operation name")
	}
}

func stagesInOrder(c *client) {
	d := c.prepare(job{steps: []string{"sleep 500ms"}})
	a := c.request(d, nil)
	c.wantResult("sleep", a)
	var stages []repb.ExecutionStage_Value
	for _, op := range a.ops {
		m, err := stageOf(op)
		if err != nil {
			c.Errorf("after %v: %v", stages, err)
			continue
		}
		expect.That(c, proto.Equal(m.GetActionDigest(), d),
			"action of a message: got %v, want %v", m.GetActionDigest(), d)
		stages = append(stages, m.GetStage())
	}
	for i, s := range stages {
		expect.That(c, s >= repb.ExecutionStage_CACHE_CHECK && s <= repb.ExecutionStage_COMPLETED,
			"stages %v: %v is not a valid stage", stages, s)
		// Returning to QUEUED is permitted, since the worker may have been lost.
		if i > 0 && s < stages[i-1] && s != repb.ExecutionStage_QUEUED {
			c.Errorf("stages %v: %v after %v", stages, s, stages[i-1])
		}
	}
	if c.ours && !slices.Contains(stages, repb.ExecutionStage_EXECUTING) {
		c.Errorf("got stages %v of a sleeping action, want EXECUTING among them", stages)
	}
	expect.That(c, len(stages) != 0 && stages[len(stages)-1] == repb.ExecutionStage_COMPLETED,
		"got stages %v, want COMPLETED last", stages)
}

func doneOnce(c *client) {
	for what, j := range map[string]job{
		"a success":         {steps: []string{"say x"}},
		"a failure":         {steps: []string{"exit 3"}},
		"a timeout":         {steps: []string{"sleep 1h"}, timeout: time.Second},
		"a rejected action": {outputs: []string{"/x"}},
	} {
		a := c.try(j)
		if len(a.ops) == 0 { // the call itself was rejected
			expect.That(c, a.err != nil && what == "a rejected action", "%s: got no operation, and %v", what, a.err)
			continue
		}
		if a.response == nil {
			c.Errorf("%s: the stream ended with %v after %d messages, want OK after an ExecuteResponse", what, a.err, len(a.ops))
		}
		for i, op := range a.ops {
			m, err := stageOf(op)
			if err != nil {
				c.Errorf("%s: message %d: %v", what, i, err)
				continue
			}
			last := i == len(a.ops)-1
			if completed := m.GetStage() == repb.ExecutionStage_COMPLETED; completed != last || op.GetDone() != last {
				c.Errorf("%s: message %d of %d: got done=%v in stage %v", what, i+1, len(a.ops), op.GetDone(), m.GetStage())
			}
			expect.That(c, op.GetError() == nil,
				"%s: Operation.error is %v, want an ExecuteResponse with a status", what, op.GetError())
		}
	}
}

func signsOfLife(c *client) {
	// Our server sends a message every 20 s.
	sleep := 30 * time.Second
	if !c.ours {
		sleep = 75 * time.Second // others may send one every 60 s
	}
	ctx, cancel := context.WithTimeout(c.Context(), executeTime)
	defer cancel()
	var wait sync.WaitGroup
	wait.Go(func() { c.pings(ctx) })
	began := time.Now()
	s, err := c.open(ctx, c.prepare(job{steps: []string{"sleep " + sleep.String()}}), nil)
	signs := 0
	for err == nil {
		var op *longrunningpb.Operation
		// The first messages are about the start of the action.
		if op, err = s.Recv(); err == nil && !op.GetDone() && time.Since(began) > 10*time.Second {
			signs++
		}
	}
	if !errors.Is(err, io.EOF) || signs == 0 {
		c.Errorf("an action that runs for %v: got %d messages, %v, want at least one", sleep, signs, err)
		cancel() // the rule is broken already
	}
	wait.Wait()
}

// pings checks that an idle connection survives pings every 10 s, the shortest interval that clients can set. Servers
// that object do so at the third. It ends early with ctx.
func (c *client) pings(ctx context.Context) {
	address := *endpoint
	if c.ours {
		address = c.server.Addr
	}
	ends := &connections{}
	d := dial(c.TB, address, grpc.WithStatsHandler(ends), grpc.WithKeepaliveParams(
		keepalive.ClientParameters{Time: 10 * time.Second, Timeout: 20 * time.Second, PermitWithoutStream: true}))
	d.instance = c.instance
	d.still("a connection was made")
	select {
	case <-time.After(36 * time.Second):
	case <-ctx.Done():
		return
	}
	if n := ends.ended.Load(); n > 0 {
		c.Errorf("a connection with pings every 10 s: ended %d times, want none", n)
	}
	d.still("pings")
}

// connections counts ended connections.
type connections struct{ ended atomic.Int64 }

func (*connections) TagRPC(ctx context.Context, _ *stats.RPCTagInfo) context.Context   { return ctx }
func (*connections) HandleRPC(context.Context, stats.RPCStats)                         {}
func (*connections) TagConn(ctx context.Context, _ *stats.ConnTagInfo) context.Context { return ctx }

func (n *connections) HandleConn(_ context.Context, s stats.ConnStats) {
	if _, ok := s.(*stats.ConnEnd); ok {
		n.ended.Add(1)
	}
}

// begin executes an action until it is executing; leave ends the stream.
func (c *client) begin(d *repb.Digest) (name string, s stream, leave func()) {
	c.Helper()
	ctx, cancel := context.WithTimeout(c.Context(), executeTime)
	s, err := c.open(ctx, d, nil)
	if err != nil {
		cancel()
		c.Fatal(err)
	}
	for {
		op, err := s.Recv()
		if err != nil {
			cancel()
			c.Fatalf("the operation ended before it ran: %v", err)
		}
		m, err := stageOf(op)
		if err != nil || op.GetDone() {
			cancel()
			c.Fatalf("got %v, %v, want a running action", op, err)
		}
		if m.GetStage() == repb.ExecutionStage_EXECUTING {
			return op.GetName(), s, cancel
		}
	}
}

func waitExecutions(c *client) {
	for _, name := range []string{"no-such-operation", "operations/" + uuid(), fmt.Sprintf("%x", fresh(16))} {
		err := c.waitExecution(c.resource("%s", name)).err
		c.wantCode(fmt.Sprintf("WaitExecution of the unknown operation %q", name), err, codes.NotFound, codes.InvalidArgument)
	}
	for _, name := range []string{"", strings.Repeat("x", 1<<20)} {
		c.wantCode(fmt.Sprintf("WaitExecution of a name of %d bytes", len(name)), c.waitExecution(name).err, codes.NotFound, codes.InvalidArgument)
	}
	name, s, leave := c.begin(c.prepare(job{steps: []string{"sleep 4s", "random 100 out"}, outputs: []string{"out"}}))
	defer leave()
	// The first message has the current state.
	for range 3 {
		ctx, cancel := context.WithTimeout(c.Context(), time.Minute)
		w, err := c.exec.WaitExecution(ctx, &repb.WaitExecutionRequest{Name: name})
		if err == nil {
			var op *longrunningpb.Operation
			if op, err = w.Recv(); err == nil && op.GetName() != name {
				err = fmt.Errorf("got operation %q, want %q", op.GetName(), name)
			}
		}
		cancel() // the next iteration opens the stream again
		expect.Error(c, err, nil, "WaitExecution of an action that runs")
	}
	answers := make([]*answer, 30)
	var all sync.WaitGroup
	for i := range answers {
		all.Go(func() { answers[i] = c.waitExecution(name) })
	}
	first := c.wantResult("Execute", answered(s, nil))
	all.Wait()
	for range 2 {
		answers = append(answers, c.waitExecution(name)) // after the end
	}
	for _, a := range answers {
		expect.That(c, a.err == nil && proto.Equal(a.response.GetResult(), first.Result),
			"WaitExecution: got %v, %v, want the result of Execute: %v", a.response.GetResult(), a.err, first.Result)
	}
}

// mark returns a unique duration to sleep, by which the process can be found.
func mark() string {
	b := fresh(4)
	return fmt.Sprintf("1h0.%dm", 1+binary.LittleEndian.Uint32(b))
}

func leaving(c *client) {
	defer c.abandon(false)()
	if c.server != nil {
		defer c.abandon(true)()
	}
	var a *answer
	for range 5 {
		name, _, leave := c.begin(c.prepare(job{steps: []string{"sleep 3s", "random 100 out"}, outputs: []string{"out"}}))
		left := time.Now()
		leave()
		time.Sleep(500 * time.Millisecond) // so that the server notices
		a = c.waitExecution(name)
		if a.code() != codes.Canceled || time.Since(left) < 5*time.Second {
			break
		}
		c.Log("the machine stalled until the server dropped the action of a client that left")
	}
	if r := c.wantResult("WaitExecution of an action whose client left", a); r.Result.GetExitCode() != 0 ||
		len(r.Result.GetOutputFiles()) != 1 {
		c.Errorf("an action whose client reconnected: got %v", r)
	}
}

// abandon starts an action, cancels the call or, if lose is set, closes the connection of its client, and returns a
// function that waits until the server has cancelled the action: after seconds, or a minute.
func (c *client) abandon(lose bool) (wait func()) {
	c.Helper()
	if !c.ours {
		c.Log("not checked: the cancellation of abandoned actions, which requires its own server")
		return func() {}
	}
	sleep := mark()
	from := c
	if lose {
		from = dial(c.TB, c.server.Addr)
		from.instance = c.instance
	}
	name, _, leave := from.begin(c.prepare(job{steps: []string{"sleep " + sleep}}))
	alive := func() bool { return len(sandboxtest.Running(c, "sleep "+sleep)) > 0 }
	must.Hold(c, "running", alive)
	if lose {
		from.conn.Close()
	}
	leave()
	left := time.Now()
	return func() {
		c.Helper()
		for alive() && time.Since(left) < 2*time.Minute {
			time.Sleep(500 * time.Millisecond)
		}
		switch after := time.Since(left); {
		case alive():
			c.Errorf("abandoned action: running after %v, want it cancelled", after)
		case lose && after < 50*time.Second:
			c.Errorf("action of a lost connection: cancelled after %v, want a minute", after)
		}
		c.wantCode("WaitExecution of an action that was cancelled", c.waitExecution(name).err, codes.Canceled)
	}
}

func hitsAndSkips(c *client) {
	j := job{steps: []string{"random 100 out"}, outputs: []string{"out"}}
	d := c.prepare(j)
	_, first := c.wantSuccess("the first", c.request(d, nil))
	hit := c.wantResult("the second", c.request(d, nil))
	if !hit.GetCachedResult() || !proto.Equal(hit.Result, first) {
		c.Errorf("the second execution: got cached_result=%v and %v, want a hit with %v", hit.GetCachedResult(), hit.Result,
			first)
	}
	again := c.wantResult("skip_cache_lookup", c.request(d, skip))
	expect.That(c, !again.GetCachedResult() && c.file(again.Result, "out") != c.file(first, "out"),
		"skip_cache_lookup: got cached_result=%v and %v, want another run", again.GetCachedResult(), again.Result)
	now, err := c.recorded(d)
	expect.That(c, err == nil && c.file(now, "out") == c.file(again.Result, "out"),
		"after skip_cache_lookup the action cache has %v, %v, want %v", now, err, again.Result)
}

// atOnce executes an action n times while the first one runs.
func (c *client) atOnce(d *repb.Digest, n int) []*answer {
	answers := make([]*answer, n)
	var all sync.WaitGroup
	for i := range answers {
		all.Go(func() { answers[i] = c.request(d, skip) })
	}
	all.Wait()
	return answers
}

func merging(c *client) {
	answers := c.atOnce(c.prepare(job{steps: []string{"sleep 3s", "random 100 out"}, outputs: []string{"out"}}), 4)
	first := c.wantResult("the first", answers[0])
	for _, a := range answers[1:] {
		if r := c.wantResult("another", a); !proto.Equal(r.Result, first.Result) {
			c.Errorf("concurrent equal actions: got results %v and %v, want the same", r.Result, first.Result)
		}
	}
	// The result goes to the remaining client.
	d := c.prepare(job{steps: []string{"sleep 3s", "random 100 out"}, outputs: []string{"out"}})
	_, _, leave := c.begin(d)
	_, s, leaveToo := c.begin(d)
	defer leaveToo()
	leave()
	c.wantSuccess("an action of two clients, one of which left", answered(s, nil))
	if !c.ours {
		c.Log("not checked: whether a request raises the priority of an action, which requires its own server")
		return
	}
	small := c.own(bazelrun.ServerConfig{Jobs: 1})
	got := small.order([]contender{{"raised", 5}, {"other", 0}, {"raised", -5}})
	expect.Slices(c, got, []string{"raised", "other"}, "order; a request raises the priority of the first action")
}

func notCached(c *client) {
	j := job{
		steps: []string{"sleep 1s", "random 100 out"}, outputs: []string{"out"},
		change: func(a *repb.Action) { a.DoNotCache = true },
	}
	d := c.prepare(j)
	if c.caps.GetCacheCapabilities().GetActionCacheUpdateCapabilities().GetUpdateEnabled() {
		// Record a result that a lookup would find.
		_, err := c.ac.UpdateActionResult(c.Context(), &repb.UpdateActionResultRequest{
			InstanceName: c.instance, ActionDigest: d, ActionResult: &repb.ActionResult{StdoutRaw: []byte("recorded")},
		})
		if err != nil {
			c.Logf("UpdateActionResult: %v", err)
		}
	}
	answers := c.atOnce(d, 2)
	answers = append(answers, c.request(d, nil))
	seen := map[string]bool{}
	for _, a := range answers {
		_, r := c.wantSuccess("do_not_cache", a)
		expect.That(c, !a.response.GetCachedResult(), "an action with do_not_cache was answered from the action cache")
		seen[c.file(r, "out")] = true
	}
	expect.Equal(c, len(seen), len(answers))
	d = c.prepare(j)
	c.wantSuccess("do_not_cache", c.request(d, nil))
	c.notRecorded("an action with do_not_cache", d)
}

func lostOperations(c *client) {
	old := c.own(bazelrun.ServerConfig{Jobs: 1})
	d := old.prepare(job{steps: []string{"say x"}})
	a := old.request(d, nil)
	old.wantResult("say", a)
	ended := a.name()
	sleep := mark()
	running, _, leave := old.begin(old.prepare(job{steps: []string{"sleep " + sleep}}))
	defer leave()
	old.kill()
	again := c.own(bazelrun.ServerConfig{Jobs: 1, Dir: old.dir})
	for what, name := range map[string]string{"ran": running, "ended": ended} {
		c.wantCode("WaitExecution of an operation that "+what+" before the restart", again.waitExecution(name).err,
			codes.NotFound)
	}
	// The client can execute the action again.
	again.wantResult("Execute after the restart", again.request(d, nil))
}
