// SPDX-License-Identifier: Apache-2.0

// Package overlay puts a store near, a disk, in front of one that is far, another server: what is read comes
// near once and stays, what is written goes to both. It knows neither what is near nor what is far, and evicts
// nothing: near keeps its own promises, and so does far.
//
// When far cannot be reached, nothing wrong is said. What is near is served as ever; of the rest, reads and
// writes are cas.ErrUnavailable, and a result that is not near is a miss, which costs its action's run and
// breaks nothing. The same goes for results that far refuses to look up or to record: they are near alone.
//
// What near or far turns out not to have as they say, Missing calls absent until it is put again.
package overlay

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/cloister-build/cloister/cas"
)

// A Policy says when far has what was written.
type Policy uint8

const (
	// WriteThrough writes far before it answers: far has all blobs that were acknowledged. A blob's write fails when
	// far cannot be reached.
	WriteThrough Policy = iota
	// WriteBack answers when near has it, and writes far later. What is still to be written stands in a journal
	// and outlives the process, but not the power: then far may never have it, which harms no result.
	WriteBack
)

// Config says what New makes.
type Config struct {
	// Local and Upstream are the instances; equal names belong together. A near store that is a cas.Filer makes the
	// overlay one, and one that is a cas.Locator, too, makes it that; likewise a cas.Splicer. A far store that is a Copier or a cas.Batcher is asked in few calls.
	Local, Upstream cas.Instances
	Policy          Policy
	// Journal is the path of a file that is this overlay's alone. Back needs it.
	Journal string
	// RenewInterval is how often what is still to be written far is marked as used near. It must be less than the
	// lease of near; 0 is an hour.
	RenewInterval time.Duration
	// Log is told what goes wrong in the background; nil is nobody.
	Log *slog.Logger
}

// A Copier is an optional ability of a far store: to copy many blobs in few calls. Fetch copies those of ds
// that to lacks into it, and returns those that are absent here, too, in order and each once. After an error it
// may have copied some.
type Copier interface {
	Fetch(ctx context.Context, to cas.Store, ds []cas.Digest) (absent []cas.Digest, err error)
}

// Stats counts what an Overlay has done since it was made.
type Stats struct {
	Fetched    int64 // blobs that were brought near
	Sent       int64 // blobs and results that went far later
	Pending    int   // blobs and results that are still to go
	Lost       int64 // of them, those that never will: near no longer had them, or the journal was damaged
	Unanswered int64 // questions answered without far, which could not be reached, or did not answer them
	Refused    int64 // results that far did not take
}

// An Overlay is safe for concurrent use; New makes it, and whoever made it closes it.
type Overlay struct {
	config  Config
	ctx     context.Context // of what goes on when nobody waits for it
	cancel  context.CancelCauseFunc
	work    sync.WaitGroup
	pending *pending // nil unless the policy is Back

	doubts doubts

	mu      sync.Mutex
	closed  bool
	flights map[key]*flight
	orphans int // of flights: those that nobody waits for
	stats   Stats
	warned  map[string]time.Time // by message, when it was logged last
}

// errClosed is why nothing can be fetched.
var errClosed = fmt.Errorf("%w: the store is being closed", cas.ErrUnavailable)

// New returns an Overlay. It fails if the policy is Back and the journal cannot be read or written; what stands
// in it is sent.
func New(c Config) (*Overlay, error) {
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	if c.RenewInterval <= 0 {
		c.RenewInterval = time.Hour
	}
	o := &Overlay{
		config: c, flights: map[key]*flight{}, warned: map[string]time.Time{},
		doubts: newDoubts(),
	}
	o.ctx, o.cancel = context.WithCancelCause(context.Background())
	if c.Policy == WriteBack {
		var damaged int
		var err error
		if o.pending, damaged, err = openPending(c.Journal); err != nil {
			return nil, err
		}
		if damaged > 0 {
			c.Log.Error("journal is damaged: what its bad lines named may never be sent on", "lines", damaged, "kept as", c.Journal+saved)
			o.stats.Lost = int64(damaged)
		}
		o.work.Go(o.sendLater)
		o.work.Go(o.renew)
	}
	return o, nil
}

// Instance is a cas.Instances: its stores are also a cas.Batcher, a cas.Fetcher and, if near is one, a
// cas.Filer, and then, likewise, a cas.Locator; and a cas.Splicer if near is one.
func (o *Overlay) Instance(name string) (*cas.Instance, error) {
	s, err := o.store(name)
	if err != nil {
		return nil, err
	}
	in := &cas.Instance{Name: s.name, Store: s, Actions: s, Functions: s.far.Functions}
	if f, ok := cas.As[cas.Filer](s.near.Store); ok {
		filing := &filing{s, f}
		in.Store = filing
		if p, ok := cas.As[cas.Locator](s.near.Store); ok {
			in.Store = &placing{filing, p}
		}
	}
	in.Store = s.withMapper(in.Store)
	return in, nil
}

// store returns the store of an instance.
func (o *Overlay) store(name string) (*store, error) {
	near, err := o.config.Local(name)
	if err != nil {
		return nil, err
	}
	far, err := o.config.Upstream(name)
	if err != nil {
		return nil, err
	}
	return &store{o: o, name: near.Name, near: near, far: far}, nil
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

// warn logs what goes wrong for one call as for the next, at most once a minute.
func (o *Overlay) warn(message string, args ...any) {
	o.mu.Lock()
	now := time.Now()
	again := now.Sub(o.warned[message]) < time.Minute
	if !again {
		o.warned[message] = now
	}
	o.mu.Unlock()
	if !again {
		o.config.Log.Warn(message, args...)
	}
}

// Close waits until all that was written is far or ctx ends, ends what goes on in the background and waits for
// it. It fails if something is still to be sent: the next Overlay of this journal sends it. Nobody may write
// any more; what is being fetched fails. Near and far stay open.
func (o *Overlay) Close(ctx context.Context) error {
	if o.pending != nil {
		o.pending.drained(ctx)
	}
	o.mu.Lock()
	o.closed = true
	o.mu.Unlock()
	o.cancel(errClosed)
	o.work.Wait()
	if o.pending == nil {
		return nil
	}
	err := o.pending.close()
	if n := o.pending.len(); n > 0 {
		err = errors.Join(fmt.Errorf("%d blobs and results are not yet sent on; the journal %s keeps them for the next start", n, o.config.Journal), err)
	}
	return err
}

// A store is one instance, near and far.
type store struct {
	o         *Overlay
	name      string
	near, far *cas.Instance
}

var (
	_ cas.Store       = (*store)(nil)
	_ cas.Batcher     = (*store)(nil)
	_ cas.Fetcher     = (*store)(nil)
	_ cas.ActionCache = (*store)(nil)
	_ cas.Filer       = (*filing)(nil)
	_ cas.Locator     = (*placing)(nil)
	_ cas.Splicer     = (*mapper)(nil)
)

// filing is a store whose near is a cas.Filer.
type filing struct {
	*store
	filer cas.Filer
}

// File implements cas.Filer.
func (s *filing) File(ctx context.Context, d cas.Digest, executable bool) (string, func(), error) {
	path, release, err := s.filer.File(ctx, d, executable)
	if !lacks(err) {
		return path, release, err
	}
	if err := s.bring(ctx, d); err != nil {
		return "", nil, err
	}
	return s.filer.File(ctx, d, executable)
}

// placing is a filing whose near is a cas.Locator.
type placing struct {
	*filing
	placer cas.Locator
}

// Locate implements cas.Locator. What is not near is brought there first; that near has no room for it is cas.ErrFull.
func (s *placing) Locate(ctx context.Context, ds []cas.Digest) (cas.Location, error) {
	p, err := s.placer.Locate(ctx, ds)
	if err != nil {
		return nil, err
	}
	absent := absentOf(p, ds)
	if len(absent) == 0 {
		return p, nil
	}
	p.Release()
	own, others := s.fetch(ctx, absent, map[cas.Digest]bool{})
	if err = cmp.Or(ctx.Err(), own, others); lacks(err) {
		// One that is damaged far has ended the flight of many.
		if absent, err = s.near.Store.Missing(ctx, absent); err == nil {
			err = s.bringEach(ctx, absent)
		}
	}
	if err != nil {
		return nil, err
	}
	return s.placer.Locate(ctx, ds)
}

// bringEach brings those of ds near that far has.
func (s *store) bringEach(ctx context.Context, ds []cas.Digest) error {
	for _, d := range ds {
		if err := s.bring(ctx, d); err != nil && !lacks(err) {
			return err
		}
	}
	return nil
}

// absentOf returns those of ds that are absent by p, each once.
func absentOf(p cas.Location, ds []cas.Digest) (absent []cas.Digest) {
	seen := map[cas.Digest]bool{}
	for i, e := range p.Extents() {
		if e.File == cas.Absent && !seen[ds[i]] {
			seen[ds[i]] = true
			absent = append(absent, ds[i])
		}
	}
	return absent
}
