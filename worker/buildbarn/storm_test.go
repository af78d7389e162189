// SPDX-License-Identifier: Apache-2.0

package buildbarn_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/tests/must"
	"github.com/cloister-build/cloister/worker"
	"github.com/cloister-build/cloister/worker/queue"
	statuspb "google.golang.org/genproto/googleapis/rpc/status"
	"google.golang.org/grpc/codes"
	grpcstatus "google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
)

// TestStorm lets workers vanish, restart, give up, lose answers and report nonsense while clients cancel. Every action
// must be answered once, and a result must be that of its own action.
func TestStorm(t *testing.T) {
	inBubble(t, nil, func(t *testing.T, h *head) {
		const actions = 300
		random := rand.New(rand.NewPCG(1, 2))
		var ops []*queue.Operation
		for i := range actions {
			ops = append(ops, h.submit(t, fmt.Sprint(i), func(r *queue.Request, _ *repb.Action) {
				r.Task.Invocation = fmt.Sprint(i % 5)
			}))
		}
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		var working sync.WaitGroup
		for machine := range 5 {
			for slot := range 3 {
				u := &unreliable{slot: h.slot(fmt.Sprint("m", machine), fmt.Sprint(slot)), random: rand.New(rand.NewPCG(uint64(machine), uint64(slot)))}
				working.Go(func() { u.work(ctx, t) })
			}
		}
		for _, o := range ops[actions*9/10:] {
			time.Sleep(time.Duration(random.IntN(300)) * time.Millisecond)
			o.Cancel("enough")
		}
		counts := map[worker.FaultKind]int{}
		for _, o := range ops {
			for seen := 0; ; {
				s, version, err := o.Wait(t.Context(), seen)
				must.Succeed(t, err)
				seen = version
				if s.Stage != repb.ExecutionStage_COMPLETED {
					continue
				}
				if s.Fault != nil {
					counts[s.Fault.Kind]++
				} else if counts[0]++; string(s.Outcome.Result.StdoutRaw) != o.Action().Hash() {
					t.Errorf("action %v has the result of action %s", o.Action(), s.Outcome.Result.StdoutRaw)
				}
				break
			}
		}
		cancel()
		working.Wait()
		t.Logf("outcomes by kind of fault: %v, retried: %d", counts, h.queue.Stats().Again)
		if counts[0] < actions/2 || counts[worker.FaultInternal] > 0 || counts[worker.FaultCancelled] == 0 || h.queue.Stats().Again == 0 {
			t.Errorf("outcomes by kind of fault: %v; want most without, some cancelled, some retried, none internal", counts)
		}
		if s := h.queue.Stats(); s.Running != 0 || s.Queued != 0 || s.Done != actions {
			t.Errorf("Running %d, Queued %d, Done %d; want 0, 0, %d", s.Running, s.Queued, s.Done, actions)
		}
	})
}

// An unreliable slot executes most of its actions.
type unreliable struct {
	*slot
	random *rand.Rand
}

func (u *unreliable) nap(ctx context.Context, most time.Duration) {
	select {
	case <-ctx.Done():
	case <-time.After(time.Duration(u.random.Int64N(int64(most)))):
	}
}

// work takes actions until ctx ends.
func (u *unreliable) work(ctx context.Context, t *testing.T) {
	state := idle()
	for ctx.Err() == nil {
		call, done := context.WithCancel(ctx)
		if u.random.IntN(20) == 0 { // the answer is lost
			call, done = context.WithTimeout(ctx, time.Duration(1+u.random.IntN(10))*time.Millisecond)
		}
		r, err := u.try(call, state)
		done()
		switch {
		case ctx.Err() != nil:
			return
		case err != nil:
			if c := grpcstatus.Code(err); c != codes.DeadlineExceeded && c != codes.ResourceExhausted {
				t.Errorf("Synchronize: %v", err)
			}
			u.nap(ctx, 5*time.Second)
			continue
		case r.DesiredState.GetIdle() != nil:
			state = idle()
			continue
		}
		if e := r.DesiredState.GetExecuting(); e != nil {
			state = executing(e.ActionDigest)
		}
		digest := state.GetExecuting().GetActionDigest()
		switch u.random.IntN(12) {
		case 0: // the machine is unreachable
			u.nap(ctx, 3*time.Minute)
			state = idle()
		case 1: // the worker restarts
			state = idle()
		case 2:
			state = completed(digest, &repb.ExecuteResponse{Status: &statuspb.Status{Code: int32(codes.Canceled)}})
		case 3: // an action it was not assigned
			state = completed(cas.SHA256.Sum([]byte("other")).Proto(), exited(1))
		case 4, 5:
			u.nap(ctx, 10*time.Second) // it still executes
		default:
			answer := exited(0)
			answer.Result.StdoutRaw = []byte(digest.GetHash())
			state = completed(proto.CloneOf(digest), answer)
		}
	}
}
