// SPDX-License-Identifier: Apache-2.0

package queue_test

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
	"github.com/cloister-build/cloister/worker"
	"github.com/cloister-build/cloister/worker/queue"
)

// head runs f with a queue without own slots, which never cancels unwatched operations.
func head(t *testing.T, c queue.Config, f func(t *testing.T, q *queue.Queue)) {
	t.Helper()
	c.Head, c.Grace, c.Retain, c.Hint = true, 1000*time.Hour, 1000*time.Hour, hint
	bubble(t, c, func(t *testing.T, q *queue.Queue, _ *executor) { f(t, q) })
}

// hint is a Config.Hint.
func hint(u queue.Unmatched) string {
	switch {
	case u.NoWorker:
		return "start one"
	case len(u.Missing) == 0:
		return ""
	}
	return fmt.Sprint("missing ", u.Missing)
}

// properties parses NAME=VALUE pairs, separated by spaces.
func properties(s string) []worker.Property {
	var all []worker.Property
	for p := range strings.FieldsSeq(s) {
		name, value, _ := strings.Cut(p, "=")
		all = append(all, worker.Property{Name: name, Value: value})
	}
	return all
}

// demands sets the demands of a request.
func demands(s string) func(*queue.Request) {
	return func(r *queue.Request) { r.Demands = properties(s) }
}

func join(t *testing.T, q *queue.Queue, name, slot, has string) *queue.Slot {
	t.Helper()
	return joinOffer(t, q, queue.Offer{Worker: name, Slot: slot, Properties: properties(has)})
}

func joinOffer(t *testing.T, q *queue.Queue, o queue.Offer) *queue.Slot {
	t.Helper()
	s, err := q.Join(o)
	must.Be(t, err == nil, "Join(%+v): %v", o, err)
	return s
}

// take returns the run that s gets at once, or nil.
func take(t *testing.T, s *queue.Slot) *queue.Run {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Nanosecond)
	defer cancel()
	r, err := s.Take(ctx)
	must.Be(t, err == nil || errors.Is(err, context.DeadlineExceeded), "Take: %v", err)
	return r
}

// wantTake checks that s gets the action of that name at once, or none if the name is empty.
func wantTake(t *testing.T, s *queue.Slot, name string) *queue.Run {
	t.Helper()
	r := take(t, s)
	switch {
	case name == "" && r != nil:
		t.Fatalf("the slot got action %v, want none", r.Task().Action)
	case name != "" && r == nil:
		t.Fatalf("the slot got nothing, want %s", name)
	case name != "" && r.Task().Action != action(name):
		t.Fatalf("the slot got action %v, want %s", r.Task().Action, name)
	}
	return r
}

// A pendingTake is a Take in the background.
type pendingTake struct {
	run  *queue.Run
	err  error
	done chan struct{}
}

func begin(t *testing.T, s *queue.Slot) *pendingTake {
	k := &pendingTake{done: make(chan struct{})}
	go func() {
		defer close(k.done)
		k.run, k.err = s.Take(t.Context())
	}()
	synctest.Wait()
	return k
}

// got returns the run that Take has returned, or nil.
func (k *pendingTake) got() *queue.Run {
	synctest.Wait()
	select {
	case <-k.done:
		return k.run
	default:
		return nil
	}
}

func (k *pendingTake) wantErr(t *testing.T, want error) {
	t.Helper()
	synctest.Wait()
	select {
	case <-k.done:
		if !errors.Is(k.err, want) {
			t.Errorf("Take = %v, %v; want %v", k.run, k.err, want)
		}
	default:
		t.Errorf("Take waits, want %v", want)
	}
}

// ended returns the outcome of the n-th run.
func ended(n int32) *worker.Outcome {
	return &worker.Outcome{Result: &repb.ActionResult{ExitCode: n}}
}

func TestSlotTakesWhatItOffers(t *testing.T) {
	for _, c := range []struct {
		name              string
		offer             queue.Offer
		instance, demands string
		want              bool
	}{
		{name: "no property, no demand", want: true},
		{name: "a property, no demand", offer: queue.Offer{Properties: properties("a=1")}, want: true},
		{name: "a demand, no property", demands: "a=1"},
		{name: "the same", offer: queue.Offer{Properties: properties("a=1 b=2")}, demands: "a=1 b=2", want: true},
		{name: "a subset", offer: queue.Offer{Properties: properties("a=1 b=2 c=3")}, demands: "b=2", want: true},
		{name: "in another order", offer: queue.Offer{Properties: properties("c=3 b=2 a=1 b=0")}, demands: "a=1 b=2 c=3", want: true},
		{name: "one demand missing", offer: queue.Offer{Properties: properties("a=1 b=2")}, demands: "a=1 b=2 c=3"},
		{name: "another value", offer: queue.Offer{Properties: properties("a=1")}, demands: "a=2"},
		{name: "one of several values", offer: queue.Offer{Properties: properties("a=1 a=2 a=3")}, demands: "a=2", want: true},
		{name: "several of several values", offer: queue.Offer{Properties: properties("a=1 a=2 a=3")}, demands: "a=1 a=3", want: true},
		{name: "one of two values missing", offer: queue.Offer{Properties: properties("a=1 a=2")}, demands: "a=2 a=3"},
		{name: "the value of another name", offer: queue.Offer{Properties: properties("a=1 b=2")}, demands: "a=2"},
		{name: "a path", offer: queue.Offer{}, demands: "InputRootAbsolutePath=/w"},
		{name: "a path, offered", offer: queue.Offer{Properties: properties("chroot-path=/")}, demands: "chroot-path=/", want: true},
		{name: "paths and users", offer: queue.Offer{Places: true}, demands: "chroot-path=/ dockerRunAsRoot=true inputRootAbsolutePath=/", want: true},
		{name: "a path and more", offer: queue.Offer{Places: true}, demands: "a=1 chroot-path=/"},
		{name: "empty value", offer: queue.Offer{Properties: properties("a=1")}, demands: "a="},
		{name: "any", offer: queue.Offer{Any: true}, demands: "a=1 b=2", want: true},
		{name: "any, another instance", offer: queue.Offer{Any: true, Prefix: "x"}, instance: "y", demands: "a=1"},
		{name: "every instance", instance: "x/y", want: true},
		{name: "the instance", offer: queue.Offer{Prefix: "x/y"}, instance: "x/y", want: true},
		{name: "an instance below", offer: queue.Offer{Prefix: "x"}, instance: "x/y/z", want: true},
		{name: "an instance above", offer: queue.Offer{Prefix: "x/y"}, instance: "x"},
		{name: "an instance beside", offer: queue.Offer{Prefix: "x"}, instance: "xy"},
		{name: "the empty instance", offer: queue.Offer{Prefix: "x"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			for _, waits := range []string{"slot", "action"} {
				head(t, queue.Config{}, func(t *testing.T, q *queue.Queue) {
					s := joinOffer(t, q, c.offer)
					var k *pendingTake
					if waits == "slot" {
						k = begin(t, s)
					}
					o := submit(t, q, "x", func(r *queue.Request) {
						demands(c.demands)(r)
						r.Task.Instance = c.instance
					})
					if waits == "action" {
						k = begin(t, s)
					}
					r := k.got()
					must.Be(t, (r != nil) == c.want,
						"with the %s waiting: taken is %v, want %v", waits, r != nil, c.want)
					if r == nil {
						wantStage(t, o, repb.ExecutionStage_QUEUED)
						return
					}
					wantStage(t, o, repb.ExecutionStage_EXECUTING)
					r.End(ended(7), nil)
					wantRun(t, o, 7)
				})
			}
		})
	}
}

func TestUnmatchedFaultNamesTheNearestOffer(t *testing.T) {
	for _, c := range []struct {
		name    string
		offers  []queue.Offer
		demands string
		want    string
	}{
		{
			"another image",
			[]queue.Offer{{Worker: "a"}, {Worker: "b", Properties: properties("container-image=docker://y")}},
			"container-image=docker://x",
			"no worker offers container-image=docker://x; the nearest is worker b with container-image=docker://y; " +
				"offered values of container-image: docker://y; missing [container-image=docker://x]",
		},
		{
			"one of two",
			[]queue.Offer{{Worker: "a", Properties: properties("os=mac")}, {Worker: "b", Properties: properties("os=linux gpu=small gpu=none")}},
			"gpu=large os=linux",
			"no worker offers gpu=large; the nearest is worker b with gpu=none, gpu=small; " +
				"offered values of gpu: none, small; missing [gpu=large]",
		},
		{
			"each, but not together",
			[]queue.Offer{{Worker: "a", Properties: properties("x=1 y=2")}, {Worker: "b", Properties: properties("x=2 y=1")}},
			"x=1 y=1",
			"no worker offers y=1; the nearest is worker a with y=2; offered values of y: 1, 2; missing [y=1]",
		},
		{
			"unknown names",
			[]queue.Offer{{Worker: "a b"}},
			"x=1 y=\u00e9",
			`no worker offers x=1, "y=\u00e9"; the nearest is worker "a b" with no x, no y; ` +
				`no worker offers any x; missing [x=1 "y=\u00e9"]`,
		},
		{
			"other instances",
			[]queue.Offer{{Worker: "a", Prefix: "team/b"}, {Worker: "b", Prefix: "team/a", Any: true}},
			"x=1",
			`no worker serves instance "main"`,
		},
		{
			"values of other instances",
			[]queue.Offer{{Worker: "a", Properties: properties("pool=all")}, {Worker: "b", Prefix: "team/a", Properties: properties("pool=secret")}},
			"pool=x",
			"no worker offers pool=x; the nearest is worker a with pool=all; offered values of pool: all; missing [pool=x]",
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			head(t, queue.Config{}, func(t *testing.T, q *queue.Queue) {
				for _, o := range c.offers {
					joinOffer(t, q, o)
				}
				time.Sleep(2 * time.Minute)
				o := submit(t, q, "x", func(r *queue.Request) {
					demands(c.demands)(r)
					r.Task.Instance = "main"
				})
				expect.Equal(t, wantFault(t, o, worker.FaultUnmet).Error(), c.want, "fault")
			})
		})
	}
	t.Run("many values", func(t *testing.T) {
		head(t, queue.Config{}, func(t *testing.T, q *queue.Queue) {
			for i := range 30 {
				join(t, q, fmt.Sprint(i), "", fmt.Sprintf("a=%02d", i))
			}
			time.Sleep(2 * time.Minute)
			got := wantFault(t, submit(t, q, "x", demands("a=x")), worker.FaultUnmet).Error()
			expect.Text(t, got, "08, 09 and 20 more")
		})
	})
}

func TestUnmatchedWaitsWhileWorkersMayCome(t *testing.T) {
	t.Run("after the start", func(t *testing.T) {
		head(t, queue.Config{}, func(t *testing.T, q *queue.Queue) {
			join(t, q, "a", "", "")
			o := submit(t, q, "x", demands("gpu=1"))
			time.Sleep(50 * time.Second)
			wantStage(t, o, repb.ExecutionStage_QUEUED)
			taken := submit(t, q, "y", demands("gpu=2"))
			wantTake(t, join(t, q, "late", "", "gpu=2"), "y")
			wantStage(t, taken, repb.ExecutionStage_EXECUTING)
			time.Sleep(30 * time.Second)
			wantFault(t, o, worker.FaultUnmet)
			expect.Equal(t, q.Stats().Queued, 0, "Queued")
			expect.Equal(t, queue.Buckets(q), 0, "buckets are left")
		})
	})
	t.Run("no worker at all", func(t *testing.T) {
		head(t, queue.Config{}, func(t *testing.T, q *queue.Queue) {
			early := submit(t, q, "x", nil)
			time.Sleep(3 * time.Minute)
			late := submit(t, q, "y", nil)
			time.Sleep(115 * time.Second)
			wantStage(t, early, repb.ExecutionStage_QUEUED)
			time.Sleep(20 * time.Second)
			expect.Equal(t, wantFault(t, early, worker.FaultUnavailable).Error(),
				"no worker has joined for 5m0s; start one", "fault")
			wantStage(t, late, repb.ExecutionStage_QUEUED)
			wantTake(t, join(t, q, "a", "", ""), "y")
		})
	})
	t.Run("one that has left", func(t *testing.T) {
		head(t, queue.Config{}, func(t *testing.T, q *queue.Queue) {
			join(t, q, "other", "", "")
			one, two := join(t, q, "a", "1", "gpu=1"), join(t, q, "a", "2", "gpu=1")
			one.Leave("restart")
			time.Sleep(time.Hour)
			two.Leave("restart")
			time.Sleep(14 * time.Minute)
			o := submit(t, q, "x", demands("gpu=1"))
			wantStage(t, o, repb.ExecutionStage_QUEUED)
			if d := q.Demands(); len(d) != 1 || d[0].Unmet != "worker a has left" {
				t.Errorf("Demands = %+v, want one whose worker has left", d)
			}
			wantTake(t, join(t, q, "a", "1", "gpu=1"), "x").Lost("gone")
			time.Sleep(time.Hour)
			wantStage(t, o, repb.ExecutionStage_QUEUED) // it has come back
		})
		head(t, queue.Config{}, func(t *testing.T, q *queue.Queue) {
			join(t, q, "other", "", "")
			join(t, q, "a", "1", "gpu=1").Leave("for good")
			o := submit(t, q, "x", demands("gpu=1"))
			time.Sleep(14 * time.Minute)
			wantStage(t, o, repb.ExecutionStage_QUEUED)
			time.Sleep(2 * time.Minute)
			wantFault(t, o, worker.FaultUnmet)
			expect.Equal(t, len(q.Workers()), 1, "workers are known")
		})
	})
	t.Run("one that is drained", func(t *testing.T) {
		head(t, queue.Config{}, func(t *testing.T, q *queue.Queue) {
			join(t, q, "a", "1", "gpu=1")
			q.DrainWorker("a", "maintenance")
			time.Sleep(time.Hour)
			o := submit(t, q, "x", demands("gpu=1"))
			time.Sleep(time.Hour)
			wantStage(t, o, repb.ExecutionStage_QUEUED)
			if d := q.Demands(); len(d) != 1 || d[0].Unmet != "worker a is drained" {
				t.Errorf("Demands = %+v, want one whose worker is drained", d)
			}
		})
	})
}

// TestRefuse checks that Refuse ends only actions that have waited long enough and that no own slot may take.
func TestRefuse(t *testing.T) {
	offer := &queue.Offer{Worker: "own", Properties: properties("os=own")}
	bubble(t, queue.Config{Slots: 1, Offer: offer, Grace: time.Hour}, func(t *testing.T, q *queue.Queue, _ *executor) {
		join(t, q, "a", "1", "os=remote")
		running := submit(t, q, "running", demands("os=own"))
		own, remote := submit(t, q, "own", demands("os=own")), submit(t, q, "remote", demands("os=remote"))
		time.Sleep(time.Minute)
		late := submit(t, q, "late", demands("os=remote"))
		q.Refuse(time.Minute, "the store is down")
		expect.Text(t, wantFault(t, remote, worker.FaultUnavailable).Error(),
			"waited for 1m0s: the store is down; retry later", "fault")
		wantStage(t, running, repb.ExecutionStage_EXECUTING)
		wantStage(t, own, repb.ExecutionStage_QUEUED)
		wantStage(t, late, repb.ExecutionStage_QUEUED)
	})
}

// TestRule087_FairnessSpansPlatforms checks that what a build runs on one platform counts on every other.
func TestRule087_FairnessSpansPlatforms(t *testing.T) {
	both := func(build, platform string) func(*queue.Request) {
		return func(r *queue.Request) { of(build)(r); demands(platform)(r) }
	}
	head(t, queue.Config{}, func(t *testing.T, q *queue.Queue) {
		x, y := join(t, q, "x", "", "p=x"), join(t, q, "y", "", "p=y")
		submit(t, q, "a0", both("a", "p=x"))
		submit(t, q, "a1", both("a", "p=x"))
		submit(t, q, "a2", both("a", "p=y"))
		submit(t, q, "b0", both("b", "p=y"))
		submit(t, q, "b1", both("b", "p=x"))
		a0 := wantTake(t, x, "a0")
		b0 := wantTake(t, y, "b0") // a came first, but already runs one
		a0.End(ended(1), nil)
		b0.End(ended(1), nil)
		wantTake(t, x, "a1").End(ended(1), nil) // a was served before b
		wantTake(t, x, "b1")
		wantTake(t, y, "a2")
		expect.Equal(t, queue.Flows(q), 2, "flows")
	})
	head(t, queue.Config{}, func(t *testing.T, q *queue.Queue) {
		all := join(t, q, "all", "", "p=x p=y p=z")
		want := []string{"0", "1", "2", "3", "4", "5"}
		for i, name := range want {
			submit(t, q, name, both("a", []string{"p=z", "p=x", "p=y"}[i%3]))
		}
		for _, name := range want {
			wantTake(t, all, name).End(ended(1), nil)
		}
		if n, l := queue.Flows(q), queue.Buckets(q); n != 0 || l != 0 {
			t.Errorf("%d flows and %d buckets are left, want 0", n, l)
		}
	})
}

// TestLostActionRunsAgain checks that a lost action is queued again before later ones.
func TestLostActionRunsAgain(t *testing.T) {
	for _, how := range []string{"lost", "its slot left"} {
		t.Run(how, func(t *testing.T) {
			head(t, queue.Config{}, func(t *testing.T, q *queue.Queue) {
				a, b := join(t, q, "a", "1", ""), join(t, q, "b", "1", "")
				first := submit(t, q, "x", nil)
				shares := submit(t, q, "x", nil)
				for i := range 10 {
					submit(t, q, fmt.Sprint(i), nil)
				}
				r := wantTake(t, a, "x")
				if s := state(t, first); s.Worker != "a" || s.Began.IsZero() {
					t.Errorf("state is %+v, want worker a", s)
				}
				_, seen, _ := first.Wait(t.Context(), 0)
				if how == "lost" {
					r.Lost("connection reset")
				} else {
					a.Leave("no sign of life for a minute")
				}
				s, seen, err := first.Wait(t.Context(), seen)
				if err != nil || s.Stage != repb.ExecutionStage_QUEUED || s.Worker != "" || !s.Began.IsZero() {
					t.Errorf("Wait = %+v, %v; want QUEUED", s, err)
				}
				select {
				case <-r.Cancelled():
				default:
					t.Error("the lost run is not cancelled")
				}
				again := wantTake(t, b, "x")
				if s, _, err := first.Wait(t.Context(), seen); err != nil || s.Stage != repb.ExecutionStage_EXECUTING || s.Worker != "b" {
					t.Errorf("Wait = %+v, %v; want EXECUTING by b", s, err)
				}
				r.End(ended(1), nil) // too late
				r.Lost("too late")
				wantStage(t, first, repb.ExecutionStage_EXECUTING)
				again.End(ended(2), nil)
				wantRun(t, first, 2)
				wantRun(t, shares, 2)
				expect.Equal(t, state(t, first).Worker, "b", "worker")
				if s := q.Stats(); s.Again != 1 || s.Running != 0 {
					t.Errorf("Stats = %+v, want Again 1 and Running 0", s)
				}
				if _, ok := q.Operation(first.Name()); !ok {
					t.Error("the operation is unknown by its first name")
				}
			})
		})
	}
}

// TestLostActionAvoidsItsWorker checks that an action goes back to a worker that lost it only while no other present
// worker may take it, busy or not.
func TestLostActionAvoidsItsWorker(t *testing.T) {
	head(t, queue.Config{Attempts: 10}, func(t *testing.T, q *queue.Queue) {
		a1, a2 := join(t, q, "a", "1", "gpu=1"), join(t, q, "a", "2", "gpu=1")
		join(t, q, "other", "1", "")
		submit(t, q, "x", demands("gpu=1"))
		wantTake(t, a1, "x").Lost("no sign of life")
		wantTake(t, a2, "x").Lost("no sign of life") // the only worker that matches
		b := join(t, q, "b", "1", "gpu=1 ssd=1")
		waiting := begin(t, a1)
		must.Be(t, waiting.got() == nil, "the worker that lost the action gets it again while another is present")
		submit(t, q, "y", demands("gpu=1"))
		r := waiting.got()
		must.Be(t, r != nil && r.Task().Action == action("y"), "the worker that lost one action gets no other")
		r.End(ended(1), nil)
		for _, gone := range []struct {
			name       string
			away, back func()
		}{
			{"drained", func() { q.DrainWorker("b", "") }, func() { q.UndrainWorker("b") }},
			{"gone", func() { b.Leave("restart") }, func() { b = join(t, q, "b", "1", "gpu=1 ssd=1") }},
		} {
			waiting = begin(t, a1)
			must.Be(t, waiting.got() == nil,
				"before the other worker is %s, the one that lost the action gets it again", gone.name)
			gone.away()
			r := waiting.got()
			must.Be(t, r != nil && r.Task().Action == action("x"),
				"no worker gets the action while the other is %s", gone.name)
			gone.back()
			r.Lost("no sign of life")
		}
		wantTake(t, b, "x")
	})
}

// TestRefusedActionGoesToAnotherWorker: an action that a worker cannot enforce runs on another one that matches,
// preferably one with another offer, and fails with the last reason if none is left.
func TestRefusedActionGoesToAnotherWorker(t *testing.T) {
	head(t, queue.Config{}, func(t *testing.T, q *queue.Queue) {
		time.Sleep(time.Hour) // no worker is expected any more
		lacks := func(name string) error {
			return &worker.Fault{Kind: worker.FaultUnmet, Err: fmt.Errorf("worker %s: %w", name, sandbox.ErrUnsupported)}
		}
		a, like := join(t, q, "a", "1", "box=1"), join(t, q, "like", "1", "box=1")
		b := join(t, q, "b", "1", "")
		first := submit(t, q, "x", nil)
		wantTake(t, a, "x").End(nil, lacks("a"))
		wantStage(t, first, repb.ExecutionStage_QUEUED)
		wantTake(t, a, "")
		wantTake(t, like, "")
		wantTake(t, b, "x").End(ended(1), nil)
		wantRun(t, first, 1)

		second := submit(t, q, "y", nil)
		wantTake(t, b, "y").End(nil, lacks("b"))
		wantTake(t, a, "y").End(nil, lacks("a"))
		wantTake(t, a, "")
		wantTake(t, like, "y").End(nil, lacks("like")) // nobody else is left
		s := state(t, second)
		must.Be(t, s.Fault != nil && s.Fault.Kind == worker.FaultUnmet && s.Fault.Error() == lacks("like").Error(),
			"got %+v and fault %v, want that of the last worker", s, s.Fault)

		// A worker that has left may return, and one that joins gets what the others refused.
		third := submit(t, q, "z", nil)
		b.Leave("restart")
		wantTake(t, a, "z").End(nil, lacks("a"))
		wantTake(t, like, "z").End(nil, lacks("like"))
		wantStage(t, third, repb.ExecutionStage_QUEUED)
		c := join(t, q, "c", "1", "")
		wantTake(t, c, "z").End(ended(2), nil)
		wantRun(t, third, 2)
		c.Leave("restart")

		// But it is not expected for long.
		third = submit(t, q, "u", nil)
		wantTake(t, a, "u").End(nil, lacks("a"))
		wantTake(t, like, "u").End(nil, lacks("like"))
		wantStage(t, third, repb.ExecutionStage_QUEUED)
		time.Sleep(3 * time.Minute)
		wantFault(t, third, worker.FaultUnmet)

		// Other faults are final, and so are those of actions that no other worker matches.
		fourth := submit(t, q, "v", demands("box=1"))
		wantTake(t, a, "v").End(nil, &worker.Fault{Kind: worker.FaultUnmet, Err: errors.New("refused by the policy")})
		wantFault(t, fourth, worker.FaultUnmet)
	})
}

// TestRefusalsOfAnActionAreLimited: a worker that returns with another offer each time cannot keep an action for ever.
func TestRefusalsOfAnActionAreLimited(t *testing.T) {
	head(t, queue.Config{}, func(t *testing.T, q *queue.Queue) {
		o := submit(t, q, "x", nil)
		for i := range 10 {
			s := join(t, q, "a", "1", fmt.Sprintf("box=%d", i))
			wantTake(t, s, "x").End(nil, &worker.Fault{Kind: worker.FaultUnmet, Err: sandbox.ErrUnsupported})
			s.Leave("restart")
		}
		wantFault(t, o, worker.FaultUnmet)
	})
}

// TestWorkerWithTheNameOfTheHeadTakesWhatItRefuses: own slots are distinct from those of a worker of the same name.
func TestWorkerWithTheNameOfTheHeadTakesWhatItRefuses(t *testing.T) {
	own := function(func(context.Context) (*worker.Outcome, error) {
		return nil, &worker.Fault{Kind: worker.FaultUnmet, Err: sandbox.ErrUnsupported}
	})
	c := queue.Config{Slots: 1, Offer: &queue.Offer{Worker: "anvil"}, Executor: own}
	bubble(t, c, func(t *testing.T, q *queue.Queue, _ *executor) {
		s := join(t, q, "anvil", "7", "box=1")
		o := submit(t, q, "x", nil)
		defer watch(t, o)()
		synctest.Wait()
		wantTake(t, s, "x").End(ended(3), nil)
		wantRun(t, o, 3)
	})
}

// TestPoisonIsNotRetriedForever checks that the fault lists the losses.
func TestPoisonIsNotRetriedForever(t *testing.T) {
	head(t, queue.Config{}, func(t *testing.T, q *queue.Queue) {
		o := submit(t, q, "x", nil)
		for _, name := range []string{"a", "b", "c"} {
			wantStage(t, o, repb.ExecutionStage_QUEUED)
			s := join(t, q, name, "1", "")
			wantTake(t, s, "x")
			s.Leave("no sign of " + name)
		}
		f := wantFault(t, o, worker.FaultUnmet)
		want := "action " + action("x").String() + " is suspected of crashing its workers and is not retried: it was lost 3 times, " +
			"with worker a (no sign of a), worker b (no sign of b), worker c (no sign of c)"
		expect.That(t, f.Error() == want, "fault is\n%s, want\n%s", f, want)
		if s := q.Stats(); s.Again != 2 || s.Failed != 1 || s.Queued+s.Running != 0 {
			t.Errorf("Stats = %+v, want Again 2 and Failed 1", s)
		}
		again := submit(t, q, "x", nil)
		wantStage(t, again, repb.ExecutionStage_QUEUED) // a new request is a new attempt
	})
}

// TestActionsThatAreGivenBackAreNotPoison checks that an action given back by workers that stop, as in a shrinking
// pool, is not retried forever, and that its client may retry.
func TestActionsThatAreGivenBackAreNotPoison(t *testing.T) {
	head(t, queue.Config{}, func(t *testing.T, q *queue.Queue) {
		o := submit(t, q, "x", nil)
		for _, name := range []string{"a", "b", "c"} {
			wantStage(t, o, repb.ExecutionStage_QUEUED)
			s := join(t, q, name, "1", "")
			r := wantTake(t, s, "x")
			if name == "b" {
				r.Lost("no sign of b")
			} else {
				r.GiveBack(name + " was stopped")
			}
			s.Leave("gone")
		}
		f := wantFault(t, o, worker.FaultUnavailable)
		if got := f.Error(); strings.Contains(got, "suspected") || !strings.Contains(got, "worker a (a was stopped), worker b (no sign of b), worker c (c was stopped)") {
			t.Errorf("fault is %q, want the three losses and no suspicion", got)
		}
	})
}

func TestLostActionWithoutClientsIsNotRetried(t *testing.T) {
	head(t, queue.Config{}, func(t *testing.T, q *queue.Queue) {
		s := join(t, q, "a", "1", "")
		o := submit(t, q, "x", nil)
		r := wantTake(t, s, "x")
		o.Cancel("enough")
		<-r.Cancelled()
		expect.That(t, q.Stats().Running == 1, "the slot is free before its worker ends the run")
		expect.Error(t, expect.Err(s.Take(t.Context())), queue.ErrBusy, "Take of a slot that has a run")
		submit(t, q, "y", nil)
		s.Leave("gone")
		wantTake(t, join(t, q, "a", "1", ""), "y")
		if s := q.Stats(); s.Again != 0 || s.Running != 1 || s.Queued != 0 {
			t.Errorf("Stats = %+v, want only one running", s)
		}
	})
}

func TestCancelledWhileAnotherWorkerExecutes(t *testing.T) {
	head(t, queue.Config{}, func(t *testing.T, q *queue.Queue) {
		s := join(t, q, "a", "1", "")
		first, second := submit(t, q, "x", nil), submit(t, q, "x", nil)
		r := wantTake(t, s, "x")
		first.Cancel("enough")
		select {
		case <-r.Cancelled():
			t.Fatal("the run is cancelled while a client waits for it")
		default:
		}
		second.Cancel("enough")
		<-r.Cancelled()
		wantFault(t, second, worker.FaultCancelled)
		submit(t, q, "x", nil) // does not share the cancelled run
		r.End(nil, &worker.Fault{Kind: worker.FaultCancelled, Err: context.Canceled})
		wantTake(t, s, "x").End(ended(1), nil)
	})
}

// TestRemoteRunSkipsTheCacheLookup checks that clients that skip the lookup, too, share such a run from its start.
func TestRemoteRunSkipsTheCacheLookup(t *testing.T) {
	head(t, queue.Config{}, func(t *testing.T, q *queue.Queue) {
		s := join(t, q, "a", "1", "")
		submit(t, q, "x", nil)
		r := wantTake(t, s, "x")
		expect.That(t, r.Task().SkipCacheLookup, "the task of another worker does not skip the cache lookup")
		o := submit(t, q, "x", skip)
		r.End(ended(3), nil)
		wantRun(t, o, 3)
	})
	// After a loss, an own slot may look up the action again.
	bubble(t, queue.Config{Slots: 1, Offer: &queue.Offer{Worker: "own", Any: true}}, func(t *testing.T, q *queue.Queue, e *executor) {
		submit(t, q, "holds the slot", nil)
		a := join(t, q, "a", "1", "")
		submit(t, q, "x", nil)
		wantTake(t, a, "x").Lost("gone")
		e.release("holds the slot")
		wantCounts(t, e, 2, 0, 1)
		submit(t, q, "x", skip)
		expect.Equal(t, q.Stats().Queued, 1, "Queued, with the request that skips the cache lookup")
	})
}

func TestLeaveAndJoin(t *testing.T) {
	head(t, queue.Config{}, func(t *testing.T, q *queue.Queue) {
		o := queue.Offer{Worker: "a", Slot: "1"}
		s := joinOffer(t, q, o)
		for _, again := range []queue.Offer{o, {Worker: "a", Slot: "1", Prefix: "x"}} {
			expect.Error(t, expect.Err(q.Join(again)), queue.ErrJoined, "second Join")
		}
		joinOffer(t, q, queue.Offer{Worker: "b", Slot: "1"})
		k := begin(t, s)
		expect.Error(t, expect.Err(s.Take(t.Context())), queue.ErrBusy, "second Take")
		s.Leave("restart")
		s.Leave("twice")
		k.wantErr(t, queue.ErrLeft)
		expect.Error(t, expect.Err(s.Take(t.Context())), queue.ErrLeft, "Take after Leave")
		s = joinOffer(t, q, o)
		submit(t, q, "x", nil)
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		expect.Error(t, expect.Err(s.Take(ctx)), context.Canceled, "Take with a context that has ended")
		expect.Equal(t, q.Stats().Slots, 2, "slots")
	})
}

func TestDrainedWorkerGetsNoActions(t *testing.T) {
	head(t, queue.Config{}, func(t *testing.T, q *queue.Queue) {
		a1, a2, b := join(t, q, "a", "1", ""), join(t, q, "a", "2", "p=1"), join(t, q, "b", "1", "")
		o := submit(t, q, "running", nil)
		r := wantTake(t, a1, "running")
		idle := begin(t, a2)
		names, running := q.DrainWorker("a", "new kernel")
		expect.That(t, slices.Equal(names, []string{"a"}) && running == 1,
			"DrainWorker = %q, %d; want a, 1", names, running)
		if names, _ := q.DrainWorker("no such", ""); len(names) != 0 {
			t.Errorf("DrainWorker of an unknown worker = %q, want none", names)
		}
		submit(t, q, "x", nil)
		expect.That(t, idle.got() == nil, "a drained worker gets an action")
		r.End(ended(1), nil) // it keeps its action
		wantRun(t, o, 1)
		wantTake(t, a1, "")
		time.Sleep(time.Second)
		a1.Leave("restart")
		a1 = join(t, q, "a", "1", "p=2")
		wantTake(t, a1, "")
		w := q.Workers()
		expect.That(t, len(w) == 4 && w[0].Why == "new kernel" && !w[0].Drained.IsZero() && w[3].Drained.IsZero(),
			"Workers = %+v, want four, those of a drained", w)
		wantTake(t, b, "x").End(ended(1), nil)
		submit(t, q, "y", nil)
		if names, _ := q.UndrainWorker("a"); !slices.Equal(slices.Compact(names), []string{"a"}) {
			t.Errorf("UndrainWorker = %q, want a", names)
		}
		if r := idle.got(); r == nil || r.Task().Action != action("y") {
			t.Error("an undrained worker gets nothing")
		}
	})
}

func TestDrainOfAllIncludesWorkersThatJoinLater(t *testing.T) {
	bubble(t, queue.Config{Slots: 1}, func(t *testing.T, q *queue.Queue, e *executor) {
		join(t, q, "a", "1", "")
		synctest.Wait()
		if names, running := q.DrainWorker("", "holiday"); !slices.Equal(names, []string{"a", "local"}) || running != 0 {
			t.Errorf("DrainWorker = %q, %d; want a and local, 0", names, running)
		}
		late := join(t, q, "late", "1", "")
		o := submit(t, q, "x", nil)
		wantTake(t, late, "")
		wantStage(t, o, repb.ExecutionStage_QUEUED)
		q.UndrainWorker("late")
		wantTake(t, late, "x").End(ended(1), nil)
		submit(t, q, "y", nil)
		wantCounts(t, e, 0, 0, 0)
		q.UndrainWorker("")
		wantCounts(t, e, 1, 0, 1)
		submit(t, q, "z", nil)
		wantTake(t, join(t, q, "later", "1", ""), "z")
	})
}

func TestIdleStopsWhileTheWorkerIsDrained(t *testing.T) {
	i := &background{}
	bubble(t, queue.Config{Slots: 2, Idle: i.idle, Offer: &queue.Offer{Worker: "own"}}, func(t *testing.T, q *queue.Queue, e *executor) {
		i.want(t, 1, 1)
		submit(t, q, "for another", demands("p=1")) // takes no own slot
		submit(t, q, "and another", demands("p=1"))
		i.want(t, 1, 1)
		q.DrainWorker("own", "")
		i.want(t, 0, 1)
		q.UndrainWorker("own")
		i.want(t, 1, 2)
	})
}

// TestLeastLoadedWorkerGetsActions checks that load is relative to the number of slots.
func TestLeastLoadedWorkerGetsActions(t *testing.T) {
	head(t, queue.Config{}, func(t *testing.T, q *queue.Queue) {
		var idle []*pendingTake
		names := map[*pendingTake]string{}
		for name, n := range map[string]int{"large": 4, "small": 2} {
			for i := range n {
				k := begin(t, join(t, q, name, fmt.Sprint(i), ""))
				idle = append(idle, k)
				names[k] = name
			}
		}
		got := map[string]int{}
		for i := range 6 {
			submit(t, q, fmt.Sprint(i), nil)
			for _, k := range idle {
				if k.got() != nil {
					got[names[k]]++
				}
			}
			idle = slices.DeleteFunc(idle, func(k *pendingTake) bool { return k.got() != nil })
			if l, s := got["large"], got["small"]; l > 2*s+2 || s > (l+2)/2 {
				t.Errorf("busy slots: %d of 4 and %d of 2, want equal load", l, s)
			}
		}
	})
}

// TestDrainWaitsForOtherWorkers until its context ends.
func TestDrainWaitsForOtherWorkers(t *testing.T) {
	head(t, queue.Config{}, func(t *testing.T, q *queue.Queue) {
		a, b := join(t, q, "a", "1", ""), join(t, q, "b", "1", "")
		o, p := submit(t, q, "x", nil), submit(t, q, "y", nil)
		r := wantTake(t, a, "x")
		drained := make(chan error, 1)
		go func() { drained <- q.Drain(t.Context()) }()
		synctest.Wait()
		wantTake(t, b, "y").Lost("gone") // is retried
		s := wantTake(t, join(t, q, "c", "1", ""), "y")
		k := begin(t, b)
		r.End(ended(1), nil)
		synctest.Wait()
		select {
		case <-drained:
			t.Error("Drain returned while an action was running")
		default:
		}
		s.End(ended(2), nil)
		expect.Error(t, <-drained, nil, "Drain")
		wantRun(t, o, 1)
		wantRun(t, p, 2)
		k.wantErr(t, queue.ErrClosed)
		expect.Error(t, expect.Err(q.Join(queue.Offer{Worker: "d"})), queue.ErrClosed, "Join")
		expect.Error(t, expect.Err(a.Take(t.Context())), queue.ErrClosed, "Take")
	})
	head(t, queue.Config{}, func(t *testing.T, q *queue.Queue) {
		o := submit(t, q, "x", nil)
		r := wantTake(t, join(t, q, "a", "1", ""), "x")
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		expect.Error(t, q.Drain(ctx), context.DeadlineExceeded, "Drain")
		<-r.Cancelled()
		wantFault(t, o, worker.FaultUnavailable)
		r.End(ended(1), nil)
		wantFault(t, o, worker.FaultUnavailable)
	})
}

// TestOwnSlotsBesideOthers checks that own slots take what they offer, that prefetching is for those actions only, and
// that the inputs of all queued actions are renewed.
func TestOwnSlotsBesideOthers(t *testing.T) {
	f := &fetches{}
	renewed := 0
	c := queue.Config{
		Slots: 1, Offer: &queue.Offer{Worker: "own", Properties: properties("p=own")}, Fetch: f.fetch, Grace: 10 * time.Hour,
		Renew: func(context.Context, *worker.Task) { renewed++ }, RenewEvery: time.Hour,
	}
	bubble(t, c, func(t *testing.T, q *queue.Queue, e *executor) {
		join(t, q, "other", "1", "p=other")
		submit(t, q, "running", demands("p=own"))
		wantCounts(t, e, 1, 0, 1)
		submit(t, q, "a", demands("p=other"))
		submit(t, q, "b", demands("p=own"))
		submit(t, q, "c", demands(""))
		f.want(t, "for own slots", &f.ended, "b", "c")
		time.Sleep(time.Hour + time.Second)
		synctest.Wait()
		expect.That(t, renewed == 3, "%d actions were renewed, want 3", renewed)
		e.release("running", "b", "c")
		wantCounts(t, e, 3, 0, 0)
	})
}

func TestPrefetchOrderSpansPlatforms(t *testing.T) {
	f := &fetches{}
	bubble(t, queue.Config{Slots: 2, Fetch: f.fetch}, func(t *testing.T, q *queue.Queue, e *executor) {
		wants := func(name, build, platform string) {
			submit(t, q, name, func(r *queue.Request) { of(build)(r); demands(platform)(r) })
		}
		wants("running", "a", "p=x")
		wants("too", "a", "p=y")
		for i, name := range []string{"a1", "a2", "a3", "a4", "a5"} {
			wants(name, "a", []string{"p=x", "p=y"}[i%2])
		}
		f.want(t, "of one build", &f.ended, "a1", "a2", "a3", "a4")
		wants("b1", "b", "p=y")
		wants("b2", "b", "p=x")
		wants("b3", "b", "p=z")
		wants("b4", "b", "p=z")
		f.want(t, "of two", &f.ended, "a1", "a2", "a3", "a4", "b1", "b2", "b3")
	})
}

func TestPrefetchEndsWhenAnotherWorkerTakesTheAction(t *testing.T) {
	f := &fetches{hold: true, bytes: 60}
	bubble(t, queue.Config{Slots: 1, Fetch: f.fetch, FetchBytes: 100}, func(t *testing.T, q *queue.Queue, e *executor) {
		submit(t, q, "running", nil)
		submit(t, q, "x", nil)
		f.wantCancelled(t, 0, 1)
		wantTake(t, join(t, q, "a", "1", ""), "x")
		f.wantCancelled(t, 1, 0)
		submit(t, q, "y", nil)
		f.wantCancelled(t, 1, 1) // x has released its reservation
	})
}

func TestWorkersAndDemandsAreReported(t *testing.T) {
	head(t, queue.Config{Settle: time.Hour}, func(t *testing.T, q *queue.Queue) {
		began := time.Now()
		b10, b9 := join(t, q, "b", "10", "y=2 x=1 x=1"), join(t, q, "b", "9", "x=1 y=2")
		a := joinOffer(t, q, queue.Offer{Worker: "a", Slot: "1", Prefix: "main"})
		submit(t, q, "x", func(r *queue.Request) {
			r.Task.Target, r.Task.Mnemonic, r.Task.Invocation, r.Task.Instance = "//x", "Cc", "build", "elsewhere"
		})
		r := wantTake(t, b9, "x")
		time.Sleep(time.Minute)
		r.Report(worker.StageRun)
		later := submit(t, q, "y", demands("gpu=1"))
		time.Sleep(time.Second)
		submit(t, q, "z", demands("gpu=1"))
		w := q.Workers()
		must.Be(t, len(w) == 2 && w[0].Name == "a" && w[0].Prefix == "main" && len(w[1].Slots) == 2,
			"Workers = %+v, want a and b with two slots", w)
		expect.Slices(t, w[1].Properties, properties("x=1 y=2"), "properties")
		want := queue.SlotState{
			Name: "9", Instance: "elsewhere", Action: action("x"), Target: "//x", Mnemonic: "Cc", Invocation: "build",
			Began: w[1].Slots[0].Began, Stage: worker.StageRun,
		}
		if got := w[1].Slots; got[0] != want || got[0].Began.Before(began) || got[1] != (queue.SlotState{Name: "10"}) {
			t.Errorf("slots are %+v, want %+v first", got, want)
		}
		if got := w[1].Seen.Sub(began); got < time.Minute || got > time.Minute+time.Second {
			t.Errorf("the worker was seen after %v, want a minute", got)
		}
		submit(t, q, "here", func(r *queue.Request) { demands("gpu=1")(r); r.Task.Instance = "here" })
		d := q.Demands()
		expect.That(t, len(d) == 2 && d[1].Instance == "here" && d[1].Queued == 1,
			"Demands = %+v, want two instances", d)
		if d[0].Instance != "" || d[0].Queued != 2 || !slices.Equal(d[0].Properties, properties("gpu=1")) || !strings.Contains(d[0].Unmet, "no gpu") {
			t.Errorf("Demands = %+v, want two actions without gpu", d)
		}
		if s := q.Stats(); !s.Oldest.Equal(later.Info().Queued) || s.Slots != 3 || s.Queued != 3 || s.Running != 1 {
			t.Errorf("Stats = %+v, want oldest %v", s, later.Info().Queued)
		}
		r.End(ended(1), nil)
		submit(t, q, "lost", nil)
		wantTake(t, b10, "lost")
		b10.Leave("gone")
		b9.Leave("gone")
		a.Leave("gone")
		w = q.Workers()
		expect.That(t, w[1].Done == 1 && w[1].Lost == 1 && !w[1].Left.IsZero() && len(w[1].Slots) == 0,
			"Workers = %+v, want b gone with Done 1 and Lost 1", w)
	})
}

// TestSimilarDemandsStayApart checks that only equal demands are counted together.
func TestSimilarDemandsStayApart(t *testing.T) {
	bubble(t, queue.Config{Head: true}, func(t *testing.T, q *queue.Queue, _ *executor) {
		for i, d := range []string{"a=bc", "ab=c", "a=b c=", "a=bc"} {
			submit(t, q, fmt.Sprint(i), demands(d))
		}
		const unmet = "no worker has joined"
		want := []queue.Demand{
			{Properties: properties("a=b c="), Queued: 1, Unmet: unmet},
			{Properties: properties("a=bc"), Queued: 2, Unmet: unmet},
			{Properties: properties("ab=c"), Queued: 1, Unmet: unmet},
		}
		got := q.Demands()
		expect.That(t, reflect.DeepEqual(got, want), "Demands = %+v, want %+v", got, want)
	})
}
