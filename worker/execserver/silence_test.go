// SPDX-License-Identifier: Apache-2.0

package execserver

import (
	"context"
	"testing"
	"time"

	"cloud.google.com/go/longrunning/autogen/longrunningpb"
	cloisterpb "github.com/cloister-build/cloister/proto/cloister/v1"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
	"github.com/cloister-build/cloister/worker"
	"github.com/cloister-build/cloister/worker/queue"
	"google.golang.org/grpc"
)

// TestManyStreamsRepeatLessOften: 150,000 waiting clients get 3,000 repetitions per second, not 7,500. During a
// pull, a stream repeats its state once a second, but all streams together at most 1,000 times per second.
func TestManyStreamsRepeatLessOften(t *testing.T) {
	t.Parallel()
	s := &server{Config: Config{KeepaliveInterval: 20 * time.Second}}
	for streams, want := range map[int64]time.Duration{
		1: 20 * time.Second, 20_000: 20 * time.Second, 30_000: 30 * time.Second, 150_000: 50 * time.Second,
	} {
		s.streams.Store(streams)
		expect.Equal(t, s.silence(queue.State{}), want, "%d streams", streams)
	}
	pulling := queue.State{Pulling: func() *cloisterpb.ImagePull { return nil }}
	for streams, want := range map[int64]time.Duration{
		1: time.Second, 10_000: 10 * time.Second, 150_000: 50 * time.Second,
	} {
		s.streams.Store(streams)
		expect.Equal(t, s.silence(pulling), want, "%d streams during a pull", streams)
	}
}

// An observed stream calls on for each message.
type observed struct {
	grpc.ServerStream
	ctx context.Context
	on  func()
}

func (o observed) Context() context.Context            { return o.ctx }
func (o observed) Send(*longrunningpb.Operation) error { o.on(); return nil }

// TestStreamsAreCounted while they follow an operation.
func TestStreamsAreCounted(t *testing.T) {
	t.Parallel()
	q := must.Get(queue.New(queue.Config{Head: true}))(t)
	defer q.Close()
	o := must.Get(q.Submit(queue.Request{Task: worker.Task{}}))(t)
	s := &server{Config: Config{KeepaliveInterval: time.Hour}}
	o.Cancel("the test ends it")
	var during int64
	must.Succeed(t, s.follow(client{stream: observed{nil, t.Context(), func() { during = s.streams.Load() }}}, o, nil))
	expect.Equal(t, during, int64(1), "streams while one follows")
	expect.Equal(t, s.streams.Load(), int64(0), "streams after it")
}
