// SPDX-License-Identifier: Apache-2.0

package results

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	cloisterpb "github.com/cloister-build/cloister/proto/cloister/v1"
)

// ChangedToolchain replaces the toolchain of a result that was recorded before a change of the toolchain was noticed.
// It equals no fingerprint and no identity that an operator may declare.
const ChangedToolchain = "changed during or before the run"

const (
	// maxUnconfirmed limits the number of results that await a scan or a correction, about 200 bytes each. Further
	// results are not corrected.
	maxUnconfirmed = 50_000
	// confirmInterval is the interval of comparisons while there are such results.
	confirmInterval = 5 * time.Second
	// maxFailed limits the failed corrections of one comparison: each may take as long as the timeout of a store.
	maxFailed = 10
)

// A Confirmer corrects results that were recorded with the fingerprint of a toolchain that had already changed.
// Comparing all files after each action would take longer than many actions. Therefore a result is recorded at once,
// and recorded again with ChangedToolchain if a scan that begins later finds another toolchain. Use NewConfirmer to
// create one.
type Confirmer struct {
	all     cas.Instances
	scanned func() (fingerprint string, began time.Time)
	log     *slog.Logger
	ctx     context.Context
	stop    context.CancelFunc
	running sync.WaitGroup

	failed int // results that the last comparison could not correct, to log only changes; used by compare alone

	mu          sync.Mutex    // guards everything below
	unconfirmed []unconfirmed // only compare removes entries
	comparing   bool
}

// An unconfirmed result was recorded after the last scan of all files began, or its correction has failed.
type unconfirmed struct {
	instance  string
	action    cas.Digest
	toolchain string
	recorded  time.Time
	wrong     bool // a scan found another toolchain
}

// NewConfirmer returns a Confirmer, which the caller closes. all returns instances with unfiltered action caches.
// scanned returns the fingerprint of this machine's toolchain, and when the last scan of all files began; it is not
// called concurrently.
func NewConfirmer(all cas.Instances, scanned func() (string, time.Time), log *slog.Logger) *Confirmer {
	log = cmp.Or(log, slog.New(slog.DiscardHandler))
	c := &Confirmer{all: all, scanned: scanned, log: log}
	c.ctx, c.stop = context.WithCancel(context.Background())
	return c
}

// Close stops the comparisons.
func (c *Confirmer) Close() {
	c.mu.Lock()
	c.stop() // add starts nothing afterwards
	c.mu.Unlock()
	c.running.Wait()
}

// Watch wraps next so that results recorded in its action caches are compared.
func (c *Confirmer) Watch(next cas.Instances) cas.Instances {
	return func(name string) (*cas.Instance, error) {
		in, err := next(name)
		if err != nil || in == nil || in.Actions == nil { // callers check that
			return in, err
		}
		watched := *in
		watched.Actions = recorder{in.Actions, name, c}
		return &watched, nil
	}
}

// recorder is the action cache of an instance that Watch returns.
type recorder struct {
	cas.ActionCache
	instance  string
	confirmer *Confirmer
}

// Record implements cas.ActionCache.
func (r recorder) Record(ctx context.Context, action cas.Digest, result *repb.ActionResult) error {
	err := r.ActionCache.Record(ctx, action, result)
	if toolchain := Recorded(result).GetToolchain(); err == nil && toolchain != "" {
		r.confirmer.add(unconfirmed{instance: r.instance, action: action, toolchain: toolchain, recorded: time.Now()})
	}
	return err
}

func (c *Confirmer) add(u unconfirmed) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.unconfirmed) >= maxUnconfirmed || c.ctx.Err() != nil {
		return
	}
	c.unconfirmed = append(c.unconfirmed, u)
	if !c.comparing {
		c.comparing = true
		c.running.Go(c.run)
	}
}

// run compares until nothing is left.
func (c *Confirmer) run() {
	tick := time.NewTicker(confirmInterval)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
			c.compare()
		case <-c.ctx.Done():
			return
		}
		c.mu.Lock()
		more := len(c.unconfirmed) > 0
		c.comparing = more
		c.mu.Unlock()
		if !more {
			return
		}
	}
}

// compare corrects results of another toolchain. It keeps those that no scan has covered yet, and those that it could
// not correct. Those that failed come last, so that they do not delay the others next time.
func (c *Confirmer) compare() {
	fingerprint, began := c.scanned()
	c.mu.Lock()
	all := c.unconfirmed
	c.mu.Unlock()
	var keep, failed []unconfirmed
	corrected, postponed, first := 0, 0, error(nil)
	for _, u := range all {
		u.wrong = u.wrong || fingerprint != "" && fingerprint != u.toolchain
		if !u.wrong {
			if !began.After(u.recorded) {
				keep = append(keep, u)
			}
			continue
		}
		if len(failed) == maxFailed {
			keep = append(keep, u)
			postponed++
			continue
		}
		done, err := c.correct(u)
		switch {
		case c.ctx.Err() != nil:
			return
		case err != nil:
			failed = append(failed, u)
			first = cmp.Or(first, fmt.Errorf("action %s in instance %+.80q: %w", u.action, u.instance, err))
		case done:
			corrected++
		}
	}
	if corrected > 0 {
		c.log.Warn("marked cached results that were recorded before a change of the toolchain was noticed; they are now misses", "results", corrected)
	}
	uncorrected := len(failed) + postponed
	if uncorrected > 0 && uncorrected != c.failed {
		c.log.Warn("cannot mark cached results that were recorded before a change of the toolchain was noticed; trying again",
			"results", uncorrected, "err", first)
	}
	c.failed = uncorrected
	c.mu.Lock()
	c.unconfirmed = slices.Concat(keep, failed, c.unconfirmed[len(all):])
	c.mu.Unlock()
}

// correct records a result again, with ChangedToolchain, unless another result has replaced it.
func (c *Confirmer) correct(u unconfirmed) (done bool, err error) {
	in, err := c.all(u.instance)
	if err != nil {
		return false, err
	}
	r, err := in.Actions.Lookup(c.ctx, u.action)
	if errors.Is(err, cas.ErrNotFound) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	for _, a := range r.GetExecutionMetadata().GetAuxiliaryMetadata() {
		e := new(cloisterpb.Execution)
		if !a.MessageIs(e) || a.UnmarshalTo(e) != nil || e.Toolchain != u.toolchain {
			continue
		}
		e.Toolchain = ChangedToolchain
		if err := a.MarshalFrom(e); err != nil {
			return false, err
		}
		err := in.Actions.Record(c.ctx, u.action, r)
		return err == nil, err
	}
	return false, nil
}
