// SPDX-License-Identifier: Apache-2.0

package queue

import (
	"encoding/json"
	"testing"
	"time"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
	"github.com/cloister-build/cloister/worker"
)

// TestDrained checks that the queue is drained if every present worker is, or none is present and each that joins will
// be.
func TestDrained(t *testing.T) {
	q := must.Get(New(Config{Head: true}))(t)
	defer q.Close()
	want := func(when, why string) {
		t.Helper()
		if since, got := q.Drained(); since.IsZero() != (why == "") || got != why {
			t.Errorf("%s: Drained = %v, %q; want %q", when, since, got, why)
		}
	}
	join := func(name string) *Slot {
		t.Helper()
		return must.Get(q.Join(Offer{Worker: name, Slot: "0"}))(t)
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
	before := must.Get(New(Config{Head: true}))(t)
	defer before.Close()
	for _, name := range []string{"a", "b", "c"} {
		must.Get(before.Join(Offer{Worker: name, Slot: "0"}))(t)
	}
	drained := func(q *Queue) string {
		t.Helper()
		var text string
		for _, name := range []string{"a", "b", "c", "new"} {
			s := must.Get(q.Join(Offer{Worker: name, Slot: "more"}))(t)
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
		text := must.Get(json.Marshal(before.DrainState()))(t)
		var state DrainState
		must.Succeed(t, json.Unmarshal(text, &state))
		after := must.Get(New(Config{Head: true, Drains: state}))(t)
		if again, _ := json.Marshal(after.DrainState()); string(again) != string(text) {
			t.Errorf("DrainState = %s, want %s", again, text)
		}
		expect.Equal(t, drained(after), step.want, "with %s drained", text)
		after.Close()
	}
}

// TestLostRunsAreCounted also checks the loss after which the action is not retried.
func TestLostRunsAreCounted(t *testing.T) {
	q := must.Get(New(Config{Head: true, Attempts: 2}))(t)
	defer q.Close()
	o := must.Get(q.Submit(Request{Task: worker.Task{Action: cas.SHA256.Sum(nil)}}))(t)
	for i, name := range []string{"a", "b"} {
		s := must.Get(q.Join(Offer{Worker: name, Slot: "0"}))(t)
		r := must.Get(s.Take(t.Context()))(t)
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
