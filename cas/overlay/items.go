// SPDX-License-Identifier: Apache-2.0

package overlay

import (
	"hash/maphash"
	"time"
)

// An item is a pending entry.
type item struct {
	entry
	hash    uint64        // of the entry
	next    *item         // another item with this hash, or nil
	since   time.Time     // when it was first added
	addedAt uint64        // the clock when it was last added
	delay   time.Duration // of the next attempt, after the upstream rejected the previous one
	until   time.Time     // end of the delay
	removed bool
}

// items is a set of items, indexed by hashes of their entries. A map with entries as keys would take more time than the
// rest of add.
type items struct {
	seed   maphash.Seed
	byHash map[uint64]*item
	n      int
}

func newItems() items { return items{seed: maphash.MakeSeed(), byHash: map[uint64]*item{}} }

// newItem returns an item without adding it to t.
func (t *items) newItem(e entry, since time.Time) item {
	return item{entry: e, hash: maphash.Comparable(t.seed, e), since: since}
}

// get returns the item of e, or nil.
func (t *items) get(e entry) *item { return t.byHash[maphash.Comparable(t.seed, e)].find(e) }

// find returns the item of e among i and those after it, or nil.
func (i *item) find(e entry) *item {
	for i != nil && i.entry != e {
		i = i.next
	}
	return i
}

// add adds i, or returns the item of t that has the same entry.
func (t *items) add(i *item) (old *item) {
	first := t.byHash[i.hash]
	if old = first.find(i.entry); old == nil {
		i.next, t.byHash[i.hash] = first, i
		t.n++
	}
	return old
}

// remove removes i, which is in t.
func (t *items) remove(i *item) {
	first := t.byHash[i.hash]
	at := &first
	for *at != i {
		at = &(*at).next
	}
	*at, i.next = i.next, nil
	if t.byHash[i.hash] = first; first == nil {
		delete(t.byHash, i.hash)
	}
	t.n--
}
