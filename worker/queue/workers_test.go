// SPDX-License-Identifier: Apache-2.0

package queue_test

import (
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
	"github.com/cloister-build/cloister/worker"
	"github.com/cloister-build/cloister/worker/queue"
)

// TestWorkerMayHaveTheNameOfTheHead checks that a worker with the name of the head, such as one that joins from the
// same machine, is distinct from its own slots: it has no logs here and skips the cache lookup.
func TestWorkerMayHaveTheNameOfTheHead(t *testing.T) {
	logs := 0
	c := queue.Config{Slots: 1, Offer: &queue.Offer{Worker: "anvil"}, Logs: func(*worker.Task) (*worker.Logs, func(*worker.Outcome)) {
		logs++
		return nil, func(*worker.Outcome) {}
	}}
	bubble(t, c, func(t *testing.T, q *queue.Queue, e *executor) {
		s := must.Get(q.Join(queue.Offer{Worker: "anvil", Slot: "7"}))(t)
		defer s.Leave("end of test")
		defer watch(t, submit(t, q, "a", nil))()
		defer watch(t, submit(t, q, "b", nil))()
		r := must.Get(s.Take(t.Context()))(t)
		defer r.Lost("end of test")
		expect.That(t, r.Task().SkipCacheLookup, "the worker's task does not skip the cache lookup")
		expect.That(t, logs == 1, "logs of %d runs, want 1: the own slot's", logs)
		for _, w := range q.Workers() {
			expect.That(t, len(w.Slots) == 1 && w.Local == (w.Slots[0].Name == "0"),
				"slots are %v with Local %v, want one slot and Local for slot 0 only", w.Slots, w.Local)
		}
	})
}

// TestRememberedWorkersAreBounded checks that workers that join and leave under ever new names or properties are
// forgotten, the first to leave first, along with the drain that applied to all.
func TestRememberedWorkersAreBounded(t *testing.T) {
	bubble(t, queue.Config{Head: true}, func(t *testing.T, q *queue.Queue, _ *executor) {
		visit := func(name, value string) {
			s, err := q.Join(queue.Offer{Worker: name, Slot: "0", Properties: []worker.Property{{Name: "pod", Value: value}}})
			must.Succeed(t, err)
			time.Sleep(time.Millisecond)
			s.Leave("stop")
		}
		q.DrainWorker("", "all")
		const many = 3000
		for i := range many {
			visit(fmt.Sprint("pod-", i), "")
			visit("anvil", fmt.Sprint(i))
		}
		workers := q.Workers()
		expect.That(t, len(workers) != 0 && len(workers) <= many/2,
			"%d workers are remembered, want at most %d", len(workers), many/2)
		if n := queue.Drains(q); n > len(workers) {
			t.Errorf("%d drains for %d workers", n, len(workers))
		}
		last := fmt.Sprint("pod-", many-1)
		kept := false
		for _, w := range workers {
			kept = kept || w.Name == last
			expect.That(t, !w.Drained.IsZero(), "worker %s is not drained", w.Name)
		}
		expect.That(t, kept, "the last worker to leave is forgotten")
		q.DrainWorker("anvil", "it alone")
		time.Sleep(time.Hour)
		synctest.Wait()
		if n, names := len(q.Workers()), queue.Drains(q); n != 0 || names != 1 {
			t.Errorf("after an hour: %d workers and %d drains, want 0 and the one by name", n, names)
		}
		s := must.Get(q.Join(queue.Offer{Worker: last, Slot: "0"}))(t)
		defer s.Leave("end of test")
		if w := q.Workers(); len(w) != 1 || w[0].Drained.IsZero() {
			t.Errorf("Workers = %+v, want one drained", w)
		}
	})
}
