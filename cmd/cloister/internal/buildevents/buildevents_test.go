// SPDX-License-Identifier: Apache-2.0

package buildevents

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cloister-build/cloister/cas/casserver"
	"github.com/cloister-build/cloister/cas/quota"
	bepb "github.com/cloister-build/cloister/proto/bazel/buildeventstream"
	cloisterpb "github.com/cloister-build/cloister/proto/cloister/v1"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/grpctest"
	"github.com/cloister-build/cloister/tests/must"
	bespb "google.golang.org/genproto/googleapis/devtools/build/v1"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"
)

// end is the number that stands for the end of a build in the steps of a test.
const end = -1

func id(n int) string { return fmt.Sprintf("00000000-0000-4000-8000-%012d", n) }

// A rig is a store and its services.
type rig struct {
	*testing.T
	dir    string
	idle   time.Duration
	store  *Store
	conn   *grpc.ClientConn
	caller atomic.Value
}

func newRig(t *testing.T, maxBytes int64) *rig {
	r := &rig{T: t, dir: t.TempDir()}
	r.caller.Store("")
	r.open(maxBytes)
	return r
}

// open starts a server with the same files, as after a restart.
func (r *rig) open(maxBytes int64) {
	r.Helper()
	r.store = must.Get(Open(Config{Dir: r.dir, MaxBytes: maxBytes, Idle: r.idle}))(r)
	callers := quota.New(quota.Config{Name: r.Caller})
	g := grpc.NewServer(append(callers.Options(), grpc.MaxRecvMsgSize(16<<20))...)
	r.store.Register(g, r)
	r.conn = grpctest.Connect(r, g)
}

// Caller implements Callers.
func (r *rig) Caller(context.Context) string { return r.caller.Load().(string) }

// Reads implements Callers: mallory may read no instance but her own.
func (r *rig) Reads(ctx context.Context, instance string) bool {
	return r.Caller(ctx) != "mallory" || instance == "hers"
}

// anyInstance selects all instances.
func anyInstance(string) bool { return true }

// bazel returns the message with a number that has an event of Bazel's.
func bazel(build, number int, e *bepb.BuildEvent) *bespb.PublishBuildToolEventStreamRequest {
	value, err := proto.Marshal(e)
	if err != nil {
		panic(err)
	}
	return message(build, number, &bespb.BuildEvent{Event: &bespb.BuildEvent_BazelEvent{BazelEvent: &anypb.Any{
		TypeUrl: "type.googleapis.com/build_event_stream.BuildEvent", Value: value,
	}}})
}

func message(build, number int, e *bespb.BuildEvent) *bespb.PublishBuildToolEventStreamRequest {
	return &bespb.PublishBuildToolEventStreamRequest{ProjectId: "main", OrderedBuildEvent: &bespb.OrderedBuildEvent{
		StreamId:       &bespb.StreamId{InvocationId: id(build), BuildId: id(build), Component: bespb.StreamId_TOOL},
		SequenceNumber: int64(number), Event: e,
	}}
}

func final(build, number int) *bespb.PublishBuildToolEventStreamRequest {
	return message(build, number, &bespb.BuildEvent{
		Event: &bespb.BuildEvent_ComponentStreamFinished{ComponentStreamFinished: &bespb.BuildEvent_BuildComponentStreamFinished{}},
	})
}

func progress(build, number int, text string) *bespb.PublishBuildToolEventStreamRequest {
	return bazel(build, number, &bepb.BuildEvent{Payload: &bepb.BuildEvent_Progress{Progress: &bepb.Progress{Stderr: text}}})
}

// send makes a call with these messages and returns the acknowledged numbers and the end of the call.
func (r *rig) send(all ...*bespb.PublishBuildToolEventStreamRequest) (acks []int64, err error) {
	r.Helper()
	s := must.Get(bespb.NewPublishBuildEventClient(r.conn).PublishBuildToolEventStream(r.Context()))(r)
	for _, m := range all {
		if err := s.Send(m); err != nil {
			break // Recv returns why
		}
	}
	must.Succeed(r, s.CloseSend())
	for {
		m, err := s.Recv()
		if err == io.EOF {
			return acks, nil
		}
		if err != nil {
			return acks, err
		}
		acks = append(acks, m.SequenceNumber)
	}
}

// numbers returns the messages of a build, the last of which is its end if the list ends in the constant end.
func numbers(build int, list []int) (all []*bespb.PublishBuildToolEventStreamRequest) {
	for i, n := range list {
		if n == end {
			all = append(all, final(build, list[i-1]+1))
		} else {
			all = append(all, progress(build, n, fmt.Sprintf("line %d\n", n)))
		}
	}
	return all
}

func (r *rig) stderr(build int) string {
	r.Helper()
	return must.Get(r.store.Invocation(id(build)))(r).Stderr
}

// TestStreamsContinue repeats and continues streams as Bazel does after a lost connection: with the first event that
// was not acknowledged.
func TestStreamsContinue(t *testing.T) {
	for name, test := range map[string]struct {
		calls [][]int
		acks  []int64 // of the last call
		code  codes.Code
		lines int
	}{
		"one call":            {[][]int{{1, 2, 3, end}}, []int64{1, 2, 3, 4}, codes.OK, 3},
		"continued":           {[][]int{{1, 2}, {3, end}}, []int64{3, 4}, codes.OK, 3},
		"all repeated":        {[][]int{{1, 2, 3, end}, {1, 2, 3, end}}, []int64{1, 2, 3, 4}, codes.OK, 3},
		"the end repeated":    {[][]int{{1, 2, 3, end}, {3, end}}, []int64{3, 4}, codes.OK, 3},
		"some repeated":       {[][]int{{1, 2, 3}, {2, 3, 4, end}}, []int64{2, 3, 4, 5}, codes.OK, 4},
		"a gap":               {[][]int{{1, 2}, {4, end}}, nil, codes.Aborted, 2},
		"a gap inside a call": {[][]int{{1, 2, 4}}, []int64{1, 2}, codes.Aborted, 2},
		"repaired":            {[][]int{{1, 2}, {4}, {3, 4, end}}, []int64{3, 4, 5}, codes.OK, 4},
		"an unknown build":    {[][]int{{2}}, nil, codes.Aborted, 0},
		"after the end":       {[][]int{{1, end}, {3}}, nil, codes.FailedPrecondition, 1},
		"number 0":            {[][]int{{1, 0}}, nil, codes.InvalidArgument, 1},
	} {
		for _, restarts := range []bool{false, true} {
			t.Run(fmt.Sprint(name, " restarts=", restarts), func(t *testing.T) {
				r := newRig(t, 1<<20)
				var acks []int64
				var err error
				for i, c := range test.calls {
					if restarts && i > 0 {
						r.open(1 << 20)
					}
					acks, err = r.send(numbers(1, c)...)
				}
				expect.Equal(t, status.Code(err), test.code, "%v", err)
				if test.code != codes.InvalidArgument { // it ends the call while acknowledgements are on their way
					expect.Slices(t, acks, test.acks, "acknowledged")
				}
				if test.lines == 0 {
					expect.Error(t, expect.Err(r.store.Invocation(id(1))), ErrUnknown)
					return
				}
				var want strings.Builder
				for n := range test.lines {
					fmt.Fprintf(&want, "line %d\n", n+1)
				}
				expect.Equal(t, r.stderr(1), want.String())
			})
		}
	}
}

// TestEventsSurviveAKill cuts the file of a build off at each of its bytes: what is left can be read and continued.
func TestEventsSurviveAKill(t *testing.T) {
	r := newRig(t, 1<<20)
	must.Get(r.send(numbers(1, []int{1, 2, 3})...))(t)
	path := filepath.Join(r.dir, id(1)+eventsSuffix)
	whole := must.Get(os.ReadFile(path))(t)
	for n := range len(whole) {
		must.Succeed(t, os.WriteFile(path, whole[:n], 0o600))
		r.store = must.Get(Open(Config{Dir: r.dir, MaxBytes: 1 << 20}))(t)
		stored := strings.Count(string(whole[:n]), "\n")
		expect.Equal(t, strings.Count(r.stderr(1), "\n"), stored, "lines after %d bytes", n)
		p := must.Get(r.store.publish(Header{ID: id(1), Instance: "main"}, "", 4))(t)
		if acked, err := p.append([]event{{number: 4}}); (acked == 1) != (stored == 3) {
			t.Errorf("after %d bytes, %d events: appended %d, %v", n, stored, acked, err)
		}
		p.close()
	}
}

// TestLeftoversAreRemoved opens a store whose files are incomplete.
func TestLeftoversAreRemoved(t *testing.T) {
	r := newRig(t, 1<<20)
	must.Get(r.send(numbers(1, []int{1, end})...))(t)
	for name, text := range map[string]string{
		id(2) + eventsSuffix: "x", "." + id(3) + headerSuffix + "-1.new": "{", id(4) + headerSuffix: "{", id(4) + eventsSuffix: "x",
		"README": "an operator's",
	} {
		must.Succeed(t, os.WriteFile(filepath.Join(r.dir, name), []byte(text), 0o600))
	}
	r.open(1 << 20)
	names := []string{}
	for _, f := range must.Get(os.ReadDir(r.dir))(t) {
		names = append(names, f.Name())
	}
	expect.Slices(t, names, []string{id(1) + eventsSuffix, id(1) + headerSuffix, "README"})
	expect.Equal(t, len(r.store.List(10, anyInstance)), 1)
}

// TestUnremovableLeftoversAreLogged: they take space that the store does not count.
func TestUnremovableLeftoversAreLogged(t *testing.T) {
	dir := t.TempDir()
	must.Succeed(t, os.MkdirAll(filepath.Join(dir, id(2)+eventsSuffix, "busy"), 0o700))
	var log bytes.Buffer
	must.Get(Open(Config{Dir: dir, MaxBytes: 1 << 20, Log: slog.New(slog.NewTextHandler(&log, nil))}))(t)
	expect.Text(t, log.String(), id(2)+eventsSuffix)
}

// TestEventsOfARemovedBuildAreNotReplayed: while they cannot be removed, no other build gets their id.
func TestEventsOfARemovedBuildAreNotReplayed(t *testing.T) {
	r := newRig(t, 1<<20)
	path := filepath.Join(r.dir, id(1)+eventsSuffix)
	must.Succeed(t, os.MkdirAll(filepath.Join(path, "busy"), 0o700))
	p, err := r.store.publish(Header{ID: id(1), Instance: "main"}, "", 1)
	expect.That(t, p == nil && err != nil, "got %v, %v, want an error", p, err)
	expect.Equal(t, len(r.store.List(10, anyInstance)), 0, "builds")
	must.Succeed(t, os.RemoveAll(path))
	must.Get(r.store.publish(Header{ID: id(1), Instance: "main"}, "", 1))(t).close()
}

// TestBuildsBelongToTheirCaller lets nobody else append to a build or read it through another instance.
func TestBuildsBelongToTheirCaller(t *testing.T) {
	r := newRig(t, 1<<20)
	r.caller.Store("ci")
	must.Get(r.send(numbers(1, []int{1, 2})...))(t)
	other := numbers(1, []int{3})
	other[0].ProjectId = "other"
	expect.Equal(t, status.Code(expect.Err(r.send(other...))), codes.PermissionDenied, "another instance")
	r.caller.Store("mallory")
	expect.Equal(t, status.Code(expect.Err(r.send(numbers(1, []int{3})...))), codes.PermissionDenied, "another caller")
	expect.Equal(t, r.stderr(1), "line 1\nline 2\n")
	for instance, want := range map[string]codes.Code{"main": codes.OK, "other": codes.NotFound} {
		s := must.Get(cloisterpb.NewBuildsClient(r.conn).Read(t.Context(), &cloisterpb.ReadBuildRequest{
			InstanceName: instance, InvocationId: id(1),
		}))(t)
		m, err := s.Recv()
		expect.Equal(t, status.Code(err), want, "read in %s", instance)
		if want == codes.OK {
			expect.That(t, len(m.Events) == 2 && m.Caller == "ci", "got %d events of %q, want 2 of ci", len(m.Events), m.Caller)
		}
	}
}

// TestLists lists the builds of one instance, or of those that the caller may read, with their status.
func TestLists(t *testing.T) {
	r := newRig(t, 1<<20)
	ended := func(build int, code int32) []*bespb.PublishBuildToolEventStreamRequest {
		return []*bespb.PublishBuildToolEventStreamRequest{bazel(build, 1, &bepb.BuildEvent{Payload: &bepb.BuildEvent_Finished{
			Finished: &bepb.BuildFinished{ExitCode: &bepb.BuildFinished_ExitCode{Code: code}},
		}}), final(build, 2)}
	}
	must.Get(r.send(ended(1, 0)...))(t)
	must.Get(r.send(ended(2, 3)...))(t)
	must.Get(r.send(numbers(3, []int{1})...))(t)
	must.Get(r.send(numbers(4, []int{1, end})...))(t) // its end is unknown
	s := must.Get(bespb.NewPublishBuildEventClient(r.conn).PublishBuildToolEventStream(t.Context()))(t)
	running := progress(5, 1, "")
	running.ProjectId = "hers"
	must.Succeed(t, s.Send(running))
	must.Get(s.Recv())(t)
	client := cloisterpb.NewBuildsClient(r.conn)
	for name, c := range map[string]struct {
		caller string
		req    *cloisterpb.ListBuildsRequest
		want   []string
	}{
		"one instance":  {"", &cloisterpb.ListBuildsRequest{InstanceName: "main"}, []string{Interrupted, Interrupted, Failed, Succeeded}},
		"all instances": {"", &cloisterpb.ListBuildsRequest{AllInstances: true}, []string{Running, Interrupted, Interrupted, Failed, Succeeded}},
		"the latest":    {"", &cloisterpb.ListBuildsRequest{AllInstances: true, Limit: 1}, []string{Running}},
		"few rights":    {"mallory", &cloisterpb.ListBuildsRequest{AllInstances: true}, []string{Running}},
	} {
		r.caller.Store(c.caller)
		var got []string
		for _, b := range must.Get(client.List(t.Context(), c.req))(t).Builds {
			got = append(got, b.Status)
			expect.That(t, b.Received.IsValid() && b.InstanceName != "", "%s: got %v", name, b)
		}
		expect.Slices(t, got, c.want, name)
	}
	for _, bad := range []*cloisterpb.ListBuildsRequest{{Limit: -1}, {InstanceName: "main", AllInstances: true}} {
		expect.Equal(t, status.Code(expect.Err(client.List(t.Context(), bad))), codes.InvalidArgument, "%v", bad)
	}
	for build, want := range map[int]codes.Code{1: codes.NotFound, 5: codes.OK} { // as mallory
		r.caller.Store("mallory")
		read := must.Get(client.Read(t.Context(), &cloisterpb.ReadBuildRequest{AllInstances: true, InvocationId: id(build)}))(t)
		m, err := read.Recv()
		expect.Equal(t, status.Code(err), want, "build %d", build)
		if want == codes.OK {
			expect.That(t, m.Publishing && m.InstanceName == "hers", "got %v", m)
		}
	}
}

// TestBadStreamsAreRefused checks ids that would be bad file names, and streams that change.
func TestBadStreamsAreRefused(t *testing.T) {
	r := newRig(t, 1<<20)
	for name, change := range map[string]func(a, b *bespb.PublishBuildToolEventStreamRequest){
		"no id":    func(a, _ *bespb.PublishBuildToolEventStreamRequest) { a.OrderedBuildEvent.StreamId = nil },
		"no event": func(a, _ *bespb.PublishBuildToolEventStreamRequest) { a.OrderedBuildEvent = nil },
		"a path": func(a, _ *bespb.PublishBuildToolEventStreamRequest) {
			a.OrderedBuildEvent.StreamId.InvocationId = "../x"
		},
		"an invalid name": func(a, _ *bespb.PublishBuildToolEventStreamRequest) { a.ProjectId = "a//b" },
		"two builds": func(_, b *bespb.PublishBuildToolEventStreamRequest) {
			b.OrderedBuildEvent.StreamId.InvocationId = id(9)
		},
		"two instances":      func(_, b *bespb.PublishBuildToolEventStreamRequest) { b.ProjectId = "other" },
		"an invalid message": func(_, b *bespb.PublishBuildToolEventStreamRequest) { b.OrderedBuildEvent = nil },
	} {
		all := numbers(1, []int{1, 2})
		change(all[0], all[1])
		expect.Equal(t, status.Code(expect.Err(r.send(all...))), codes.InvalidArgument, "%s", name)
	}
	lifecycle := bespb.NewPublishBuildEventClient(r.conn)
	_, err := lifecycle.PublishLifecycleEvent(t.Context(), &bespb.PublishLifecycleEventRequest{ProjectId: "a//b"})
	expect.Equal(t, status.Code(err), codes.InvalidArgument, "lifecycle")
	must.Get(lifecycle.PublishLifecycleEvent(t.Context(), &bespb.PublishLifecycleEventRequest{}))(t)
}

// TestLargeBuildsContinue sends more than is stored: the build continues, its end is known, and the rest is counted.
func TestLargeBuildsContinue(t *testing.T) {
	r := newRig(t, 1<<20) // 256 KiB for a build
	all := []*bespb.PublishBuildToolEventStreamRequest{progress(1, 1, strings.Repeat("x", maxEvent))}
	for n := 2; n < 20; n++ {
		all = append(all, progress(1, n, strings.Repeat("x", 40<<10)))
	}
	all = append(all, bazel(1, 20, &bepb.BuildEvent{Payload: &bepb.BuildEvent_Finished{
		Finished: &bepb.BuildFinished{ExitCode: &bepb.BuildFinished_ExitCode{Name: "TESTS_FAILED", Code: 3}},
	}}), final(1, 21))
	acks, err := r.send(all...)
	expect.That(t, err == nil && len(acks) == 21, "got %d acknowledgements, %v", len(acks), err)
	b := must.Get(r.store.Invocation(id(1)))(t)
	expect.That(t, b.Status == Failed && b.Exit == "TESTS_FAILED" && b.Missing == 15, "got %s, %s, %d missing, want 15", b.Status, b.Exit, b.Missing)
	r.open(1 << 20)
	acks, err = r.send(all[18:]...)
	expect.That(t, err == nil && slices.Equal(acks, []int64{19, 20, 21}), "repeated: got %d, %v", acks, err)

	p := must.Get(r.store.publish(Header{ID: id(2), Instance: "main"}, "", 1))(t)
	defer p.close()
	var n int64
	for err = nil; err == nil; {
		n++
		_, err = p.append([]event{{number: n, data: make([]byte, 100)}})
		must.Be(t, n < 100_000, "a build of %d events is not bounded", n)
	}
	expect.Error(t, err, ErrFull)
}

// TestOldBuildsAreRemoved bounds all builds together, also those that are published now.
func TestOldBuildsAreRemoved(t *testing.T) {
	r := newRig(t, 1<<20)
	first := must.Get(r.store.publish(Header{ID: id(1), Instance: "main"}, "", 1))(t)
	must.Get(first.append([]event{{number: 1, data: []byte("x")}}))(t)
	for n := 2; n < 100; n++ {
		must.Get(r.send(numbers(n, []int{1, 2, end})...))(t)
	}
	must.Get(first.append([]event{{number: 2, data: []byte("x")}}))(t) // its client is not disturbed
	first.close()
	check := func() {
		t.Helper()
		all := r.store.List(1000, anyInstance)
		expect.That(t, len(all) > 40 && len(all) < 64 && all[0].ID == id(99), "got %d builds, the first of which is %v", len(all), all[0])
		files := must.Get(os.ReadDir(r.dir))(t)
		expect.Equal(t, len(files), 2*len(all), "files")
		expect.Error(t, expect.Err(r.store.Invocation(id(1))), ErrUnknown)
	}
	check()
	r.open(1 << 20)
	check()
}

// TestCallersKeepTheirBuilds: a caller with many builds displaces none of another.
func TestCallersKeepTheirBuilds(t *testing.T) {
	r := newRig(t, 1<<20)
	r.caller.Store("modest")
	must.Get(r.send(numbers(1, []int{1, 2, end})...))(t)
	r.caller.Store("greedy")
	for n := 2; n < 100; n++ {
		must.Get(r.send(numbers(n, []int{1, 2, end})...))(t)
	}
	all := r.store.List(1000, anyInstance)
	expect.That(t, len(all) > 40 && len(all) < 64, "got %d builds", len(all))
	expect.Equal(t, r.stderr(1), "line 1\nline 2\n", "build of the other caller")
	expect.Error(t, expect.Err(r.store.Invocation(id(2))), ErrUnknown)
	r.open(1 << 19) // a smaller limit
	expect.Equal(t, r.stderr(1), "line 1\nline 2\n", "build of the other caller after a restart")
}

// TestOpenBuildsOfOneCallerAreBounded: a caller that publishes as many builds at once as it can does not prevent others
// from publishing, but it has more than its share while they leave room.
func TestOpenBuildsOfOneCallerAreBounded(t *testing.T) {
	r := newRig(t, 64<<20)
	begin := func(build int) (bespb.PublishBuildEvent_PublishBuildToolEventStreamClient, error) {
		s := must.Get(bespb.NewPublishBuildEventClient(r.conn).PublishBuildToolEventStream(t.Context()))(t)
		must.Succeed(t, s.Send(progress(build, 1, "")))
		_, err := s.Recv()
		return s, err
	}
	r.caller.Store("greedy")
	var last bespb.PublishBuildEvent_PublishBuildToolEventStreamClient
	for n := range maxOpen / 2 {
		last = must.Get(begin(n))(t)
	}
	_, err := begin(maxOpen / 2)
	s := status.Convert(err)
	expect.That(t, s.Code() == codes.ResourceExhausted && len(s.Details()) == 1, "got %v, want RESOURCE_EXHAUSTED with RetryInfo", err)
	must.Get(begin(0))(t) // another stream of an open build
	r.caller.Store("modest")
	must.Get(r.send(numbers(1000, []int{1, 2, end})...))(t)
	r.caller.Store("greedy")
	must.Succeed(t, last.CloseSend())
	expect.Error(t, expect.Err(last.Recv()), io.EOF)
	must.Get(begin(maxOpen / 2))(t)
}

// TestFollow waits for changes as a page does.
func TestFollow(t *testing.T) {
	r := newRig(t, 1<<20)
	expect.Error(t, expect.Err(r.store.Changed(id(1))), ErrUnknown)
	began := must.Get(r.store.Changed(""))(t)
	s := must.Get(bespb.NewPublishBuildEventClient(r.conn).PublishBuildToolEventStream(t.Context()))(t)
	must.Succeed(t, s.Send(progress(1, 1, "")))
	must.Get(s.Recv())(t)
	<-began
	expect.Equal(t, r.store.List(1, anyInstance)[0].Status, Running)
	expect.Equal(t, must.Get(r.store.Invocation(id(1)))(t).Status, Running)
	must.Succeed(t, s.CloseSend())
	_, err := s.Recv()
	expect.Error(t, err, io.EOF)
	for {
		changed := must.Get(r.store.Changed(id(1)))(t)
		if r.store.List(1, anyInstance)[0].Status != Running {
			break
		}
		<-changed
	}
	expect.Equal(t, r.store.List(1, anyInstance)[0].Status, Interrupted)
}

// TestSilentClientsAreDisconnected: a client that sends nothing, or receives nothing, loses its stream and can
// continue.
func TestSilentClientsAreDisconnected(t *testing.T) {
	r := newRig(t, 1<<20)
	r.idle = 100 * time.Millisecond
	r.open(1 << 20)
	silent := func(all ...*bespb.PublishBuildToolEventStreamRequest) (acks int) {
		s := must.Get(bespb.NewPublishBuildEventClient(r.conn).PublishBuildToolEventStream(t.Context()))(t)
		for _, m := range all {
			_ = s.Send(m) // Recv returns why
		}
		for {
			if _, err := s.Recv(); err != nil {
				expect.That(t, status.Code(err) == codes.Unavailable && strings.Contains(err.Error(), "silent"), "after %d events: %v", acks, err)
				return acks
			}
			acks++
		}
	}
	expect.Equal(t, silent(), 0, "acknowledged events")
	must.Hold(t, "an event arrived in time", func() bool { return silent(progress(1, 1, "line 1\n")) == 1 })
	must.Hold(t, "closed the publisher", func() bool { return r.store.List(1, anyInstance)[0].Status == Interrupted })
	r.idle = 0
	r.open(1 << 20)
	must.Get(r.send(numbers(1, []int{2, end})...))(t)
	expect.Equal(t, r.stderr(1), "line 1\nline 2\n")
}

// A defect panics in each call that publishes.
type defect struct{ everyone }

// Caller implements Callers.
func (defect) Caller(context.Context) string { panic("defect") }

// TestPanicFailsOnlyItsCall and not the actions that the server executes.
func TestPanicFailsOnlyItsCall(t *testing.T) {
	g := grpc.NewServer(casserver.ServerOptions(nil)...)
	must.Get(Open(Config{Dir: t.TempDir(), MaxBytes: 1 << 20}))(t).Register(g, defect{})
	s := must.Get(bespb.NewPublishBuildEventClient(grpctest.Connect(t, g)).PublishBuildToolEventStream(t.Context()))(t)
	must.Succeed(t, s.Send(progress(1, 1, "line 1\n")))
	_, err := s.Recv()
	expect.Code(t, err, codes.Internal)
}

// TestUnwritableFilesAreRetried checks that nothing is acknowledged that is not stored.
func TestUnwritableFilesAreRetried(t *testing.T) {
	r := newRig(t, 1<<20)
	must.Get(r.send(numbers(1, []int{1})...))(t)
	path := filepath.Join(r.dir, id(1)+eventsSuffix)
	must.Succeed(t, errors.Join(os.Rename(path, path+".away"), os.Mkdir(path, 0o700)))
	acks, err := r.send(numbers(1, []int{2})...)
	expect.That(t, status.Code(err) == codes.Unavailable && acks == nil, "got %d, %v", acks, err)
	expect.That(t, !strings.Contains(err.Error(), r.dir), "the client learns of files: %v", err)
	must.Succeed(t, errors.Join(os.Remove(path), os.Rename(path+".away", path)))
	must.Get(r.send(numbers(1, []int{2, end})...))(t)
	expect.Equal(t, r.stderr(1), "line 1\nline 2\n")
}
