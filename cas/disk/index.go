// SPDX-License-Identifier: Apache-2.0

package disk

import (
	"math"
	"sync"
	"time"

	"github.com/cloister-build/cloister/cas"
)

// A kind is what a file holds.
type kind uint8

const (
	blob kind = iota
	executable
	result
)

// kinds are the directories of the kinds.
var kinds = [...]string{blob: "blobs", executable: "execs", result: "results"}

func (k kind) String() string { return kinds[k] }

// A key names a file of the store.
type key struct {
	instance string // escaped
	kind     kind
	digest   cas.Digest
}

// block is the unit in which files are counted, in bytes.
const block = 4096

// charge returns what a file of size bytes counts against the budget. No file is free: each takes an
// inode.
func charge(size int64) int64 {
	if size > math.MaxInt64-block {
		return math.MaxInt64
	}
	return max(block, (size+block-1)/block*block)
}

// stampEvery is how old the use that a file's time records may be before it is written anew: an order
// of eviction needs no more, and reading should not write. (cmd/go's build cache does the same.)
const stampEvery = time.Hour

// An entry is a file of the store. All but key and reading is guarded by index.mu.
type entry struct {
	key     key
	reading sync.Mutex // held while the file is read to verify it
	charge  int64
	// verified says that this process wrote the file, or has read it whole and found it to be what
	// its key says.
	verified bool
	used     time.Time // as lastUse says of the file
	pins     int       // how often File handed it out
	// doomed says that the file is about to be removed, or would be if it were not pinned: to all
	// but a Put it is absent.
	doomed     bool
	prev, next *entry // in index.lru; nil while pinned or doomed
}

// An index knows every file of the store and the order of their use. It touches no file.
type index struct {
	max int64

	mu      sync.Mutex
	entries map[key]*entry  // guarded by mu
	bytes   int64           // guarded by mu; charges of all entries, and reservations
	lru     entry           // guarded by mu; a ring: next was used last, prev least recently
	count   [len(kinds)]int // guarded by mu
}

// take reserves n bytes, if they are free.
func (x *index) take(n int64) bool {
	x.mu.Lock()
	defer x.mu.Unlock()
	// Not x.bytes+n, which may overflow.
	if x.bytes > x.max-n {
		return false
	}
	x.bytes += n
	return true
}

// give returns n reserved bytes.
func (x *index) give(n int64) {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.bytes -= n
}

// use returns the entry of k, or nil if it is absent, and makes it the one used last. It pins it if
// pin. Stale says that its time should be written anew.
func (x *index) use(k key, now time.Time, pin bool) (e *entry, stale bool) {
	x.mu.Lock()
	defer x.mu.Unlock()
	e = x.entries[k]
	if e == nil || e.doomed {
		return nil, false
	}
	x.unlink(e)
	if pin {
		e.pins++
	}
	x.settle(e)
	if stale = now.Sub(e.used) > stampEvery; stale {
		e.used = now
	}
	return e, stale
}

// put adds the entry of k, whose n bytes have been reserved, or replaces what the present one is about:
// its file has just been written by this process. It pins it if pin.
func (x *index) put(k key, n int64, now time.Time, pin bool) *entry {
	x.mu.Lock()
	defer x.mu.Unlock()
	e := x.entries[k]
	if e == nil {
		e = &entry{key: k}
		x.entries[k] = e
		x.count[k.kind]++
	}
	x.unlink(e)
	x.bytes -= e.charge
	e.charge, e.used, e.doomed, e.verified = n, now, false, true
	if pin {
		e.pins++
	}
	x.settle(e)
	return e
}

// load adds the entry of a file that is already there, even beyond the budget.
func (x *index) load(k key, n int64, used time.Time) {
	x.mu.Lock()
	x.bytes += n
	x.mu.Unlock()
	x.setVerified(x.put(k, n, used, false), false)
}

func (x *index) setVerified(e *entry, verified bool) {
	x.mu.Lock()
	defer x.mu.Unlock()
	e.verified = verified
}

func (x *index) isVerified(e *entry) bool {
	x.mu.Lock()
	defer x.mu.Unlock()
	return e.verified
}

// unpin undoes one pin of e and reports whether its file is now to be removed.
func (x *index) unpin(e *entry) bool {
	x.mu.Lock()
	defer x.mu.Unlock()
	e.pins--
	x.settle(e)
	return e.doomed && e.pins == 0
}

// doom makes e absent.
func (x *index) doom(e *entry) {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.unlink(e)
	e.doomed = true
}

// doomOldest makes the entry absent that was used least recently, and returns it; nil if all are in use.
func (x *index) doomOldest() *entry {
	x.mu.Lock()
	defer x.mu.Unlock()
	e := x.lru.prev
	if e == nil || e == &x.lru {
		return nil
	}
	x.unlink(e)
	e.doomed = true
	return e
}

// spare undoes doomOldest.
func (x *index) spare(e *entry) {
	x.mu.Lock()
	defer x.mu.Unlock()
	if e.doomed {
		e.doomed = false
		x.settle(e)
	}
}

// isDoomed reports whether the file of e is to be removed now: it is still doomed, and not pinned.
func (x *index) isDoomed(e *entry) bool {
	x.mu.Lock()
	defer x.mu.Unlock()
	return x.entries[e.key] == e && e.doomed && e.pins == 0
}

// remove forgets e, which is doomed, and frees its bytes.
func (x *index) remove(e *entry) {
	x.mu.Lock()
	defer x.mu.Unlock()
	delete(x.entries, e.key)
	x.bytes -= e.charge
	x.count[e.key.kind]--
}

func (x *index) stats() Stats {
	x.mu.Lock()
	defer x.mu.Unlock()
	return Stats{Blobs: x.count[blob], Results: x.count[result], Bytes: x.bytes, MaxBytes: x.max}
}

// settle puts e at the front of the ring, unless it may not be evicted. The caller holds mu.
func (x *index) settle(e *entry) {
	if e.pins > 0 || e.doomed || e.next != nil {
		return
	}
	r := &x.lru
	if r.next == nil {
		r.next, r.prev = r, r
	}
	e.prev, e.next = r, r.next
	e.prev.next, e.next.prev = e, e
}

// unlink takes e out of the ring, if it is there. The caller holds mu.
func (x *index) unlink(e *entry) {
	if e.next != nil {
		e.prev.next, e.next.prev = e.next, e.prev
		e.prev, e.next = nil, nil
	}
}

// snapshot returns the charges of all entries.
func (x *index) snapshot() map[key]int64 {
	x.mu.Lock()
	defer x.mu.Unlock()
	m := make(map[key]int64, len(x.entries))
	for k, e := range x.entries {
		m[k] = e.charge
	}
	return m
}
