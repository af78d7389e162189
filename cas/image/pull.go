// SPDX-License-Identifier: Apache-2.0

package image

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync/atomic"
	"time"
)

// A pull is shared by everyone who waits for the image.
type pull struct {
	instance string
	pinned   string
	started  time.Time
	read     atomic.Int64 // compressed bytes
	total    atomic.Int64
	asking   atomic.Int64 // calls that wait for the registry
	cancel   context.CancelCauseFunc
	waiting  int // guarded by Library.mu

	done  chan struct{} // closed when entry and err are set
	entry *Entry
	err   error
}

// errAbandoned ends a pull that nobody waits for.
var errAbandoned = errors.New("nobody waits for the image any more")

// pull joins the pull of an image, or starts it. If ctx ends, others that wait for it are not affected.
func (l *Library) pull(ctx context.Context, instance string, ref Reference, digest string) (*Entry, error) {
	key := pullKey{instance, ref.Pin(digest)}
	l.mu.Lock()
	p := l.pulls[key]
	if p == nil {
		p = &pull{instance: instance, pinned: key.pinned, started: time.Now(), done: make(chan struct{})}
		var own context.Context
		own, p.cancel = context.WithCancelCause(l.ctx)
		l.pulls[key] = p
		l.running.Go(func() {
			p.entry, p.err = l.run(own, p, ref)
			p.cancel(nil)
			l.mu.Lock()
			if l.pulls[key] == p {
				delete(l.pulls, key)
			}
			l.mu.Unlock()
			close(p.done)
		})
	}
	p.waiting++
	l.mu.Unlock()

	select {
	case <-p.done:
		return p.entry, p.err
	case <-ctx.Done():
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if p.waiting--; p.waiting == 0 {
		p.cancel(errAbandoned)
		if l.pulls[key] == p {
			delete(l.pulls, key) // the next request starts another
		}
	}
	return nil, context.Cause(ctx)
}

// run pulls an image.
func (l *Library) run(ctx context.Context, p *pull, ref Reference) (*Entry, error) {
	select {
	case l.slots <- struct{}{}:
		defer func() { <-l.slots }()
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
	late := fmt.Errorf("pull image %s: it took longer than the limit of %v", ref, l.config.MaxPull)
	ctx, cancel := context.WithTimeoutCause(ctx, l.config.MaxPull, late)
	defer cancel()
	ctx, giveUp := context.WithCancelCause(ctx)
	defer giveUp(nil)
	registry := l.registry(ref.Registry())
	if l.isLate(registry) {
		return nil, fmt.Errorf("pull image %s: %w", ref, errLate)
	}
	in, err := l.config.Instances(p.instance)
	if err != nil {
		return nil, err
	}
	c := l.config.Config
	c.Store = in.Store
	c.Progress = func(done, total int64) {
		p.read.Store(done)
		p.total.Store(total)
	}
	c.asking = func(change int64) { p.asking.Add(change) }
	from, err := ParseReference(p.pinned)
	if err != nil {
		return nil, err
	}
	log := c.Log.With("image", p.pinned, "instance", p.instance)
	log.Info("pulling an image")
	var read int64
	moved := clock()
	stop := l.report(ctx, func() {
		if now := p.read.Load(); now != read || p.asking.Load() == 0 { // a slow store is no stall
			read, moved = now, clock()
		} else if clock().Sub(moved) > maxStall { // it holds the slots of actions
			l.setLate(registry)
			giveUp(fmt.Errorf("pull image %s: the registry sent nothing for %v", ref, maxStall))
			return
		}
		log.Info("still pulling an image", "read", read, "of", p.total.Load())
	})
	im, err := Pull(ctx, c, from)
	stop()
	if err != nil {
		log.Warn("pulling an image failed", "err", err)
		return nil, err
	}
	im.Reference = ref.String()
	e := &Entry{Instance: p.instance, Image: *im, Pinned: p.pinned, Pulled: time.Now().UTC()}
	if err := l.add(e); err != nil {
		return nil, err
	}
	log.Info("pulled an image", "root", e.Root.String(), "files", e.Files, "bytes", e.Bytes, "dropped", e.Dropped,
		"took", time.Since(p.started).Round(time.Millisecond))
	return e, nil
}

// reportInterval is the interval of log lines about a running pull. maxStall is the time, measured with clock,
// after which a pull gives up on a registry that sends nothing. They are variables for tests.
var (
	reportInterval = 10 * time.Second
	maxStall       = time.Minute
	clock          = time.Now
)

// report calls f at intervals until ctx ends or stop is called, which waits for it.
func (l *Library) report(ctx context.Context, f func()) (stop func()) {
	ctx, cancel := context.WithCancel(ctx)
	done := make(chan struct{})
	go func() {
		defer close(done)
		tick := time.NewTicker(reportInterval)
		defer tick.Stop()
		for {
			select {
			case <-tick.C:
				f()
			case <-ctx.Done():
				return
			}
		}
	}()
	return func() { cancel(); <-done }
}

// A Pulling is a pull that runs or waits for its turn.
type Pulling struct {
	Instance, Pinned string
	Started          time.Time
	// Read and Total are compressed bytes. Total is 0 before it is known.
	Read, Total int64
	// Waiting is the number of requests that wait for it.
	Waiting int
}

// state returns the state of p. Library.mu is held.
func (p *pull) state() Pulling {
	return Pulling{p.instance, p.pinned, p.started, p.read.Load(), p.total.Load(), p.waiting}
}

// Progress returns the current pull of a pinned image in an instance, or nil.
func (l *Library) Progress(instance, pinned string) *Pulling {
	l.mu.Lock()
	defer l.mu.Unlock()
	p := l.pulls[pullKey{instance, pinned}]
	if p == nil {
		return nil
	}
	state := p.state()
	return &state
}

// Pulling returns the current pulls, oldest first.
func (l *Library) Pulling() []Pulling {
	l.mu.Lock()
	defer l.mu.Unlock()
	var all []Pulling
	for _, p := range l.pulls {
		all = append(all, p.state())
	}
	slices.SortFunc(all, func(a, b Pulling) int {
		return cmp.Or(a.Started.Compare(b.Started), cmp.Compare(a.Pinned,
			b.Pinned))
	})
	return all
}
