// SPDX-License-Identifier: Apache-2.0

// Package overlay combines a local store, such as a disk, with an upstream store, such as a remote server. Reads copy
// blobs from the upstream to the local store once; writes go to both. The package depends on neither kind of store, and
// evicts nothing: each store keeps its own leases.
// While the upstream is unreachable, local blobs are served, reads and writes of other blobs return cas.ErrUnavailable,
// and a result that is not local is a miss, so that its action runs. Results that the upstream refuses to look up or to
// record stay local.
//
// With WriteThrough, a blob written through the overlay is present only once the upstream has it, also after a crash. A
// blob that the local store had before, for example because it was used without this upstream, counts as present and is
// sent at its first use. A small blob goes to the upstream first, from memory. A large blob is recorded as unsent and
// then goes to the local store first, because its client may be slow. Without Config.Sync, the record is not synced: if
// a power failure loses it and keeps the blob, the blob counts as present until its next use shows that the upstream
// lacks it. Entries that an earlier WriteBack has not sent are sent in the background, and their blobs are missing
// until then.
// With WriteBack, writes do not wait for the upstream, and queries wait only briefly. Written blobs are sent without
// asking whether the upstream has them. While the overlay is in use, the sender pauses between rounds.
// The upstream does not see local uses and may delete blobs that seem unused. Therefore the first use of a blob or
// result in an interval renews it in the upstream. A blob that the upstream has lost is sent again.
// A blob that a store lists but cannot read counts as missing until it is put again.
package overlay

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"math/bits"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/durable"
)

// A Policy determines when writes reach the upstream.
type Policy uint8

const (
	// WriteThrough writes to the upstream before it acknowledges. A blob's write fails if the upstream is unreachable.
	WriteThrough Policy = iota
	// WriteBack acknowledges local writes, and sends them later. A journal keeps pending writes across restarts, and
	// with Config.Sync across a power failure. Without it, the upstream then gets a blob at its next use.
	WriteBack
)

// Config configures an Overlay. Local, Upstream and Journal are required.
type Config struct {
	// Local and Upstream are the instances; equal names belong together. The stores of the overlay have the
	// capabilities Filer, Locator and Splicer if the local stores do. Batches use the upstream's Fetch and
	// cas.Batcher. A Put of a blob that is too large for the upstream fails with both cas.ErrUpstreamFull and
	// errors.ErrUnsupported.
	Local, Upstream cas.Instances
	Policy          Policy
	// Journal is the path of a file that no other overlay uses. Another file has this name with the suffix .unsent.
	Journal string
	// Sync makes the records in both files survive a power failure. It is useful if the local store syncs its writes.
	Sync bool
	// RenewInterval is the interval in which the local leases of pending writes are renewed. It must be less than the
	// lease time of the local store; 0 means an hour.
	RenewInterval time.Duration
	// UpstreamInterval is the interval in which locally used blobs and results are renewed in the upstream; a negative
	// interval disables renewals. The default, 0, depends on the upstream. For a cas.Renewer, it is an eighth of its
	// lifetime, or 12 hours if it has none. For others, such as a server with leases of unknown length, it is
	// RenewInterval, but at least a minute and at most an hour.
	UpstreamInterval time.Duration
	// Log receives background errors; nil discards them.
	Log *slog.Logger
}

// A copier is an optional interface of an upstream store that can copy many blobs in few calls. Fetch copies to the
// store to those of ds that it lacks. It returns the blobs that both stores lack, in order and without duplicates.
// After an error it may have copied some.
type copier interface {
	Fetch(ctx context.Context, to cas.Store, ds []cas.Digest) (absent []cas.Digest, err error)
}

// An absenter is an optional interface of a cas.Renewer. Absent is Missing without renewals, which may be slow.
type absenter interface {
	Absent(ctx context.Context, ds []cas.Digest) ([]cas.Digest, error)
}

// A resultRenewer is an optional interface of an upstream store whose action cache also returns results that it could
// not renew. RenewResult is Lookup, but fails for those.
type resultRenewer interface {
	RenewResult(ctx context.Context, action cas.Digest) error
}

// An unbatched is an optional interface of an upstream store that makes a call for each blob of a batch. Calls returns
// the number that run in parallel.
type unbatched interface{ Calls() int }

// Stats are the counters of an Overlay since New, and the state of the pending writes.
type Stats struct {
	Fetched int64 // blobs copied from the upstream
	Sent    int64 // blobs and results sent later
	Pending int   // blobs and results to be sent
	// PendingBytes is the size of the pending blobs. Oldest is the time of the oldest pending write, zero if there is
	// none.
	PendingBytes int64
	Oldest       time.Time
	Lost         int64 // writes that can never be sent: the local store has lost them, or their record was damaged
	Unanswered   int64 // queries answered without the upstream, which was unreachable, failed or refused them
	Refused      int64 // results that the upstream refused, and blobs that it refused as too large or invalid
	Renewed      int64 // blobs and results renewed in the upstream because they were used locally
	Restored     int64 // of these, blobs that the upstream had lost or could not renew, sent again from the local store
	Unreadable   int64 // blobs that the upstream listed but could not deliver
}

// An Overlay is safe for concurrent use. Create one with New. The caller closes it.
type Overlay struct {
	config  Config
	ctx     context.Context // of background work
	cancel  context.CancelCauseFunc
	work    sync.WaitGroup
	pending *pending // nil with WriteThrough, unless an earlier WriteBack has left entries
	unsent  *unsent
	uses    *uses
	recent  recent

	inUse    atomic.Bool   // a store was used since the last call of busy
	lastUse  atomic.Int64  // when busy noticed the last use, in Unix nanoseconds
	pacing   chan struct{} // has a token while a sender of large blobs rests; capacity 1
	draining atomic.Bool   // Close waits for pending entries

	suspect suspects

	mu        sync.Mutex
	closed    bool                 // guarded by mu
	flights   map[key]*flight      // guarded by mu
	uploads   map[key]*transfer    // guarded by mu
	orphans   int                  // guarded by mu; number of flights without waiters
	abandoned int                  // guarded by mu; number of uploads without waiters
	stats     Stats                // guarded by mu
	warned    map[string]time.Time // guarded by mu; by message, when it was last logged

	late [bits.UintSize + 1]int // guarded by mu; number of queries that nobody waits for any more, by call.size
}

// A key names a blob of an instance.
type key struct {
	instance string
	digest   cas.Digest
}

var errClosed = fmt.Errorf("%w: the store is being closed", cas.ErrUnavailable)

// New returns an Overlay, which sends the contents of the journal. It fails if the files of the journal cannot be read
// or written.
func New(c Config) (*Overlay, error) {
	c.Log = cmp.Or(c.Log, slog.New(slog.DiscardHandler))
	if c.RenewInterval <= 0 {
		c.RenewInterval = time.Hour
	}
	switch {
	case c.Local == nil:
		return nil, errors.New("overlay: Config.Local is missing")
	case c.Upstream == nil:
		return nil, errors.New("overlay: Config.Upstream is missing")
	case c.Journal == "":
		return nil, errors.New("overlay: Config.Journal is missing")
	}
	o := &Overlay{config: c, flights: map[key]*flight{}, uploads: map[key]*transfer{}, warned: map[string]time.Time{}}
	o.suspect.unread, o.suspect.unqueued, o.suspect.results = map[key]bool{}, map[key]bool{}, map[key]bool{}
	o.pacing = make(chan struct{}, 1)
	o.ctx, o.cancel = context.WithCancelCause(context.Background())
	o.uses = newUses(c.upstreamInterval())
	if err := o.openFiles(); err != nil {
		return nil, err
	}
	if o.uses.interval > 0 {
		o.work.Go(o.renewUsed)
	}
	if o.pending != nil {
		o.renewOnce() // before the first put, which may evict: leases may have expired since the last process
		o.work.Go(o.sendPending)
		for range streams {
			o.work.Go(o.sendLarge)
		}
		o.work.Go(o.renewPending)
	}
	return o, nil
}

// upstreamInterval returns UpstreamInterval or its default. A blob in constant use is renewed at least once in two
// intervals. The upstream ignores renewals in the first half of its lifetime.
func (c *Config) upstreamInterval() time.Duration {
	if c.UpstreamInterval != 0 {
		return c.UpstreamInterval
	}
	if in, err := c.Upstream(""); err == nil {
		if r, ok := cas.As[cas.Renewer](in.Store); ok {
			return cmp.Or(r.Lifetime()/8, 12*time.Hour)
		}
	}
	return min(max(c.RenewInterval, time.Minute), time.Hour)
}

// openFiles opens the journal and the list of unsent blobs.
func (o *Overlay) openFiles() (err error) {
	if o.unsent, err = openUnsent(o.config.Journal+unsentSuffix, o.config.Sync); err != nil {
		return err
	}
	if err = o.prune(); err == nil && (o.config.Policy == WriteBack || !empty(o.config.Journal)) {
		o.pending, err = openPending(o.config.Journal, o.config.Sync, o.uses)
	}
	if err != nil {
		return errors.Join(err, o.unsent.log.Close())
	}
	logs := []*durable.Log{o.unsent.log}
	if o.pending != nil {
		logs = append(logs, o.pending.log)
	}
	for _, l := range logs {
		if n := l.Damaged(); n > 0 {
			o.stats.Lost += int64(n)
			o.config.Log.Error("the journal was damaged; blobs and results in its damaged lines may never be sent",
				"lines", n, "copy", l.Path+durable.DamagedSuffix)
		}
	}
	return nil
}

// empty reports whether the file at path is empty or absent.
func empty(path string) bool {
	fi, err := os.Stat(path)
	return errors.Is(err, fs.ErrNotExist) || err == nil && fi.Mode().IsRegular() && fi.Size() == 0
}

// Instance is a cas.Instances. Its stores are also a cas.Batcher and a cas.Fetcher.
func (o *Overlay) Instance(name string) (*cas.Instance, error) {
	s, err := o.store(name)
	if err != nil {
		return nil, err
	}
	return s.withCapabilities(), nil
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
		s.Pending, s.PendingBytes, s.Oldest = o.pending.stats()
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
// the next Overlay with this journal sends, or if results did not fit into the journal and are lost. There must be no
// concurrent writes; running fetches fail. Close leaves the local and the upstream stores open.
func (o *Overlay) Close(ctx context.Context) error {
	if o.pending != nil {
		_ = o.queueResults() // the journal may still be full
		o.draining.Store(true)
		o.pending.waitEmpty(ctx)
	}
	o.mu.Lock()
	o.closed = true
	o.mu.Unlock()
	o.cancel(errClosed)
	o.work.Wait()
	err := o.unsent.close()
	if o.pending == nil {
		return err
	}
	if failed := o.queueResults(); failed != nil {
		o.suspect.mu.Lock()
		n := len(o.suspect.results)
		o.suspect.mu.Unlock()
		err = errors.Join(fmt.Errorf("%d results were not queued and will not be sent: %w", n, failed), err)
	}
	err = errors.Join(err, o.pending.log.Close())
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
	_ cas.PutChecker  = (*store)(nil)
	_ cas.ActionCache = (*store)(nil)
)
