// SPDX-License-Identifier: Apache-2.0

package execserver_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"cloud.google.com/go/longrunning/autogen/longrunningpb"
	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
	"github.com/cloister-build/cloister/worker"
	"github.com/cloister-build/cloister/worker/execserver"
	"github.com/cloister-build/cloister/worker/queue"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// ended reads st to its end. The stream must end with a complete operation, or with an error that has a code.
func ended(t *testing.T, st stream) codes.Code {
	var last *longrunningpb.Operation
	for {
		m, err := st.Recv()
		switch {
		case err == nil && last.GetDone():
			t.Errorf("got %v after the end of the operation", m)
		case err == nil:
			last = m
			continue
		case err == io.EOF && !last.GetDone():
			t.Errorf("the stream ended without a result, after %v", last)
		case err == io.EOF:
			var r repb.ExecuteResponse
			expect.Error(t, last.GetResponse().UnmarshalTo(&r), nil, "operation %v", last)
			return codes.Code(r.GetStatus().GetCode())
		case status.Code(err) == codes.Unknown:
			t.Errorf("the stream ended with %v, want a status that says why", err)
		}
		return status.Code(err)
	}
}

// TestRule088_EveryStreamEndsWithAResultOrAnError, whatever ends the operation: results, faults, workers that lose
// their actions, cancellations, the absence of workers, and the end of the server. Completed operations are forgotten
// at once, and the state is repeated all the time.
func TestRule088_EveryStreamEndsWithAResultOrAnError(t *testing.T) {
	s := serve(t, nil, func(qc *queue.Config, ec *execserver.Config) {
		*qc = queue.Config{
			Head: true, Settle: time.Millisecond, Remembered: time.Millisecond, Unmatched: 5 * time.Millisecond,
			Grace: time.Millisecond, Attempts: 2, MaxRetained: 1, MaxLive: 60,
		}
		ec.KeepaliveInterval = time.Millisecond
	})
	const clients, each = 8, 40
	var actions [clients][each]*repb.Digest
	for i := range actions {
		for k := range actions[i] {
			actions[i][k] = s.action(t, fmt.Sprint(i/2, " ", k)).Proto() // two clients share each action
		}
	}
	ctx, stop := context.WithCancel(t.Context())
	var workers, builds, waits sync.WaitGroup
	for i := range 3 {
		workers.Go(func() { s.workUnreliably(ctx, fmt.Sprint("w", i)) })
	}
	var mu sync.Mutex
	codesOf := map[codes.Code]int{}
	note := func(c codes.Code) {
		mu.Lock()
		defer mu.Unlock()
		codesOf[c]++
	}
	for i := range actions {
		builds.Go(func() {
			for _, a := range actions[i] {
				call, leave := context.WithCancel(t.Context())
				st, err := s.Execute(call, &repb.ExecuteRequest{ActionDigest: a})
				if err != nil {
					t.Error(err)
				} else if m, err := st.Recv(); err != nil {
					if status.Code(err) != codes.ResourceExhausted {
						t.Errorf("an action is refused with %v", err)
					}
				} else {
					waits.Go(func() {
						if st, err := s.WaitExecution(t.Context(), &repb.WaitExecutionRequest{Name: m.Name}); err == nil {
							note(ended(t, st))
						}
					})
					switch rand.IntN(4) {
					case 0:
						_, _ = s.ops.CancelOperation(t.Context(), &longrunningpb.CancelOperationRequest{Name: m.Name}) // it may have ended
					case 1:
						leave()
					}
					note(ended(t, st))
				}
				leave()
			}
		})
	}
	builds.Wait()
	s.queue.Close() // ends what the waiting clients keep alive
	waits.Wait()
	stop()
	workers.Wait()
	for _, c := range []codes.Code{codes.OK, codes.Canceled, codes.Internal} {
		must.Be(t, codesOf[c] > 0, "the streams ended with %v, want each of OK, Canceled and Internal", codesOf)
	}
}

// workUnreliably joins as a worker again and again until ctx ends.
func (s *site) workUnreliably(ctx context.Context, name string) {
	for n := 0; ctx.Err() == nil; n++ {
		slot, err := s.queue.Join(queue.Offer{Worker: name, Slot: fmt.Sprint(n)})
		if err != nil {
			return // the queue is closed
		}
		for range 5 {
			run, err := slot.Take(ctx)
			if err != nil {
				break
			}
			switch rand.IntN(6) {
			case 0:
				run.End(nil, errors.New("defect"))
			case 1:
				run.Lost("no answer")
			case 2:
				run.GiveBack("shutdown")
			default:
				run.End(&worker.Outcome{Result: &repb.ActionResult{}}, nil)
			}
		}
		slot.Leave("test")
	}
}
