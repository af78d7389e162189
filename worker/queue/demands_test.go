// SPDX-License-Identifier: Apache-2.0

package queue_test

import (
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
	"github.com/cloister-build/cloister/worker"
	"github.com/cloister-build/cloister/worker/queue"
)

// mostDemands is the number of different demands that may wait in one instance.
const mostDemands = 1000

// kind sets one of many different demands.
func kind(i int) func(*queue.Request) { return demands(fmt.Sprint("kind=", i)) }

// fillDemands submits actions with as many different demands as may wait.
func fillDemands(t *testing.T, q *queue.Queue) []*queue.Operation {
	t.Helper()
	var all []*queue.Operation
	for i := range mostDemands {
		all = append(all, submit(t, q, fmt.Sprint(i), kind(i)))
	}
	wantStage(t, all[mostDemands-1], repb.ExecutionStage_QUEUED)
	return all
}

// TestDistinctDemandsAreBounded checks the limit of distinct demands, all of which each free slot has to check. It does
// not affect demands that already wait, other instances, or actions for which a slot is free.
func TestDistinctDemandsAreBounded(t *testing.T) {
	head(t, queue.Config{}, func(t *testing.T, q *queue.Queue) {
		time.Sleep(2 * time.Minute) // more than Config.Settle
		first := fillDemands(t, q)[0]
		wantFault(t, submit(t, q, "too many", kind(mostDemands)), worker.FaultExhausted)
		expect.Equal(t, queue.Buckets(q), mostDemands, "buckets")
		accepted := func(name string, change func(*queue.Request)) {
			t.Helper()
			expect.Equal(t, submit(t, q, name, change).State().Stage, repb.ExecutionStage_QUEUED, "stage")
		}
		accepted("0", kind(0)) // shares the run
		accepted("equal demands", kind(1))
		accepted("another instance", func(r *queue.Request) {
			kind(-1)(r)
			r.Task.Instance = "other"
		})
		idle := begin(t, join(t, q, "a", "0", "kind=free"))
		submit(t, q, "for a free slot", demands("kind=free"))
		expect.That(t, idle.got() != nil, "a free slot did not get an action with new demands")

		busy := join(t, q, "b", "0", "kind=2 kind=1000 kind=1001")
		wantTake(t, busy, "2")
		accepted("in its place", kind(mostDemands))
		wantFault(t, submit(t, q, "too many again", kind(mostDemands+1)), worker.FaultExhausted)
		first.Cancel("requested") // another operation shares its run
		wantFault(t, submit(t, q, "still too many", kind(mostDemands+1)), worker.FaultExhausted)
	})
}

// TestLostWorkersUseUpNoDemands checks that actions with equal demands count once, even if they avoid other workers.
func TestLostWorkersUseUpNoDemands(t *testing.T) {
	head(t, queue.Config{}, func(t *testing.T, q *queue.Queue) {
		var runs []*queue.Run
		for i := range mostDemands + 1 {
			submit(t, q, fmt.Sprint(i), demands("kind=x"))
			runs = append(runs, wantTake(t, join(t, q, fmt.Sprint("w", i), "0", "kind=x"), fmt.Sprint(i)))
		}
		for _, r := range runs {
			r.Lost("crash")
		}
		must.Be(t, queue.Buckets(q) == mostDemands+1, "%d buckets, want %d", queue.Buckets(q), mostDemands+1)
		wantStage(t, submit(t, q, "next", demands("kind=y")), repb.ExecutionStage_QUEUED)
	})
}

// TestLostActionsWaitBeyondTheLimit checks that an action that was accepted is not refused when it waits again.
func TestLostActionsWaitBeyondTheLimit(t *testing.T) {
	head(t, queue.Config{}, func(t *testing.T, q *queue.Queue) {
		o := submit(t, q, "x", demands("kind=x"))
		r := wantTake(t, join(t, q, "a", "0", "kind=x"), "x")
		fillDemands(t, q)
		r.Lost("crash")
		wantStage(t, o, repb.ExecutionStage_QUEUED)
	})
}

// TestRefusedDemandsHaveNoEffect checks that no run yields to a refused action, and that the queue forgets the action.
func TestRefusedDemandsHaveNoEffect(t *testing.T) {
	head(t, queue.Config{}, func(t *testing.T, q *queue.Queue) {
		first := fillDemands(t, q)[0]
		a := join(t, q, "a", "0", "kind=x size=1")
		old := begin(t, a)
		leave := submit(t, q, "old", demands("kind=x size=1")).Follow()
		must.Be(t, old.got() != nil, "the slot has no action")
		leave(false)
		time.Sleep(10 * time.Second) // more than CancelGrace: it may yield
		flows, buckets := queue.Flows(q), queue.Buckets(q)
		wantFault(t, submit(t, q, "x", demands("kind=x")), worker.FaultExhausted)
		select {
		case <-old.run.Cancelled():
			t.Error("a run has yielded to a refused action")
		default:
		}
		expect.Equal(t, queue.Flows(q), flows, "flows")
		expect.Equal(t, queue.Buckets(q), buckets, "buckets")
		first.Cancel("requested")
		wantStage(t, submit(t, q, "x", demands("kind=x")), repb.ExecutionStage_QUEUED)
	})
}

// TestDemandsThatNoWorkerMeetsAreUnmet checks that demands that no worker meets fail without advice to retry, even
// beyond the limit.
func TestDemandsThatNoWorkerMeetsAreUnmet(t *testing.T) {
	head(t, queue.Config{}, func(t *testing.T, q *queue.Queue) {
		time.Sleep(2 * time.Minute) // more than Config.Settle
		var offered strings.Builder
		for i := range mostDemands + 1 {
			fmt.Fprintf(&offered, "kind=%04d ", i)
		}
		join(t, q, "a", "0", offered.String())
		kind := func(i int) func(*queue.Request) { return demands(fmt.Sprintf("kind=%04d", i)) }
		for i := range mostDemands {
			submit(t, q, fmt.Sprint(i), kind(i))
		}
		wantFault(t, submit(t, q, "offered", kind(mostDemands)), worker.FaultExhausted)
		wantFault(t, submit(t, q, "not offered", kind(mostDemands+1)), worker.FaultUnmet)
	})
}

// TestAbandonedDemandsMakeRoom checks that a new demand replaces an abandoned action that shares its demands with no
// other action, that the action abandoned first is replaced first, and that none is replaced within CancelGrace.
func TestAbandonedDemandsMakeRoom(t *testing.T) {
	head(t, queue.Config{}, func(t *testing.T, q *queue.Queue) {
		all := fillDemands(t, q)
		other := submit(t, q, "other", func(r *queue.Request) { r.Task.Instance = "other" })
		as1 := submit(t, q, "as 1", kind(1))
		submit(t, q, "2", kind(2)) // shares its run
		for _, o := range []*queue.Operation{other, all[1], as1, all[2], all[4], all[3]} {
			o.Follow()(false)
			time.Sleep(time.Second)
		}
		wantFault(t, submit(t, q, "too early", kind(mostDemands)), worker.FaultExhausted)
		time.Sleep(3 * time.Second) // all[4] has had no client for CancelGrace
		wantStage(t, submit(t, q, "next", kind(mostDemands)), repb.ExecutionStage_QUEUED)
		wantFault(t, all[4], worker.FaultCancelled)
		wantFault(t, submit(t, q, "early for all[3]", kind(mostDemands+1)), worker.FaultExhausted)
		time.Sleep(time.Second)
		for i, o := range []*queue.Operation{other, all[1], as1, all[2], all[3]} {
			expect.Equal(t, o.State().Stage, repb.ExecutionStage_QUEUED, "stage of operation %d", i)
		}
		submit(t, q, "another", kind(mostDemands+1))
		wantFault(t, all[3], worker.FaultCancelled)
		wantFault(t, submit(t, q, "too many", kind(mostDemands+2)), worker.FaultExhausted)
	})
}

// TestNestedDemandsAreNotBounded checks that nested actions are always accepted, since others wait for them, and are
// not counted.
func TestNestedDemandsAreNotBounded(t *testing.T) {
	bubble(t, queue.Config{Slots: 1, Depth: 1}, func(t *testing.T, q *queue.Queue, _ *executor) {
		nested := func(name string, i int) *queue.Operation {
			r := at(1, name)
			kind(i)(&r)
			o := must.Get(q.Submit(r))(t)
			synctest.Wait()
			return o
		}
		submit(t, q, "holds the slot", nil)
		nested("holds the nested slot", 0)
		for i := range mostDemands + 1 {
			nested(fmt.Sprint(i), -i)
		}
		fillDemands(t, q)
		wantFault(t, submit(t, q, "too many", kind(mostDemands)), worker.FaultExhausted)
		wantStage(t, nested("one more", mostDemands+1), repb.ExecutionStage_QUEUED)
	})
}

// TestCallersLeaveDemandsToOthers checks that one authenticated caller cannot use up an instance's demands, that only
// its own abandoned demands make room for its next ones, and that its demands count only while they wait.
func TestCallersLeaveDemandsToOthers(t *testing.T) {
	head(t, queue.Config{}, func(t *testing.T, q *queue.Queue) {
		by := func(caller string, i int) *queue.Operation {
			t.Helper()
			return submit(t, q, fmt.Sprint(caller, i), func(r *queue.Request) {
				kind(i)(r)
				r.Caller = caller
			})
		}
		var greedy []*queue.Operation
		for i := range mostDemands / 2 {
			greedy = append(greedy, by("greedy", i))
		}
		abandoned := by("other", mostDemands)
		abandoned.Follow()(false)
		time.Sleep(10 * time.Second) // more than CancelGrace
		wantFault(t, by("greedy", mostDemands+1), worker.FaultExhausted)
		wantStage(t, abandoned, repb.ExecutionStage_QUEUED)
		wantStage(t, by("greedy", mostDemands), repb.ExecutionStage_QUEUED) // equal demands
		wantStage(t, by("other", mostDemands+1), repb.ExecutionStage_QUEUED)
		greedy[1].Follow()(false)
		time.Sleep(10 * time.Second)
		wantStage(t, by("greedy", mostDemands+2), repb.ExecutionStage_QUEUED)
		wantFault(t, greedy[1], worker.FaultCancelled)
		wantFault(t, by("greedy", mostDemands+3), worker.FaultExhausted)
		greedy[0].Cancel("requested")
		wantStage(t, by("greedy", mostDemands+3), repb.ExecutionStage_QUEUED)
	})
}
