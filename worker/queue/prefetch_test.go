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
	"github.com/cloister-build/cloister/worker"
	"github.com/cloister-build/cloister/worker/queue"
)

// fetches are what a queue has fetched, as Config.Fetch.
type fetches struct {
	bytes int64 // that each action needs
	hold  bool  // none ends by itself

	mu                    sync.Mutex
	begun, ended, refused []cas.Digest
	cancelled, alive      int
}

func (f *fetches) fetch(ctx context.Context, t *worker.Task, room func(int64) bool) {
	f.mu.Lock()
	f.begun = append(f.begun, t.Action)
	f.alive++
	f.mu.Unlock()
	fits := room(f.bytes)
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

// want checks which actions are in a list of f.
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
	if !slices.Equal(got, want) {
		t.Errorf("%s: %d, want %q", what, len(got), names)
	}
}

func (f *fetches) wantCancelled(t *testing.T, cancelled, alive int) {
	t.Helper()
	synctest.Wait()
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.cancelled != cancelled || f.alive != alive {
		t.Errorf("%d fetches were cancelled and %d are under way, want %d and %d", f.cancelled, f.alive, cancelled, alive)
	}
}

// TestInputsComeNearInLine: of the next in line, by priority, each once; those that a slot takes at once are the slot's.
func TestInputsComeNearInLine(t *testing.T) {
	f := &fetches{}
	bubble(t, queue.Config{Slots: 2, Fetch: f.fetch}, func(t *testing.T, q *queue.Queue, e *executor) {
		for _, name := range []string{"running", "too"} {
			submit(t, q, name, nil)
		}
		f.want(t, "with free slots", &f.ended)
		for _, name := range []string{"c", "d", "e", "f", "g", "h"} {
			submit(t, q, name, priority(1))
		}
		f.want(t, "with four in line", &f.ended, "c", "d", "e", "f")
		submit(t, q, "a", nil)
		f.want(t, "with one that is sooner", &f.ended, "c", "d", "e", "f", "a")
		submit(t, q, "h", nil)
		f.want(t, "with one that has become so", &f.ended, "c", "d", "e", "f", "a", "h")
		e.release("running")
		f.want(t, "with one less", &f.ended, "c", "d", "e", "f", "a", "h")
		e.release("a", "h")
		f.want(t, "with a line that has moved", &f.ended, "c", "d", "e", "f", "a", "h", "g")
		if n := len(f.begun); n != 7 {
			t.Errorf("%d were fetched for, want each once", n)
		}
	})
}

// TestFetchEndsWithItsOperation, and not because a slot has taken the action.
func TestFetchEndsWithItsOperation(t *testing.T) {
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
		f.wantCancelled(t, 2, 0) // its action needs nothing any more
	})
}

// TestFetchIsBounded: in actions at once, and in bytes of all that wait.
func TestFetchIsBounded(t *testing.T) {
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
		f.want(t, "one was taken by a slot", &f.ended, "a", "b", "c")
		e.release("y", "z")
		f.want(t, "so were two more", &f.ended, "a", "b", "c", "d")
		wantCounts(t, e, 6, 0, 3)
		f.bytes = 101
		submit(t, q, "e", nil)
		f.want(t, "one without room at all", &f.refused, "e")
	})
}

// TestRoomIsGivenInLine: an action that needs less does not take the room for which one before it waits.
func TestRoomIsGivenInLine(t *testing.T) {
	f := &fetches{bytes: 60}
	bubble(t, queue.Config{Slots: 2, FetchBytes: 100, Fetch: f.fetch}, func(t *testing.T, q *queue.Queue, e *executor) {
		submit(t, q, "running", nil)
		submit(t, q, "too", nil)
		submit(t, q, "a", nil)
		submit(t, q, "b", nil)
		f.bytes = 30
		submit(t, q, "c", nil)
		f.want(t, "room for c, which b has not", &f.ended, "a")
		submit(t, q, "c", priority(-1))
		f.want(t, "room for c, which is sooner now", &f.ended, "a", "c")
		e.release("running")
		f.want(t, "no room yet", &f.ended, "a", "c")
		e.release("too")
		f.want(t, "room for b", &f.ended, "a", "b", "c")
	})
}

// TestFetchOfWhatNoLongerWaits: for want of room it began to be fetched too late.
func TestFetchOfWhatNoLongerWaits(t *testing.T) {
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
		f.want(t, "urgent, for which there was no room", &f.refused, "urgent")
		e.release("urgent")
		f.want(t, "b, when a is taken", &f.ended, "a", "b")
	})
}

// TestCloseEndsFetches, also those that wait for room.
func TestCloseEndsFetches(t *testing.T) {
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
