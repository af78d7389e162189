// SPDX-License-Identifier: Apache-2.0

package queue

import (
	"cmp"
	"context"
	"runtime"
	"time"

	"github.com/cloister-build/cloister/worker"
)

// maxNested is the maximum number of slots for nested actions of one depth.
const maxNested = 32

// Config configures a Queue. Executor is required unless Head is set; every other zero value selects its default.
type Config struct {
	Executor worker.Executor
	// Slots is the number of actions the Executor runs at once; the default is the number of CPUs.
	Slots int
	// Head makes a queue without local slots: only workers that join execute. Logs, Fetch and Idle concern local slots
	// and are unused.
	Head bool
	// Depth is the maximum nesting depth. Actions of clients have depth 0; an action of depth N executes actions of depth
	// N+1, whose Task.Caller says so. This machine has separate slots for each depth above 0, as many as Slots but at most
	// 32, so an action that waits for nested ones always leaves them a slot. Zero means that only clients request actions.
	Depth int
	// Offer, if not nil, is the offer of the local slots; its Slot is ignored. By default they take every action, as
	// worker "local".
	Offer *Offer
	// Attempts limits the runs of an action whose workers are lost; the default is 3.
	Attempts int
	// Settle is how long after New an action that no worker matches waits for one to join, before it is refused; the
	// default is a minute. Later such an action is refused at once.
	Settle time.Duration
	// Unmatched is how long an action waits while there is no worker; the default is five minutes.
	Unmatched time.Duration
	// Remembered is how long actions wait for a worker whose last slot has left; the default is 15 minutes.
	Remembered time.Duration
	// Hint, if not nil, returns advice for the error that refuses an unmatched action, "" for none.
	Hint func(Unmatched) string
	// Preparers is the number of requests prepared at once; the default is twice Slots.
	Preparers int
	// MaxLive limits the operations that are not completed; the default is 100,000. Nested actions count, but are always
	// accepted: what serves remote APIs to actions must limit them.
	MaxLive int
	// Grace is how long an operation without waiting clients lives; the default is a minute. CancelGrace is the same if
	// the clients have cancelled their calls, as opposed to losing their connections; the default is 5 seconds. After
	// CancelGrace a run without waiting clients yields its slot to an action that has some.
	Grace, CancelGrace time.Duration
	// Retain is how long a completed operation can be queried; the default is five minutes.
	Retain time.Duration
	// Renew, if not nil, marks the inputs of a queued action as used, so that stores keep them. Every RenewEvery one
	// goroutine calls it for each queued action in turn: worker.Local takes 2 ms for two thousand files that no other
	// action renewed lately, else 20 us. A round that takes longer than RenewEvery is followed by the next at once.
	Renew func(context.Context, *worker.Task)
	// RenewEvery must be well below the time for which the store keeps used blobs; the default is an hour.
	RenewEvery time.Duration
	// Fetch, if not nil, prefetches the inputs of a queued action from a remote store. It is called once for each of
	// the next 2*Slots actions, four at a time, while no slot is free. It passes the number of bytes to reserve, which
	// may block, and fetches nothing if that returns false. Its context ends when the action no longer needs the
	// inputs, but not when a local slot takes the action.
	Fetch func(ctx context.Context, t *worker.Task, reserve func(bytes int64) bool)
	// FetchBytes limits the input bytes of all prefetched actions, including those already present; an action that
	// needs more is not prefetched. The default is 1 GiB.
	FetchBytes int64
	// Logs, if not nil, makes the logs from which an action's output is read while it runs. It is called when a slot
	// takes the action, before clients see it executing, and must neither block nor call the queue. end is called with
	// the outcome, nil if there is none, before clients see that.
	Logs func(t *worker.Task) (logs *worker.Logs, end func(*worker.Outcome))
	// Ended, if not nil, is called once for each outcome or fault of a task, and returns a function that is called for
	// each operation that ends this way, with its last state, before clients see that. Ended may take a while for an
	// outcome, but must not block for a fault. The returned function must neither block nor call the queue.
	Ended func(*worker.Task, *worker.Outcome, *worker.Fault) func(Info, State)
	// Idle, if not nil, does background work while a slot is free. One goroutine calls it repeatedly; it returns when
	// its context ends, which happens as soon as an action takes the slot. The action does not wait for the return.
	Idle func(ctx context.Context)
	// Drains restores the drained workers; see Queue.DrainState.
	Drains DrainState
	// MaxRetained and MaxRetainedBytes limit the number of completed operations and their estimated memory; the
	// defaults are 10,000 and 256 MiB. The oldest are dropped first, operations whose action did not run before all
	// others.
	MaxRetained      int
	MaxRetainedBytes int64
}

// withDefaults returns c with its defaults filled in.
func (c Config) withDefaults() Config {
	c.Slots = positive(c.Slots, runtime.GOMAXPROCS(0))
	c.Preparers = positive(c.Preparers, 2*c.Slots)
	c.Attempts = positive(c.Attempts, 3)
	c.Settle = positive(c.Settle, time.Minute)
	c.Unmatched = positive(c.Unmatched, 5*time.Minute)
	c.Remembered = positive(c.Remembered, 15*time.Minute)
	c.MaxLive = positive(c.MaxLive, 100_000)
	c.Grace = positive(c.Grace, time.Minute)
	c.CancelGrace = min(positive(c.CancelGrace, 5*time.Second), c.Grace)
	c.Retain = positive(c.Retain, 5*time.Minute)
	c.RenewEvery = positive(c.RenewEvery, time.Hour)
	c.FetchBytes = positive(c.FetchBytes, 1<<30)
	c.MaxRetained = positive(c.MaxRetained, 10_000)
	c.MaxRetainedBytes = positive(c.MaxRetainedBytes, 256<<20)
	return c
}

func positive[T cmp.Ordered](v, otherwise T) T {
	var zero T
	if v > zero {
		return v
	}
	return otherwise
}
