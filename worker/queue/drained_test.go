// SPDX-License-Identifier: Apache-2.0

package queue

import (
	"encoding/json"
	"testing"
	"time"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/tests/must"
	"github.com/cloister-build/cloister/worker"
)

// TestDrained checks that the queue is drained if every present worker is, or none is present and each that joins will
// be.
func TestDrained(t *testing.T) {
	q, err := New(Config{Head: true})
	must.Succeed(t, err)
	defer q.Close()
	want := func(when, why string) {
		t.Helper()
		if since, got := q.Drained(); since.IsZero() != (why == "") || got != why {
			t.Errorf("%s: Drained = %v, %q; want %q", when, since, got, why)
		}
	}
	join := func(name string) *Slot {
		t.Helper()
		s, err := q.Join(Offer{Worker: name, Slot: "0"})
		must.Succeed(t, err)
		return s
	}
	want("at first", "")
	a, b := join("a"), join("b")
	q.DrainWorker("a", "one")
	want("one of two", "")
	time.Sleep(time.Millisecond) // so that the times differ
	q.DrainWorker("b", "the other")
	want("both", "the other")
	a.Leave("")
	b.Leave("")
	want("both have left", "")
	q.DrainWorker("", "all")
	want("those that join", "all")
	q.UndrainWorker("a")
	join("a")
	want("one that is not", "")
	q.UndrainWorker("")
	want("at last", "")
}

// TestDrainStateRestoresDrains checks that a queue with the DrainState of another drains the same workers.
func TestDrainStateRestoresDrains(t *testing.T) {
	before, err := New(Config{Head: true})
	must.Succeed(t, err)
	defer before.Close()
	for _, name := range []string{"a", "b", "c"} {
		if _, err := before.Join(Offer{Worker: name, Slot: "0"}); err != nil {
			t.Fatal(err)
		}
	}
	drained := func(q *Queue) string {
		t.Helper()
		var text string
		for _, name := range []string{"a", "b", "c", "new"} {
			s, err := q.Join(Offer{Worker: name, Slot: "more"})
			must.Succeed(t, err)
			defer s.Leave("end of test")
		}
		for _, w := range q.Workers() {
			if !w.Drained.IsZero() {
				text += w.Name + ":" + w.Why + " "
			}
		}
		return text
	}
	for _, step := range []struct {
		do   func()
		want string
	}{
		{func() {}, ""},
		{func() { before.DrainWorker("a", "kernel") }, "a:kernel "},
		{func() { before.DrainWorker("", "all") }, "a:kernel b:all c:all new:all "},
		{func() { before.UndrainWorker("b") }, "a:kernel c:all new:all "},
		{func() { before.UndrainWorker("a") }, "c:all new:all "},
		{func() { before.DrainWorker("b", "again") }, "b:again c:all new:all "},
		{func() { before.UndrainWorker("") }, ""},
	} {
		step.do()
		text, err := json.Marshal(before.DrainState())
		must.Succeed(t, err)
		var state DrainState
		must.Succeed(t, json.Unmarshal(text, &state))
		after, err := New(Config{Head: true, Drains: state})
		must.Succeed(t, err)
		if again, _ := json.Marshal(after.DrainState()); string(again) != string(text) {
			t.Errorf("DrainState = %s, want %s", again, text)
		}
		if got := drained(after); got != step.want {
			t.Errorf("with %s drained are %q, want %q", text, got, step.want)
		}
		after.Close()
	}
}

// TestLostRunsAreCounted also checks the loss after which the action is not retried.
func TestLostRunsAreCounted(t *testing.T) {
	q, err := New(Config{Head: true, Attempts: 2})
	must.Succeed(t, err)
	defer q.Close()
	o, err := q.Submit(Request{Task: worker.Task{Action: cas.SHA256.Sum(nil)}})
	must.Succeed(t, err)
	for i, name := range []string{"a", "b"} {
		s, err := q.Join(Offer{Worker: name, Slot: "0"})
		must.Succeed(t, err)
		r, err := s.Take(t.Context())
		must.Succeed(t, err)
		r.Lost("crash")
		s.Leave("stop")
		if got := q.Stats(); got.Lost != int64(i+1) || got.Again != 1 {
			t.Errorf("after %d losses: Lost %d and Again %d, want Again 1", i+1, got.Lost, got.Again)
		}
	}
	if s := o.State(); s.Fault == nil || s.Worker != "b" {
		t.Errorf("state is %+v, want a fault on worker b", s)
	}
}
