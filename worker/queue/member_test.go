// SPDX-License-Identifier: Apache-2.0

package queue_test

import (
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/cloister-build/cloister/worker"
	"github.com/cloister-build/cloister/worker/queue"
)

// TestWorkerOfTheHeadsName: a worker that has the name of the head itself, as one that joins from the same machine has, is
// another worker all the same: its slots have no logs here, and are not fetched for.
func TestWorkerOfTheHeadsName(t *testing.T) {
	logs := 0
	c := queue.Config{Slots: 1, Offer: &queue.Offer{Worker: "anvil"}, Logs: func(*worker.Task) (*worker.Logs, func(*worker.Outcome)) {
		logs++
		return nil, func(*worker.Outcome) {}
	}}
	bubble(t, c, func(t *testing.T, q *queue.Queue, e *executor) {
		s, err := q.Join(queue.Offer{Worker: "anvil", Slot: "7"})
		if err != nil {
			t.Fatal(err)
		}
		defer s.Leave("the test ends")
		defer watch(t, submit(t, q, "a", nil))()
		defer watch(t, submit(t, q, "b", nil))()
		r, err := s.Take(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		defer r.Lost("the test ends")
		if task := r.Task(); !task.SkipCacheLookup {
			t.Error("the worker is to look into the action cache, as own slots are")
		}
		if logs != 1 {
			t.Errorf("there are logs of %d runs, want those of the one in the slot of the head", logs)
		}
		for _, w := range q.Workers() {
			if len(w.Slots) != 1 || w.Local != (w.Slots[0].Name == "0") {
				t.Errorf("a worker has the slots %v, local %v", w.Slots, w.Local)
			}
		}
	})
}

// TestWorkersOfManyNames: those that come and go under ever new names, or with ever new properties, are forgotten before
// they are too many, the first to leave first; and so it is that they were drained as all are.
func TestWorkersOfManyNames(t *testing.T) {
	bubble(t, queue.Config{Head: true}, func(t *testing.T, q *queue.Queue, _ *executor) {
		come := func(name, value string) {
			s, err := q.Join(queue.Offer{Worker: name, Slot: "0", Properties: []worker.Property{{Name: "pod", Value: value}}})
			if err != nil {
				t.Fatal(err)
			}
			time.Sleep(time.Millisecond)
			s.Leave("it ends")
		}
		q.DrainWorker("", "all")
		const many = 3000
		for i := range many {
			come(fmt.Sprint("pod-", i), "")
			come("anvil", fmt.Sprint(i))
		}
		workers := q.Workers()
		if len(workers) == 0 || len(workers) > many/2 {
			t.Errorf("%d workers are remembered", len(workers))
		}
		if n := queue.Drains(q); n > len(workers) {
			t.Errorf("%d names are drained, of %d workers", n, len(workers))
		}
		last := fmt.Sprint("pod-", many-1)
		kept := false
		for _, w := range workers {
			kept = kept || w.Name == last
			if w.Drained.IsZero() {
				t.Errorf("worker %s is not drained", w.Name)
			}
		}
		if !kept {
			t.Error("the last to leave is forgotten")
		}
		q.DrainWorker("anvil", "it alone")
		time.Sleep(time.Hour)
		synctest.Wait()
		if n, names := len(q.Workers()), queue.Drains(q); n != 0 || names != 1 {
			t.Errorf("after an hour there are %d workers, and %d names that are drained; want none, and the one that was named", n, names)
		}
		s, err := q.Join(queue.Offer{Worker: last, Slot: "0"})
		if err != nil {
			t.Fatal(err)
		}
		defer s.Leave("the test ends")
		if w := q.Workers(); len(w) != 1 || w[0].Drained.IsZero() {
			t.Errorf("a worker that joins again: %+v", w)
		}
	})
}
