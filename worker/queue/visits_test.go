// SPDX-License-Identifier: Apache-2.0

package queue_test

import (
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
	"github.com/cloister-build/cloister/worker/queue"
)

// TestStepsVisitNoMoreOfMore checks that the number of workers and operations that a step visits is the same in a queue
// that has four times as many of them.
func TestStepsVisitNoMoreOfMore(t *testing.T) {
	const full = 500 // operations
	// run lets a slot of a worker with the property on=WORKER execute an action.
	run := func(t *testing.T, q *queue.Queue, name, slot string) *queue.Operation {
		o := submit(t, q, name+slot, demands("on="+name))
		wantTake(t, join(t, q, name, slot, "on="+name), name+slot)
		return o
	}
	// abandon makes n clients leave while their actions run.
	abandon := func(t *testing.T, q *queue.Queue, n int) {
		run(t, q, "b", "0")
		for i := range n {
			run(t, q, "a", fmt.Sprint(i)).Follow()(false)
		}
	}
	for _, c := range []struct {
		name  string
		setUp func(t *testing.T, q *queue.Queue, n int)
		step  func(t *testing.T, q *queue.Queue)
	}{
		{"SubmitWhileAbandonedRunsKeepTheirSlots", abandon, func(t *testing.T, q *queue.Queue) {
			submit(t, q, "next", demands("on=a"))
		}},
		{"SubmitForOtherSlotsThanThoseOfAbandonedRuns", func(t *testing.T, q *queue.Queue, n int) {
			abandon(t, q, n)
			time.Sleep(10 * time.Second) // more than CancelGrace
		}, func(t *testing.T, q *queue.Queue) {
			submit(t, q, "next", demands("on=b"))
		}},
		{"ClientsLeaveWhileOthersWait", func(t *testing.T, q *queue.Queue, n int) {
			for i := range n {
				run(t, q, "a", fmt.Sprint(i))
			}
			for i := range n {
				submit(t, q, fmt.Sprint("next", i), demands("on=a"))
			}
		}, func(t *testing.T, q *queue.Queue) {
			run(t, q, "b", "0").Follow()(false)
			time.Sleep(10 * time.Second)
		}},
		{"SubmitToAQueueThatIsFullOfAbandonedOperations", func(t *testing.T, q *queue.Queue, n int) {
			for i := range full {
				leave := must.Get(q.Submit(numbered(i)))(t).Follow()
				if i >= full-n {
					leave(false)
				}
			}
		}, func(t *testing.T, q *queue.Queue) {
			must.Get(q.Submit(numbered(full)))(t)
		}},
		{"SubmitWhileAllWorkersAreBusy", func(t *testing.T, q *queue.Queue, n int) {
			for i := range n {
				run(t, q, fmt.Sprint(i), "0")
			}
		}, func(t *testing.T, q *queue.Queue) {
			submit(t, q, "next", demands("on=1"))
		}},
		{"JoinAmongManyWorkers", func(t *testing.T, q *queue.Queue, n int) {
			for i := range n {
				join(t, q, fmt.Sprint(i), "0", "")
			}
			join(t, q, "last", "0", "")
		}, func(t *testing.T, q *queue.Queue) {
			join(t, q, "last", "1", "")
		}},
		{"SweepWithoutAbandonedOperations", func(t *testing.T, q *queue.Queue, n int) {
			for i := range n {
				must.Get(q.Submit(numbered(i)))(t).Follow()
			}
		}, func(t *testing.T, _ *queue.Queue) {
			time.Sleep(20 * time.Second)
			synctest.Wait()
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			visits := func(n int) (visits int) {
				head(t, queue.Config{MaxLive: full}, func(t *testing.T, q *queue.Queue) {
					c.setUp(t, q, n)
					before := queue.Visits(q)
					c.step(t, q)
					visits = queue.Visits(q) - before
				})
				return visits
			}
			expect.Equal(t, visits(200), visits(50), "visits among 200, compared with those among 50")
		})
	}
}
