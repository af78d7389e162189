// SPDX-License-Identifier: Apache-2.0

// Package overlay combines a local store, such as a disk, with an upstream store, such as a remote server. Reads copy
// blobs from the upstream to the local store once; writes go to both. The package depends on neither kind of store, and
// evicts nothing: each store keeps its own leases.
//
// If the upstream is unreachable, no answer is wrong. Local blobs are served. Reads and writes of others are
// cas.ErrUnavailable, and a result that is not local is a miss, which costs a run of its action. Results that the
// upstream refuses to look up or to record stay local.
//
// A blob that a store claims to have but cannot read is reported as missing until it is put again.
package overlay

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/durable"
)

// A Policy determines when writes reach the upstream.
type Policy uint8

const (
	// WriteThrough writes to the upstream before it acknowledges. A blob's write fails if the upstream is unreachable.
	WriteThrough Policy = iota
	// WriteBack acknowledges local writes, and sends them later. A journal keeps pending writes across restarts, but
	// not across a power failure: the upstream may then never get a blob, which invalidates no result.
	WriteBack
)

// Config configures an Overlay.
type Config struct {
	// Local and Upstream are the instances; equal names belong together. The stores of the overlay have the
	// capabilities Filer, Locator and Splicer if the local stores do. Batches use the upstream's Copier and
	// cas.Batcher.
	Local, Upstream cas.Instances
	Policy          Policy
	// Journal is the path of a file that no other overlay uses. WriteBack requires it.
	Journal string
	// RenewInterval is the interval in which the local leases of pending writes are renewed. It must be less than the
	// lease time of the local store; 0 means an hour.
	RenewInterval time.Duration
	// Log receives background errors; nil discards them.
	Log *slog.Logger
}

// A Copier is an optional interface of an upstream store that can copy many blobs in few calls. Fetch copies the blobs
// ds that are absent from to, and returns those that are absent here, too, in order and without duplicates. After an
// error it may have copied some.
type Copier interface {
	Fetch(ctx context.Context, to cas.Store, ds []cas.Digest) (absent []cas.Digest, err error)
}

// Stats are the counters of an Overlay since New.
type Stats struct {
	Fetched    int64 // blobs copied from the upstream
	Sent       int64 // blobs and results sent later
	Pending    int   // blobs and results to be sent
	Lost       int64 // pending writes that can never be sent: the local store has lost them, or the journal was damaged
	Unanswered int64 // queries answered without the upstream, which was unreachable or failed
	Refused    int64 // results that the upstream refused
}

// An Overlay is safe for concurrent use. Create one with New. The caller closes it.
type Overlay struct {
	config  Config
	ctx     context.Context // of background work
	cancel  context.CancelCauseFunc
	work    sync.WaitGroup
	pending *pending // nil unless the policy is WriteBack
	suspect suspects

	mu      sync.Mutex
	closed  bool                 // guarded by mu
	flights map[key]*flight      // guarded by mu
	orphans int                  // guarded by mu; number of flights without waiters
	stats   Stats                // guarded by mu
	warned  map[string]time.Time // guarded by mu; by message, when it was last logged
}

// A key names a blob of an instance.
type key struct {
	instance string
	digest   cas.Digest
}

var errClosed = fmt.Errorf("%w: the store is being closed", cas.ErrUnavailable)

// New returns an Overlay. With WriteBack, it sends the contents of the journal, and fails if that cannot be read or
// written.
func New(c Config) (*Overlay, error) {
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	if c.RenewInterval <= 0 {
		c.RenewInterval = time.Hour
	}
	o := &Overlay{config: c, flights: map[key]*flight{}, warned: map[string]time.Time{}, suspect: newSuspects()}
	o.ctx, o.cancel = context.WithCancelCause(context.Background())
	if c.Policy == WriteBack {
		var err error
		if o.pending, err = openPending(c.Journal); err != nil {
			return nil, err
		}
		if n := o.pending.log.Damaged(); n > 0 {
			c.Log.Error("the journal was damaged; blobs and results in its damaged lines may never be sent",
				"lines", n, "copy", c.Journal+durable.DamagedSuffix)
			o.stats.Lost = int64(n)
		}
		o.work.Go(o.sendPending)
		o.work.Go(o.renewPending)
	}
	return o, nil
}

// Instance is a cas.Instances. Its stores are also a cas.Batcher and a cas.Fetcher.
func (o *Overlay) Instance(name string) (*cas.Instance, error) {
	s, err := o.store(name)
	if err != nil {
		return nil, err
	}
	return &cas.Instance{Name: s.name, Store: s.withCapabilities(), Actions: s, Functions: s.upstream.Functions}, nil
}

// store returns the store of an instance.
func (o *Overlay) store(name string) (*store, error) {
	local, err := o.config.Local(name)
	if err != nil {
		return nil, err
	}
	upstream, err := o.config.Upstream(name)
	if err != nil {
		return nil, err
	}
	return &store{o: o, name: local.Name, local: local, upstream: upstream}, nil
}

// Stats returns the counters.
func (o *Overlay) Stats() Stats {
	o.mu.Lock()
	s := o.stats
	o.mu.Unlock()
	if o.pending != nil {
		s.Pending = o.pending.len()
	}
	return s
}

// count changes the counters.
func (o *Overlay) count(f func(*Stats)) {
	o.mu.Lock()
	defer o.mu.Unlock()
	f(&o.stats)
}

// warn logs an error that is likely to recur, at most once a minute for each message.
func (o *Overlay) warn(message string, args ...any) {
	o.mu.Lock()
	now := time.Now()
	recent := now.Sub(o.warned[message]) < time.Minute
	if !recent {
		o.warned[message] = now
	}
	o.mu.Unlock()
	if !recent {
		o.config.Log.Warn(message, args...)
	}
}

// Close waits until all writes are sent or ctx ends, then stops background work. It fails if writes are pending, which
// the next Overlay with this journal sends. There must be no concurrent writes; running fetches fail. Close leaves the
// local and the upstream stores open.
func (o *Overlay) Close(ctx context.Context) error {
	if o.pending != nil {
		o.pending.waitEmpty(ctx)
	}
	o.mu.Lock()
	o.closed = true
	o.mu.Unlock()
	o.cancel(errClosed)
	o.work.Wait()
	if o.pending == nil {
		return nil
	}
	err := o.pending.log.Close()
	if n := o.pending.len(); n > 0 {
		err = errors.Join(fmt.Errorf("%d blobs and results are not sent; the journal %s keeps them for the next start",
			n, o.config.Journal), err)
	}
	return err
}

// A store is one instance of an Overlay.
type store struct {
	o               *Overlay
	name            string
	local, upstream *cas.Instance
}

var (
	_ cas.Store       = (*store)(nil)
	_ cas.Batcher     = (*store)(nil)
	_ cas.Fetcher     = (*store)(nil)
	_ cas.ActionCache = (*store)(nil)
)
