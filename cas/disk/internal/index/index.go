// SPDX-License-Identifier: Apache-2.0

// Package index is the table in memory of all that a store holds: what, where, and when it was used last. It
// touches no file and decides nothing about eviction.
//
// An entry takes 64 bytes without a pointer, so that millions cost the garbage collector nothing, and 5 to 11
// bytes more in the slots by which it is found.
package index

import (
	"encoding/binary"
	"hash/maphash"
	"sync"
)

// A Kind is what an entry stands for, together with its digest function: other kinds are other keys.
type Kind uint8

// A Key names an entry. It is comparable.
type Key struct {
	Hash     [32]byte // shorter ones are padded with zeros
	Size     int64    // of the digest, in bytes
	Instance uint16
	Kind     Kind
}

// A Position is where an entry was written. No two entries have the same.
type Position struct {
	Segment uint32
	Record  uint32 // in the log of the segment, in its units
}

// An Entry is what the index knows of a key.
type Entry struct {
	Key
	Position
	Offset   uint32 // in the data of the segment, in blocks; not of a file
	Length   uint32 // bytes in the data of the segment; not of a file
	Stamp    uint32 // when it was used last, in seconds since 1970, as coarsely as its log says it
	File     bool   // it is a file of its own
	Verified bool   // this process wrote it, or has read it whole and found it to be what its key says
}

// slot is Entry as it is kept: 64 bytes.
type slot struct {
	hash                                   [32]byte
	size                                   int64
	segment, record, offset, length, stamp uint32
	instance                               uint16
	kind                                   Kind
	flags                                  uint8
}

const (
	used uint8 = 1 << iota
	file
	verified
)

func (s *slot) entry() Entry {
	return Entry{
		Key:      Key{s.hash, s.size, s.instance, s.kind},
		Position: Position{s.segment, s.record},
		Offset:   s.offset, Length: s.length, Stamp: s.stamp,
		File: s.flags&file != 0, Verified: s.flags&verified != 0,
	}
}

func (s *slot) set(e *Entry) {
	*s = slot{e.Hash, e.Size, e.Segment, e.Record, e.Offset, e.Length, e.Stamp, e.Instance, e.Kind, used}
	if e.File {
		s.flags |= file
	}
	if e.Verified {
		s.flags |= verified
	}
}

func (s *slot) is(k *Key) bool {
	return s.hash == k.Hash && s.size == k.Size && s.instance == k.Instance && s.kind == k.Kind
}

const (
	shards    = 256
	chunkSize = 256 // slots that are allocated at once
)

// An Index is a set of entries by key. It is safe for concurrent use; New makes it.
type Index struct {
	seed   maphash.Seed
	shards [shards]shard
}

// A shard is a part of an index. A client chooses the hashes of keys, but not in which shard they are, or where in it:
// that is for a hash of them to say, whose seed it does not know.
type shard struct {
	mu     sync.Mutex
	table  []place            // guarded by mu; open addressing
	chunks []*[chunkSize]slot // guarded by mu
	free   []uint32           // guarded by mu; numbers of slots that hold nothing
	n      int                // guarded by mu; entries
}

// A place in the table is free, or has the number of a slot, from 1, in its lower 24 bits. The upper 8 are bits of the
// hash, so that few slots are looked at in vain: to look at one is to wait for memory.
type place uint32

const maxSlots = 1<<24 - 1 // in a shard: four billion in all

func (p place) slot() uint32 { return uint32(p) & maxSlots }

// New returns an empty Index.
func New() *Index { return &Index{seed: maphash.MakeSeed()} }

// locate returns the shard of k, and the bits that say where in it k is.
func (x *Index) locate(k *Key) (*shard, uint64) {
	h := x.hash(&k.Hash, k.Size, k.Instance, k.Kind)
	return &x.shards[h%shards], h
}

// hash returns the bits of a key. All of it counts: a client may choose any part.
func (x *Index) hash(hash *[32]byte, size int64, instance uint16, kind Kind) uint64 {
	var b [32 + 8 + 2 + 1]byte
	copy(b[:], hash[:])
	binary.LittleEndian.PutUint64(b[32:], uint64(size))
	binary.LittleEndian.PutUint16(b[40:], instance)
	b[42] = byte(kind)
	return maphash.Bytes(x.seed, b[:])
}

// home returns where the search for the bits h begins in a table of a power of two, and those of them in a place.
func home(h uint64, places int) (at uint32, tag place) {
	return uint32(h>>32) & uint32(places-1), place(h>>8) << 24
}

func (s *shard) slot(n uint32) *slot { return &s.chunks[(n-1)/chunkSize][(n-1)%chunkSize] }

// find returns where in the table k, with the bits h, is, and its slot, or where it would go and nil. The table has a
// free place.
func (s *shard) find(k *Key, h uint64) (at uint32, tag place, found *slot) {
	mask := uint32(len(s.table) - 1)
	at, tag = home(h, len(s.table))
	for ; ; at = (at + 1) & mask {
		p := s.table[at]
		if p == 0 {
			return at, tag, nil
		}
		if p&^maxSlots == tag {
			if found = s.slot(p.slot()); found.is(k) {
				return at, tag, found
			}
		}
	}
}

// get returns the slot of k, or nil. The caller holds s.mu.
func (s *shard) get(k *Key, h uint64) *slot {
	if s.n == 0 {
		return nil
	}
	_, _, found := s.find(k, h)
	return found
}

// Get returns the entry of k; ok is false if there is none.
func (x *Index) Get(k Key) (e Entry, ok bool) {
	s, h := x.locate(&k)
	s.mu.Lock()
	defer s.mu.Unlock()
	if p := s.get(&k, h); p != nil {
		return p.entry(), true
	}
	return Entry{}, false
}

// Put adds e, or puts it in the place of the entry of the same key, which it returns.
func (x *Index) Put(e Entry) (old Entry, replaced bool) {
	s, h := x.locate(&e.Key)
	s.mu.Lock()
	defer s.mu.Unlock()
	if p := s.get(&e.Key, h); p != nil {
		old = p.entry()
		p.set(&e)
		return old, true
	}
	x.insert(s, &e, h)
	return Entry{}, false
}

// Add adds e unless there is an entry of the same key, and reports whether it did.
func (x *Index) Add(e *Entry) bool {
	s, h := x.locate(&e.Key)
	s.mu.Lock()
	defer s.mu.Unlock()
	return x.add(s, e, h)
}

func (x *Index) add(s *shard, e *Entry, h uint64) bool {
	if s.get(&e.Key, h) != nil {
		return false
	}
	x.insert(s, e, h)
	return true
}

// AddAll is Add of each of es, at most 65,536, in any order, and returns those that it did not add. It is faster than
// Add of one after the other.
func (x *Index) AddAll(es []Entry) (present []Entry) {
	// By shards, so that what is looked at is near to what was just looked at.
	bits := make([]uint64, len(es))
	var ends [shards + 1]int
	for i := range es {
		_, bits[i] = x.locate(&es[i].Key)
		ends[bits[i]%shards+1]++
	}
	for i := range shards {
		ends[i+1] += ends[i]
	}
	order := make([]uint16, len(es))
	next := ends
	for i := range es {
		n := bits[i] % shards
		order[next[n]] = uint16(i)
		next[n]++
	}
	for i := range x.shards {
		if ends[i] == ends[i+1] {
			continue
		}
		s := &x.shards[i]
		s.mu.Lock()
		for _, n := range order[ends[i]:ends[i+1]] {
			if !x.add(s, &es[n], bits[n]) {
				present = append(present, es[n])
			}
		}
		s.mu.Unlock()
	}
	return present
}

// Update calls change with the entry of k, and keeps what it makes of all but its key. It reports whether there
// is one. Change must be short, and not use the index.
func (x *Index) Update(k Key, change func(*Entry)) bool {
	s, h := x.locate(&k)
	s.mu.Lock()
	defer s.mu.Unlock()
	p := s.get(&k, h)
	if p == nil {
		return false
	}
	e := p.entry()
	change(&e)
	e.Key = k
	p.set(&e)
	return true
}

// Remove removes the entry of k if permit says so of it, and returns it. Permit must be short, and not use the
// index.
func (x *Index) Remove(k Key, permit func(*Entry) bool) (e Entry, removed bool) {
	s, h := x.locate(&k)
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.n == 0 {
		return Entry{}, false
	}
	at, _, found := s.find(&k, h)
	if found == nil {
		return Entry{}, false
	}
	e = found.entry()
	if !permit(&e) {
		return Entry{}, false
	}
	*found = slot{}
	s.free = append(s.free, s.table[at].slot())
	s.n--
	x.close(s, at)
	return e, true
}

// close takes the place at out of the table and moves those behind it up, so that no search ends early.
func (x *Index) close(s *shard, at uint32) {
	mask := uint32(len(s.table) - 1)
	for next := (at + 1) & mask; s.table[next] != 0; next = (next + 1) & mask {
		home, _ := x.homeOf(s, s.table[next], len(s.table))
		// It may move to at if its home does not lie between, cyclically.
		if (next-home)&mask >= (next-at)&mask {
			s.table[at] = s.table[next]
			at = next
		}
	}
	s.table[at] = 0
}

// homeOf returns home of what is at p.
func (x *Index) homeOf(s *shard, p place, places int) (at uint32, tag place) {
	e := s.slot(p.slot())
	return home(x.hash(&e.hash, e.size, e.instance, e.kind), places)
}

// insert adds e, whose key, with the bits h, is absent. The caller holds s.mu.
func (x *Index) insert(s *shard, e *Entry, h uint64) {
	if 4*(s.n+1) > 3*len(s.table) {
		x.resize(s, max(16, 2*len(s.table)))
	}
	var n uint32
	if last := len(s.free) - 1; last >= 0 {
		n, s.free = s.free[last], s.free[:last]
	} else {
		first := uint32(len(s.chunks) * chunkSize)
		s.chunks = append(s.chunks, new([chunkSize]slot))
		for i := uint32(chunkSize); i > 1; i-- {
			s.free = append(s.free, first+i)
		}
		n = first + 1
	}
	s.slot(n).set(e)
	at, tag, _ := s.find(&e.Key, h)
	s.table[at] = tag | place(n)
	s.n++
}

// resize gives the table another number of places, a power of two. The caller holds s.mu.
func (x *Index) resize(s *shard, places int) {
	old := s.table
	s.table = make([]place, places)
	mask := uint32(places - 1)
	for _, p := range old {
		if p == 0 {
			continue
		}
		at, tag := x.homeOf(s, p, places)
		for s.table[at] != 0 {
			at = (at + 1) & mask
		}
		s.table[at] = tag | place(p.slot())
	}
}

// Each calls visit with every entry that is there all the while, and perhaps with others, until visit returns
// false. Visit must be short, and not use the index.
func (x *Index) Each(visit func(*Entry) bool) {
	for i := range x.shards {
		if !x.shards[i].each(visit) {
			return
		}
	}
}

func (s *shard) each(visit func(*Entry) bool) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, c := range s.chunks {
		for i := range c {
			if c[i].flags&used == 0 {
				continue
			}
			if e := c[i].entry(); !visit(&e) {
				return false
			}
		}
	}
	return true
}

// Reserve makes room for n entries, so that they can be added without growing.
func (x *Index) Reserve(n int) {
	places := 16
	for 3*places < 4*(n/shards+n/shards/8) {
		places *= 2
	}
	for i := range x.shards {
		s := &x.shards[i]
		s.mu.Lock()
		if places > len(s.table) {
			x.resize(s, places)
		}
		s.mu.Unlock()
	}
}

// Len returns the number of entries.
func (x *Index) Len() int {
	n := 0
	for i := range x.shards {
		s := &x.shards[i]
		s.mu.Lock()
		n += s.n
		s.mu.Unlock()
	}
	return n
}
