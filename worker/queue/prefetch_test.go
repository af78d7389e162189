// SPDX-License-Identifier: Apache-2.0

package queue_test

import (
	"context"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/worker"
	"github.com/cloister-build/cloister/worker/queue"
)

// fetches is a Config.Fetch that records its calls.
type fetches struct {
	bytes int64 // needed by each action
	hold  bool  // block until cancelled

	mu                    sync.Mutex
	begun, ended, refused []cas.Digest
	cancelled, alive      int
}

func (f *fetches) fetch(ctx context.Context, t *worker.Task, reserve func(int64) bool) {
	f.mu.Lock()
	f.begun = append(f.begun, t.Action)
	f.alive++
	f.mu.Unlock()
	fits := reserve(f.bytes)
	if fits && f.hold {
		<-ctx.Done()
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.alive--
	switch {
	case ctx.Err() != nil:
		f.cancelled++
	case fits:
		f.ended = append(f.ended, t.Action)
	default:
		f.refused = append(f.refused, t.Action)
	}
}

// want checks which actions are in one of the lists.
func (f *fetches) want(t *testing.T, what string, list *[]cas.Digest, names ...string) {
	t.Helper()
	synctest.Wait()
	f.mu.Lock()
	defer f.mu.Unlock()
	var want []cas.Digest
	for _, name := range names {
		want = append(want, action(name))
	}
	byHash := func(a, b cas.Digest) int { return strings.Compare(a.Hash(), b.Hash()) }
	slices.SortFunc(want, byHash)
	got := slices.SortedFunc(slices.Values(*list), byHash)
	expect.That(t, slices.Equal(got, want), "%s: got %d actions, want %q", what, len(got), names)
}

func (f *fetches) wantCancelled(t *testing.T, cancelled, alive int) {
	t.Helper()
	synctest.Wait()
	f.mu.Lock()
	defer f.mu.Unlock()
	expect.That(t, f.cancelled == cancelled && f.alive == alive,
		"%d fetches cancelled and %d under way, want %d and %d", f.cancelled, f.alive, cancelled, alive)
}

// TestPrefetchIsInQueueOrder checks that the next actions are fetched once each, and none that a slot takes at once.
func TestPrefetchIsInQueueOrder(t *testing.T) {
	f := &fetches{}
	bubble(t, queue.Config{Slots: 2, Fetch: f.fetch}, func(t *testing.T, q *queue.Queue, e *executor) {
		for _, name := range []string{"running", "too"} {
			submit(t, q, name, nil)
		}
		f.want(t, "with free slots", &f.ended)
		for _, name := range []string{"c", "d", "e", "f", "g", "h"} {
			submit(t, q, name, priority(1))
		}
		f.want(t, "with six waiting", &f.ended, "c", "d", "e", "f")
		submit(t, q, "a", nil)
		f.want(t, "with an urgent one", &f.ended, "c", "d", "e", "f", "a")
		submit(t, q, "h", nil)
		f.want(t, "with one that became urgent", &f.ended, "c", "d", "e", "f", "a", "h")
		e.release("running")
		f.want(t, "with one taken", &f.ended, "c", "d", "e", "f", "a", "h")
		e.release("a", "h")
		f.want(t, "with three taken", &f.ended, "c", "d", "e", "f", "a", "h", "g")
		expect.Equal(t, len(f.begun), 7, "fetches")
	})
}

// TestPrefetchEndsWithItsOperation checks that it continues when an own slot takes the action.
func TestPrefetchEndsWithItsOperation(t *testing.T) {
	f := &fetches{hold: true}
	bubble(t, queue.Config{Slots: 1, Grace: time.Minute, Fetch: f.fetch}, func(t *testing.T, q *queue.Queue, e *executor) {
		defer watch(t, submit(t, q, "running", nil))()
		defer watch(t, submit(t, q, "next", nil))()
		submit(t, q, "left", nil)
		f.wantCancelled(t, 0, 2)
		time.Sleep(2 * time.Minute)
		f.wantCancelled(t, 1, 1)
		e.release("running")
		wantCounts(t, e, 2, 0, 1)
		f.wantCancelled(t, 1, 1)
		e.release("next")
		f.wantCancelled(t, 2, 0) // its action has ended
	})
}

// TestPrefetchIsBounded in concurrent actions and in bytes.
func TestPrefetchIsBounded(t *testing.T) {
	f := &fetches{hold: true}
	bubble(t, queue.Config{Slots: 8, Fetch: f.fetch}, func(t *testing.T, q *queue.Queue, e *executor) {
		for i := range 8 + 16 {
			submit(t, q, string(rune('a'+i)), nil)
		}
		f.wantCancelled(t, 0, 4)
	})

	f = &fetches{bytes: 40}
	bubble(t, queue.Config{Slots: 3, FetchBytes: 100, Fetch: f.fetch}, func(t *testing.T, q *queue.Queue, e *executor) {
		for _, name := range []string{"x", "y", "z"} {
			submit(t, q, name, nil)
		}
		for _, name := range []string{"a", "b", "c", "d"} {
			submit(t, q, name, nil)
		}
		f.want(t, "room for two", &f.ended, "a", "b")
		f.wantCancelled(t, 0, 2)
		e.release("x")
		f.want(t, "one taken", &f.ended, "a", "b", "c")
		e.release("y", "z")
		f.want(t, "two more taken", &f.ended, "a", "b", "c", "d")
		wantCounts(t, e, 6, 0, 3)
		f.bytes = 101
		submit(t, q, "e", nil)
		f.want(t, "one larger than the limit", &f.refused, "e")
	})
}

// TestReservationsAreInQueueOrder checks that a small action does not overtake a large one that waits for room.
func TestReservationsAreInQueueOrder(t *testing.T) {
	f := &fetches{bytes: 60}
	bubble(t, queue.Config{Slots: 2, FetchBytes: 100, Fetch: f.fetch}, func(t *testing.T, q *queue.Queue, e *executor) {
		submit(t, q, "running", nil)
		submit(t, q, "too", nil)
		submit(t, q, "a", nil)
		submit(t, q, "b", nil)
		f.bytes = 30
		submit(t, q, "c", nil)
		f.want(t, "room for c, but b is next", &f.ended, "a")
		submit(t, q, "c", priority(-1))
		f.want(t, "room for c, which is next now", &f.ended, "a", "c")
		e.release("running")
		f.want(t, "no room yet", &f.ended, "a", "c")
		e.release("too")
		f.want(t, "room for b", &f.ended, "a", "b", "c")
	})
}

// TestPrefetchIsRefusedOnceTheActionNoLongerWaits for room.
func TestPrefetchIsRefusedOnceTheActionNoLongerWaits(t *testing.T) {
	f := &fetches{bytes: 60}
	bubble(t, queue.Config{Slots: 1, Grace: time.Minute, FetchBytes: 100, Fetch: f.fetch}, func(t *testing.T, q *queue.Queue, e *executor) {
		for _, name := range []string{"running", "a"} {
			defer watch(t, submit(t, q, name, nil))()
		}
		submit(t, q, "left", nil)
		f.want(t, "room for one", &f.ended, "a")
		time.Sleep(2 * time.Minute)
		f.wantCancelled(t, 1, 0)
		defer watch(t, submit(t, q, "b", nil))()
		defer watch(t, submit(t, q, "urgent", priority(-1)))()
		e.release("running") // frees the slot for urgent
		f.want(t, "urgent, without room", &f.refused, "urgent")
		e.release("urgent")
		f.want(t, "b after a is taken", &f.ended, "a", "b")
	})
}

// TestCloseEndsPrefetches, also those that wait for room.
func TestCloseEndsPrefetches(t *testing.T) {
	f := &fetches{bytes: 60, hold: true}
	bubble(t, queue.Config{Slots: 1, FetchBytes: 100, Fetch: f.fetch}, func(t *testing.T, q *queue.Queue, e *executor) {
		for _, name := range []string{"running", "a", "b"} {
			submit(t, q, name, nil)
		}
		f.wantCancelled(t, 0, 2)
		q.Close()
		f.wantCancelled(t, 2, 0)
	})
}
