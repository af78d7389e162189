// SPDX-License-Identifier: Apache-2.0

// Package index is the in-memory table of a store's entries: their keys, positions and last uses. It reads no files and
// does not evict.
//
// An entry takes 64 bytes, without pointers so that millions of them cost the garbage collector nothing, and 5 to 11
// bytes in the hash table.
package index

import (
	"encoding/binary"
	"hash/maphash"
	"sync"
)

// A Kind is the type of an entry and its digest function.
type Kind uint8

// A Key identifies an entry. It is comparable.
type Key struct {
	Hash     [32]byte // padded with zeros
	Size     int64    // of the digest, in bytes
	Instance uint16
	Kind     Kind
}

// A Position is where the record of an entry is. It identifies the entry, too.
type Position struct {
	Segment uint32
	Record  uint32 // offset in the log, in units
}

// An Entry is the value of a key.
type Entry struct {
	Key
	Position
	Offset   uint32 // in the data of the segment, in blocks; unused if File
	Length   uint32 // bytes in the data of the segment; unused if File
	Stamp    uint32 // last use in seconds since 1970, with the precision of the log
	File     bool   // the content is a separate file
	Verified bool   // this process wrote the content, or read it and found that it matches the key
}

// slot is the compact form of Entry: 64 bytes.
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
	chunkSize = 256 // slots allocated together
)

// An Index maps keys to entries. It is safe for concurrent use. Create one with New.
type Index struct {
	seed   maphash.Seed
	shards [shards]shard
}

// A shard is a part of an index. Clients choose the hashes in keys, but cannot make keys collide: shard and bucket
// depend on a second hash with a secret seed.
type shard struct {
	mu     sync.Mutex
	table  []bucket           // guarded by mu; open addressing
	chunks []*[chunkSize]slot // guarded by mu
	free   []uint32           // guarded by mu; numbers of unused slots
	n      int                // guarded by mu; entries
}

// A bucket is 0 if free, or has the number of a slot, counted from 1, in its lower 24 bits. The upper 8 bits are a tag
// from the hash of the key, which avoids most useless accesses to slots: each is a cache miss.
type bucket uint32

const maxSlots = 1<<24 - 1 // per shard, four billion in total

func (p bucket) slot() uint32 { return uint32(p) & maxSlots }

// New returns an empty Index.
func New() *Index { return &Index{seed: maphash.MakeSeed()} }

// locate returns the shard and the hash of k.
func (x *Index) locate(k *Key) (*shard, uint64) {
	h := x.hash(&k.Hash, k.Size, k.Instance, k.Kind)
	return &x.shards[h%shards], h
}

// hash returns the hash of a key. It covers all fields, since clients choose them.
func (x *Index) hash(hash *[32]byte, size int64, instance uint16, kind Kind) uint64 {
	var b [32 + 8 + 2 + 1]byte
	copy(b[:], hash[:])
	binary.LittleEndian.PutUint64(b[32:], uint64(size))
	binary.LittleEndian.PutUint16(b[40:], instance)
	b[42] = byte(kind)
	return maphash.Bytes(x.seed, b[:])
}

// home returns the first bucket to search for hash h in a table of size buckets, a power of two, and the tag of h.
func home(h uint64, size int) (at uint32, tag bucket) {
	return uint32(h>>32) & uint32(size-1), bucket(h>>8) << 24
}

func (s *shard) slot(n uint32) *slot { return &s.chunks[(n-1)/chunkSize][(n-1)%chunkSize] }

// find returns the bucket and slot of k, which has hash h, or the bucket to use for it and nil. The table has a free
// bucket.
func (s *shard) find(k *Key, h uint64) (at uint32, tag bucket, found *slot) {
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

// Get returns the entry of k.
func (x *Index) Get(k Key) (e Entry, ok bool) {
	s, h := x.locate(&k)
	s.mu.Lock()
	defer s.mu.Unlock()
	if p := s.get(&k, h); p != nil {
		return p.entry(), true
	}
	return Entry{}, false
}

// Put adds e. If its key has an entry, Put replaces and returns it.
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

// Add adds e unless its key has an entry, and reports whether it did.
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

// AddAll calls Add for es, at most 65,536 entries, in any order and returns those it did not add. It is faster than a
// loop.
func (x *Index) AddAll(es []Entry) (present []Entry) {
	// A counting sort by shard, for locality.
	hashes := make([]uint64, len(es))
	var ends [shards + 1]int
	for i := range es {
		_, hashes[i] = x.locate(&es[i].Key)
		ends[hashes[i]%shards+1]++
	}
	for i := range shards {
		ends[i+1] += ends[i]
	}
	order := make([]uint16, len(es))
	next := ends
	for i := range es {
		n := hashes[i] % shards
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
			if !x.add(s, &es[n], hashes[n]) {
				present = append(present, es[n])
			}
		}
		s.mu.Unlock()
	}
	return present
}

// Update calls change with the entry of k, if it exists, and stores the result except for the key. It reports whether
// it exists. Change must be fast and must not use the index.
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

// Remove removes and returns the entry of k if permit returns true for it. Permit must be fast and must not use the
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

// close frees bucket at and moves later buckets up, so that no search ends early.
func (x *Index) close(s *shard, at uint32) {
	mask := uint32(len(s.table) - 1)
	for next := (at + 1) & mask; s.table[next] != 0; next = (next + 1) & mask {
		home, _ := x.homeOf(s, s.table[next], len(s.table))
		// It may move to at unless its home is between the two, cyclically.
		if (next-home)&mask >= (next-at)&mask {
			s.table[at] = s.table[next]
			at = next
		}
	}
	s.table[at] = 0
}

// homeOf returns home for the key in bucket p.
func (x *Index) homeOf(s *shard, p bucket, size int) (at uint32, tag bucket) {
	e := s.slot(p.slot())
	return home(x.hash(&e.hash, e.size, e.instance, e.kind), size)
}

// insert adds e, whose key is absent and has hash h. The caller holds s.mu.
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
	s.table[at] = tag | bucket(n)
	s.n++
}

// resize changes the number of buckets to size, a power of two. The caller holds s.mu.
func (x *Index) resize(s *shard, size int) {
	old := s.table
	s.table = make([]bucket, size)
	mask := uint32(size - 1)
	for _, p := range old {
		if p == 0 {
			continue
		}
		at, tag := x.homeOf(s, p, size)
		for s.table[at] != 0 {
			at = (at + 1) & mask
		}
		s.table[at] = tag | bucket(p.slot())
	}
}

// Each calls visit with every entry, until visit returns false. It may miss or include entries that are added or
// removed meanwhile. Visit must be fast and must not use the index.
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

// Reserve grows the tables for n entries.
func (x *Index) Reserve(n int) {
	size := 16
	for 3*size < 4*(n/shards+n/shards/8) {
		size *= 2
	}
	for i := range x.shards {
		s := &x.shards[i]
		s.mu.Lock()
		if size > len(s.table) {
			x.resize(s, size)
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
