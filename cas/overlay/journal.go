// SPDX-License-Identifier: Apache-2.0

package overlay

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"sync"
	"syscall"
	"time"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/durable"
)

// A kind is that of an entry.
type kind uint8

const (
	blob kind = iota + 1
	result
)

// kinds has the words of the journal.
var kinds = map[string]kind{"blob": blob, "result": result}

// String returns the word of the journal.
func (k kind) String() string {
	if k == blob {
		return "blob"
	}
	return "result"
}

// An entry is a blob or the result of an action that is to be sent.
type entry struct {
	kind     kind
	instance string
	digest   cas.Digest
}

// String returns the entry as in the journal.
func (e entry) String() string { return string(e.append(nil)) }

// append appends the entry as in the journal. Batches have thousands of them.
func (e entry) append(b []byte) []byte {
	b = append(append(b, e.kind.String()...), ' ')
	b = append(strconv.AppendQuote(b, e.instance), ' ')
	return append(b, e.digest.String()...)
}

// The verbs of the journal. A record consists of a verb, an entry, and the time when the entry was added, in Unix
// seconds. Old journals lack the time.
const (
	added  = "add"
	struck = "done"
)

func (e entry) record(verb string) []byte { return e.append([]byte(verb + " ")) }

// parseRecord parses a record. The time is zero if there is none.
func parseRecord(record []byte) (verb string, e entry, at time.Time, err error) {
	var kind, digest string
	var seconds int64
	n, _ := fmt.Sscanf(string(record), "%s %s %q %s %d", &verb, &kind, &e.instance, &digest, &seconds)
	e.kind = kinds[kind]
	if n < 4 || verb != added && verb != struck || e.kind == 0 {
		return "", entry{}, at, durable.ErrDamaged
	}
	if e.digest, err = cas.ParseDigest(digest); err != nil {
		return "", entry{}, at, durable.ErrDamaged
	}
	if n == 5 {
		at = time.Unix(seconds, 0)
	}
	return verb, e, at, nil
}

// pending is the set of entries to be sent, oldest first. The journal has those that were added and not struck out.
type pending struct {
	mu      sync.Mutex
	changed *sync.Cond // signals new and removed entries, and wakes waiters to check their contexts
	// Everything below is guarded by mu.
	log     *durable.Log
	records int      // in log
	text    []byte   // of the records of the last append, and
	lines   [][]byte // its parts; both are reused
	batches []batch  // added since the last call of index
	waiting int      // digests in batches
	uses    *uses
	items   items
	bytes   int64   // of the blobs of items
	byAge   []*item // all items, in the order of since, and removed ones
	queue   []*item // small blobs and results; may have removed ones, too
	large   []*item // large blobs; likewise
	clock   uint64  // counts additions
	delayed []*item // in no queue
	// waiters are results, in no queue, by the large blob after which they are sent.
	waiters    map[*item][]*item
	moreLarge  *sync.Cond // signals new items of large, and wakes waiters to check their contexts
	compacting bool
}

// A batch is what one call of add has added. Writes are answered as soon as the journal has them; the set is updated
// when it is needed, usually by the sender between two rounds.
type batch struct {
	kind     kind
	instance string
	digests  []cas.Digest
	since    time.Time
	at       uint64 // the clock
}

// maxWaiting is the number of digests in batches at which add indexes earlier batches. Batches may repeat digests.
const maxWaiting = 1 << 17

// recordBytes is a size in bytes that few records exceed.
const recordBytes = 128

// appendRecord appends a record of an entry that was added at since. Both verbs have the time, so that the rest of their
// records is equal.
func appendRecord(b []byte, verb string, e entry, since time.Time) []byte {
	b = append(e.append(append(append(b, verb...), ' ')), ' ')
	return strconv.AppendInt(b, since.Unix(), 10)
}

// openPending reads and compacts the journal at path, or creates it. Added blobs and results count as renewed in uses.
// If synced, records survive a power failure.
func openPending(path string, synced bool, uses *uses) (*pending, error) {
	p := &pending{uses: uses, items: newItems(), waiters: map[*item][]*item{}}
	p.changed, p.moreLarge = sync.NewCond(&p.mu), sync.NewCond(&p.mu)
	var err error
	p.log, err = durable.Open(durable.Config{Path: path, Sync: synced, Replay: func(record []byte) error {
		verb, e, at, err := parseRecord(record)
		switch {
		case err != nil:
			return err
		case verb == struck:
			p.remove(e)
			return nil
		case at.IsZero():
			at = time.Now()
		}
		i := p.items.newItem(e, at)
		p.push(&i, 0)
		return nil
	}})
	if err != nil {
		return nil, err
	}
	p.queue, p.large, p.byAge = current(p.queue), current(p.large), current(p.byAge)
	slices.SortStableFunc(p.byAge, func(a, b *item) int { return a.since.Compare(b.since) })
	p.mu.Lock()
	defer p.mu.Unlock()
	if err := p.compact(); err != nil {
		return nil, errors.Join(err, p.log.Close())
	}
	return p, nil
}

// current removes the removed items.
func current(items []*item) []*item {
	return slices.DeleteFunc(items, func(i *item) bool { return i.removed })
}

// index adds the items of the batches. The caller holds mu.
func (p *pending) index() {
	for _, b := range p.batches {
		p.indexBatch(b)
	}
	clear(p.batches)
	p.batches = p.batches[:0]
}

// indexBatch adds the items of a batch. The caller holds mu.
func (p *pending) indexBatch(b batch) {
	items := make([]item, len(b.digests))
	for n, d := range b.digests {
		items[n] = p.items.newItem(entry{b.kind, b.instance, d}, b.since)
		p.push(&items[n], b.at)
	}
	p.waiting -= len(b.digests)
	p.uses.renewed(b.kind, b.instance, b.digests...)
}

// push adds an item, which was added at a clock, to the queue, unless its entry is pending. The caller holds mu, or has
// exclusive access.
func (p *pending) push(i *item, at uint64) {
	i.addedAt = at
	if old := p.items.add(i); old != nil {
		old.addedAt = at
		return
	}
	p.enqueue(i)
	p.byAge = append(p.byAge, i)
	p.bytes += i.bytes()
}

// enqueue adds an item to its queue. The caller holds mu, or has exclusive access.
func (p *pending) enqueue(i *item) {
	if i.bytes() <= smallBlob {
		p.queue = append(p.queue, i)
		return
	}
	p.large = append(p.large, i)
	p.moreLarge.Signal()
}

// remove removes an entry, except from the queues and byAge, and queues its waiters. The caller holds mu, or has
// exclusive access.
func (p *pending) remove(e entry) {
	if i := p.items.get(e); i != nil {
		i.removed = true
		p.items.remove(i)
		p.bytes -= e.bytes()
		p.queueWaiters(i)
	}
}

// queueWaiters queues the results that wait for a large blob. The caller holds mu, or has exclusive access.
func (p *pending) queueWaiters(i *item) {
	p.queue = append(p.queue, p.waiters[i]...)
	delete(p.waiters, i)
}

// bytes returns the size of the blob. Results count as 0.
func (e entry) bytes() int64 {
	if e.kind == result {
		return 0
	}
	return e.digest.Size()
}

// add adds entries. If it returns nil, they survive the end of the process, and with Config.Sync a power failure. It
// keeps ds.
func (p *pending) add(kind kind, instance string, ds ...cas.Digest) error {
	if len(ds) == 0 {
		return nil
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	b := batch{kind: kind, instance: instance, digests: ds, since: time.Now()}
	err := p.append(added, len(ds), func(i int) (entry, time.Time) { return entry{kind, instance, ds[i]}, b.since })
	if err != nil {
		return err
	}
	p.clock++
	b.at = p.clock
	p.batches, p.waiting = append(p.batches, b), p.waiting+len(ds)
	for p.waiting > maxWaiting {
		p.indexBatch(p.batches[0])
		p.batches[0], p.batches = batch{}, p.batches[1:]
	}
	p.changed.Broadcast()
	return nil
}

// drop strikes out blobs that the upstream has received from another sender. A record that cannot be written is no
// error: they are sent once more.
func (p *pending) drop(instance string, ds ...cas.Digest) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.index()
	var dropped []*item
	for _, d := range ds {
		e := entry{blob, instance, d}
		if i := p.items.get(e); i != nil {
			dropped = append(dropped, i)
			p.remove(e)
		}
	}
	if len(dropped) > 0 {
		_ = p.strike(dropped)
		p.changed.Broadcast()
	}
}

// settle ends a round. Entries to be retried move to the end of their queue. An entry that is done but was added again
// meanwhile is retried, too, because its result may have changed.
func (p *pending) settle(r *round) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.index()
	var done []*item
	for _, e := range r.done {
		switch i := p.items.get(e); {
		case i == nil: // dropped
		case i.addedAt > r.takenAt:
			r.retry = append(r.retry, e)
			p.queueWaiters(i)
		default:
			done = append(done, i)
			p.remove(e)
		}
	}
	for _, e := range r.retry {
		if i := p.items.get(e); i != nil {
			p.enqueue(i)
		}
	}
	for e, after := range r.wait {
		i, large := p.items.get(e), p.items.get(after)
		switch {
		case i == nil: // dropped
		case large != nil:
			p.waiters[large] = append(p.waiters[large], i)
		default:
			p.enqueue(i)
		}
	}
	for _, e := range r.delay {
		i := p.items.get(e)
		if i == nil {
			continue
		}
		i.delay = min(max(2*i.delay, minBackoff), maxDelay)
		i.until = time.Now().Add(i.delay)
		p.delayed = append(p.delayed, i)
		p.queueWaiters(i) // they may be given up
	}
	if len(p.byAge) > 2*p.items.n+1000 {
		p.byAge = current(p.byAge)
	}
	p.changed.Broadcast()
	if p.records > 4*p.items.n+10_000 && !p.compacting {
		return p.compact()
	}
	return p.strike(done)
}

// take waits for small blobs and results and returns a round of up to size(), oldest first, or nil when ctx ends. If it
// had to wait for new entries, it calls rest before it indexes them, since indexing delays writes. There is one caller
// at a time. The caller ends the round with settle.
func (p *pending) take(ctx context.Context, rest func(), size func() int) *round {
	stop := context.AfterFunc(ctx, p.wake)
	defer stop()
	p.mu.Lock()
	defer p.mu.Unlock()
	waited := len(p.batches)+len(p.queue) == 0
	for {
		if waited && len(p.batches)+len(p.queue) > 0 {
			p.mu.Unlock()
			rest()
			p.mu.Lock()
		}
		p.index()
		next := p.queueDelayed()
		if ctx.Err() != nil {
			return nil
		}
		if r := p.head(&p.queue, size); r != nil {
			return r
		}
		timer := time.AfterFunc(next, p.wake)
		p.changed.Wait()
		timer.Stop()
		waited = true
	}
}

// takeLarge waits for a large blob and returns a round of it, or nil when ctx ends. If it had to wait, it calls rest
// first. It leaves indexing to take. The caller ends the round with settle; others can run meanwhile.
func (p *pending) takeLarge(ctx context.Context, rest func()) *round {
	stop := context.AfterFunc(ctx, p.wake)
	defer stop()
	p.mu.Lock()
	defer p.mu.Unlock()
	for ctx.Err() == nil {
		if r := p.head(&p.large, func() int { return 1 }); r != nil {
			return r
		}
		p.moreLarge.Wait()
		if len(p.large) > 0 {
			p.mu.Unlock()
			rest()
			p.mu.Lock()
		}
	}
	return nil
}

// head removes up to size() items from the head of a queue and returns a round of them, or nil if there are none. They
// stay pending. The caller holds mu.
func (p *pending) head(queue *[]*item, size func() int) *round {
	q := *queue
	for len(q) > 0 && q[0].removed {
		q = q[1:]
	}
	if *queue = q; len(q) == 0 {
		return nil
	}
	n := min(size(), len(q))
	*queue = q[n:]
	return &round{entries: entriesOf(q[:n]), since: q[0].since, takenAt: p.clock}
}

// queueDelayed queues the entries whose delay is over, and returns the time until the next one. The caller holds mu.
func (p *pending) queueDelayed() time.Duration {
	next := maxDelay
	p.delayed = slices.DeleteFunc(p.delayed, func(i *item) bool {
		left := time.Until(i.until)
		if left <= 0 {
			p.enqueue(i)
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
	p.moreLarge.Broadcast()
}

// all returns every entry.
func (p *pending) all() []entry {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.index()
	return entriesOf(current(slices.Clone(p.byAge)))
}

func entriesOf(items []*item) []entry {
	entries := make([]entry, len(items))
	for n, i := range items {
		entries[n] = i.entry
	}
	return entries
}

// stats returns the number of entries, the bytes of their blobs, and when the oldest was added, or the zero time.
func (p *pending) stats() (n int, bytes int64, oldest time.Time) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.index()
	for len(p.byAge) > 0 && p.byAge[0].removed {
		p.byAge = p.byAge[1:]
	}
	if len(p.byAge) > 0 {
		oldest = p.byAge[0].since
	}
	return p.items.n, p.bytes, oldest
}

// since returns when a pending entry was added, or the zero time.
func (p *pending) since(e entry) time.Time {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.index()
	if i := p.items.get(e); i != nil {
		return i.since
	}
	return time.Time{}
}

// rejected reports whether e is pending and waits after a rejection.
func (p *pending) rejected(e entry) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	i := p.items.get(e)
	return i != nil && i.delay > 0 && time.Now().Before(i.until)
}

// has returns the pending blobs among ds.
func (p *pending) has(instance string, ds []cas.Digest) map[cas.Digest]bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.index()
	found := map[cas.Digest]bool{}
	for _, d := range ds {
		if p.items.get(entry{blob, instance, d}) != nil {
			found[d] = true
		}
	}
	return found
}

func (p *pending) len() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.index()
	return p.items.n
}

// append appends n records to the journal, all or none. The caller holds mu.
func (p *pending) append(verb string, n int, record func(i int) (e entry, since time.Time)) error {
	if n == 0 {
		return nil
	}
	p.text, p.lines = p.text[:0], p.lines[:0]
	for i := range n {
		start := len(p.text)
		e, since := record(i)
		p.text = appendRecord(p.text, verb, e, since)
		p.lines = append(p.lines, p.text[start:])
	}
	err := p.log.Append(p.lines...)
	if clear(p.lines); cap(p.text) > 1<<20 { // of a large batch
		p.text, p.lines = nil, nil
	}
	if err != nil {
		return writeError("journal", err)
	}
	p.records += n
	return nil
}

// strike appends records that strike out items. The caller holds mu.
func (p *pending) strike(items []*item) error {
	return p.append(struck, len(items), func(i int) (entry, time.Time) { return items[i].entry, items[i].since })
}

// writeError returns err, of writing a file of an overlay, as cas.ErrFull or cas.ErrUnwritable.
func writeError(file string, err error) error {
	if errors.Is(err, syscall.ENOSPC) || errors.Is(err, syscall.EDQUOT) {
		return &cas.FullError{Limit: cas.LimitDisk, Err: fmt.Errorf(
			"%s: %w: %w: free space or inodes on its file system", file, cas.ErrFull, err)}
	}
	return fmt.Errorf("%s: %w: %w", file, cas.ErrUnwritable, err)
}

// compact rewrites the journal with only the pending entries. The caller holds mu, which compact releases meanwhile.
// Only one call may run at a time.
func (p *pending) compact() error {
	p.compacting = true
	defer func() { p.compacting = false }()
	items, before := current(slices.Clone(p.byAge)), p.records // byAge also has the items that are being sent
	err := p.log.Compact(&p.mu, func(yield func([]byte) bool) {
		for _, i := range items {
			if !yield(appendRecord(make([]byte, 0, recordBytes), added, i.entry, i.since)) {
				return
			}
		}
	})
	if err != nil {
		return fmt.Errorf("journal: %w", err)
	}
	p.records += len(items) - before
	return nil
}

// waitEmpty waits until nothing is pending or ctx ends.
func (p *pending) waitEmpty(ctx context.Context) {
	stop := context.AfterFunc(ctx, p.wake)
	defer stop()
	p.mu.Lock()
	defer p.mu.Unlock()
	for len(p.batches)+p.items.n > 0 && ctx.Err() == nil {
		p.changed.Wait()
	}
}
