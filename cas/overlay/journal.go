// SPDX-License-Identifier: Apache-2.0

package overlay

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/durable"
)

// The kinds of entries, as words of the journal.
const (
	blob   = "blob"
	result = "result"
)

// An entry is a blob or the result of an action that is to be sent.
type entry struct {
	kind     string
	instance string
	digest   cas.Digest
}

// String returns the entry as in the journal.
func (e entry) String() string { return fmt.Sprintf("%s %q %s", e.kind, e.instance, e.digest) }

// The verbs of the journal, whose records consist of a verb and an entry.
const (
	added  = "add"
	struck = "done"
)

func (e entry) record(verb string) []byte { return fmt.Appendf(nil, "%s %s", verb, e) }

// parseRecord is the inverse of entry.record.
func parseRecord(record []byte) (verb string, e entry, err error) {
	var digest string
	if _, err := fmt.Sscanf(string(record), "%s %s %q %s", &verb, &e.kind, &e.instance, &digest); err != nil {
		return "", entry{}, durable.ErrDamaged
	}
	if e.digest, err = cas.ParseDigest(digest); err != nil {
		return "", entry{}, durable.ErrDamaged
	}
	if verb != added && verb != struck || e.kind != blob && e.kind != result {
		return "", entry{}, durable.ErrDamaged
	}
	return verb, e, nil
}

// pending is the set of entries to be sent, oldest first. The journal has those that were added and not struck out.
type pending struct {
	mu      sync.Mutex
	changed *sync.Cond // signals new and removed entries, and wakes waiters to check their contexts
	// Everything below is guarded by mu.
	log     *durable.Log
	records int // in log
	queue   []entry
	addedAt map[entry]uint64 // of all entries: the clock when each was last added
	clock   uint64           // counts additions
	taken   int              // number of entries at the head of queue that are being sent,
	takenAt uint64           // and the clock when they were taken
	delayed []delayedEntry   // not in queue
	delays  map[entry]time.Duration
}

// A delayedEntry is not sent before a time.
type delayedEntry struct {
	entry
	until time.Time
}

// openPending reads and compacts the journal at path, or creates it.
func openPending(path string) (*pending, error) {
	p := &pending{addedAt: map[entry]uint64{}, delays: map[entry]time.Duration{}}
	p.changed = sync.NewCond(&p.mu)
	var err error
	p.log, err = durable.Open(durable.Config{Path: path, Replay: func(record []byte) error {
		verb, e, err := parseRecord(record)
		switch {
		case err != nil:
			return err
		case verb == added:
			p.push(e)
		default:
			delete(p.addedAt, e)
		}
		return nil
	}})
	if err != nil {
		return nil, err
	}
	seen := map[entry]bool{} // an entry that was struck out and added again is in queue twice
	p.queue = slices.DeleteFunc(p.queue, func(e entry) bool {
		drop := p.addedAt[e] == 0 || seen[e]
		seen[e] = true
		return drop
	})
	if err := p.compact(); err != nil {
		return nil, errors.Join(err, p.log.Close())
	}
	return p, nil
}

// push adds an entry to the queue. The caller holds mu, or has exclusive access.
func (p *pending) push(e entry) {
	p.clock++
	if p.addedAt[e] == 0 {
		p.queue = append(p.queue, e)
	}
	p.addedAt[e] = p.clock
}

// add adds entries. If it returns nil, they survive the end of the process.
func (p *pending) add(entries ...entry) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	var records [][]byte
	for _, e := range entries {
		if p.addedAt[e] == 0 {
			records = append(records, e.record(added))
		}
	}
	if err := p.append(records); err != nil {
		return err
	}
	for _, e := range entries {
		p.push(e)
	}
	p.changed.Broadcast()
	return nil
}

// settle ends a round with the entries that take returned. Entries to be retried move to the end of the queue. An entry
// that is done but was added again since is retried, too: a result may be another one by now.
func (p *pending) settle(r *round) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.queue = p.queue[p.taken:]
	p.taken = 0
	var records [][]byte
	for _, e := range r.done {
		if p.addedAt[e] > p.takenAt {
			r.retry = append(r.retry, e)
			continue
		}
		records = append(records, e.record(struck))
		delete(p.addedAt, e)
		delete(p.delays, e)
	}
	p.queue = append(p.queue, r.retry...)
	for _, e := range r.delay {
		p.delays[e] = min(max(2*p.delays[e], minBackoff), maxDelay)
		p.delayed = append(p.delayed, delayedEntry{e, time.Now().Add(p.delays[e])})
	}
	p.changed.Broadcast()
	if p.records > 4*len(p.addedAt)+10_000 {
		return p.compact()
	}
	return p.append(records)
}

// take waits for entries and returns up to n, oldest first, or nil when ctx ends. There is one caller at a time, which
// ends the round with settle.
func (p *pending) take(ctx context.Context, n int) []entry {
	stop := context.AfterFunc(ctx, p.wake)
	defer stop()
	p.mu.Lock()
	defer p.mu.Unlock()
	for {
		next := p.queueDelayed()
		if ctx.Err() != nil {
			return nil
		}
		if len(p.queue) > 0 {
			break
		}
		timer := time.AfterFunc(next, p.wake)
		p.changed.Wait()
		timer.Stop()
	}
	p.taken, p.takenAt = min(n, len(p.queue)), p.clock
	return slices.Clone(p.queue[:p.taken])
}

// queueDelayed queues the entries whose delay is over, and returns the time until the next one. The caller holds mu.
func (p *pending) queueDelayed() time.Duration {
	next := maxDelay
	p.delayed = slices.DeleteFunc(p.delayed, func(r delayedEntry) bool {
		left := time.Until(r.until)
		if left <= 0 {
			p.queue = append(p.queue, r.entry)
			return true
		}
		next = min(next, left)
		return false
	})
	return next
}

// wake makes waiters check their contexts.
func (p *pending) wake() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.changed.Broadcast()
}

// all returns every entry.
func (p *pending) all() []entry {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.entries()
}

// entries is all. The caller holds mu, or has exclusive access.
func (p *pending) entries() []entry {
	all := slices.Clone(p.queue)
	for _, r := range p.delayed {
		all = append(all, r.entry)
	}
	return all
}

func (p *pending) len() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.addedAt)
}

// append appends records to the journal, all or none. The caller holds mu.
func (p *pending) append(records [][]byte) error {
	if len(records) == 0 {
		return nil
	}
	if err := p.log.Append(records...); err != nil {
		return fmt.Errorf("journal: %w", err)
	}
	p.records += len(records)
	return nil
}

// compact rewrites the journal with only the pending entries. The caller holds mu, or has exclusive access.
func (p *pending) compact() error {
	entries := p.entries()
	err := p.log.Rewrite(func(yield func([]byte) bool) {
		for _, e := range entries {
			if !yield(e.record(added)) {
				return
			}
		}
	})
	if err != nil {
		return fmt.Errorf("journal: %w", err)
	}
	p.records = len(entries)
	return nil
}

// waitEmpty waits until nothing is pending or ctx ends.
func (p *pending) waitEmpty(ctx context.Context) {
	stop := context.AfterFunc(ctx, p.wake)
	defer stop()
	p.mu.Lock()
	defer p.mu.Unlock()
	for len(p.addedAt) > 0 && ctx.Err() == nil {
		p.changed.Wait()
	}
}
