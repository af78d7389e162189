// SPDX-License-Identifier: Apache-2.0

package index

import (
	"encoding/binary"
	"maps"
	"math/rand/v2"
	"reflect"
	"sync"
	"testing"

	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
)

func key(n uint64) (k Key) {
	random := rand.New(rand.NewPCG(n, 1))
	for i := range k.Hash {
		k.Hash[i] = byte(random.Uint32())
	}
	k.Hash[0] = byte(n % 3) // few parts, so that they grow
	k.Size, k.Instance, k.Kind = int64(n), uint16(n%2), Kind(n%5)
	return k
}

// TestIndexIsAMap compares random operations with those on a map.
func TestIndexIsAMap(t *testing.T) {
	x, want := New(), map[Key]Entry{}
	random := rand.New(rand.NewPCG(1, 2))
	for i := range 60_000 {
		k := key(uint64(random.IntN(3000)))
		e := Entry{
			Key: k, Position: Position{uint32(i), random.Uint32()}, Offset: random.Uint32(), Length: random.Uint32(), Stamp: uint32(i),
			File: i%2 == 0, Verified: i%3 == 0,
		}
		old, there := want[k]
		switch random.IntN(6) {
		case 5:
			// Some of them are there, and some twice.
			var all []Entry
			for range 1 + random.IntN(20) {
				e.Key = key(uint64(random.IntN(3000)))
				all = append(all, e)
			}
			added := map[Key]int{}
			for _, e := range all {
				added[e.Key]++
			}
			for _, e := range x.AddAll(all) {
				added[e.Key]--
			}
			for k, n := range added {
				if _, there := want[k]; there == (n == 1) || n < 0 || n > 1 {
					t.Fatalf("AddAll added %d times one that was there: %v", n, there)
				}
				if n == 1 {
					e.Key = k
					want[k] = e
				}
			}
			if i%100 == 0 {
				x.Reserve(len(want) + 500)
			}
		case 0:
			if got, replaced := x.Put(e); replaced != there || got != old {
				t.Fatalf("Put gave %v, %v, want %v, %v", got, replaced, old, there)
			}
			want[k] = e
		case 1:
			if added := x.Add(&e); added == there {
				t.Fatalf("Add gave %v of one that is there: %v", added, there)
			}
			if !there {
				want[k] = e
			}
		case 2:
			if got := x.Update(k, func(now *Entry) {
				must.Be(t, *now == old, "Update told of %v, want %v", *now, old)
				*now = e
				now.Key = Key{} // it keeps its own
			}); got != there {
				t.Fatalf("Update gave %v of one that is there: %v", got, there)
			}
			if there {
				want[k] = e
			}
		case 3:
			permit := i%4 > 0
			if got, removed := x.Remove(k, func(*Entry) bool { return permit }); removed != (there && permit) ||
				removed && got != old {
				t.Fatalf("Remove gave %v, %v of %v", got, removed, old)
			}
			if permit {
				delete(want, k)
			}
		case 4:
			if got, ok := x.Get(k); ok != there || got != old {
				t.Fatalf("Get gave %v, %v, want %v, %v", got, ok, old, there)
			}
		}
		must.Be(t, x.Len() == len(want), "after %d steps %d entries, want %d", i, x.Len(), len(want))
	}
	got := map[Key]Entry{}
	x.Each(func(e *Entry) bool { got[e.Key] = *e; return true })
	expect.That(t, maps.Equal(got, want) && len(want) >= 1000, "Each: got %d entries, want %d", len(got), len(want))
	n := 0
	x.Each(func(*Entry) bool { n++; return n < 10 })
	expect.That(t, n == 10, "Each visited %d entries, want it to stop at 10", n)
}

func TestKeyFieldsAreSignificant(t *testing.T) {
	x := New()
	k := key(7)
	x.Put(Entry{Key: k})
	others := []Key{k, k, k, k, k}
	others[0].Hash[31]++
	others[1].Size++
	others[2].Instance++
	others[3].Kind++
	others[4].Hash[0]++
	for i, other := range others {
		if _, ok := x.Get(other); ok {
			t.Errorf("key %d is confused with another", i)
		}
	}
}

// TestSimilarKeys: a client may choose keys that differ only in their size.
func TestSimilarKeys(t *testing.T) {
	x := New()
	const n = 2000
	for i := range int64(n) {
		x.Put(Entry{Key: Key{Size: i}, Stamp: uint32(i)})
	}
	for i := range int64(n) {
		if i%2 == 0 {
			x.Remove(Key{Size: i}, func(*Entry) bool { return true })
		}
	}
	for i := range int64(n) {
		if e, ok := x.Get(Key{Size: i}); ok != (i%2 == 1) || ok && e.Stamp != uint32(i) {
			t.Fatalf("key %d: got %v, %v", i, e, ok)
		}
	}
}

// TestKeysAreSpread: similar keys are spread evenly and unpredictably over shards and buckets.
func TestKeysAreSpread(t *testing.T) {
	const n, mean = 64_000, 64_000 / shards
	x, other := New(), New()
	for name, differ := range map[string]func(k *Key, i uint32){
		"first bytes of the hash": func(k *Key, i uint32) { binary.LittleEndian.PutUint32(k.Hash[:], i) },
		"bytes 4 to 7":            func(k *Key, i uint32) { binary.LittleEndian.PutUint32(k.Hash[4:], i) },
		"bytes 8 to 11":           func(k *Key, i uint32) { binary.LittleEndian.PutUint32(k.Hash[8:], i) },
		"last bytes of the hash":  func(k *Key, i uint32) { binary.LittleEndian.PutUint32(k.Hash[28:], i) },
		"size":                    func(k *Key, i uint32) { k.Size = int64(i) },
		"kind and instance":       func(k *Key, i uint32) { k.Kind, k.Instance = Kind(i), uint16(i>>8) },
	} {
		perShard, buckets := map[*shard]int{}, map[uint32]bool{}
		most, same := 0, 0
		for i := range uint32(n) {
			var k Key
			differ(&k, i)
			s, h := x.locate(&k)
			perShard[s]++
			most = max(most, perShard[s])
			bucket, _ := home(h, 1<<16)
			buckets[bucket] = true
			if _, again := other.locate(&k); h == again {
				same++
			}
		}
		expect.That(t, most <= 2*mean, "%d keys that differ in %s: %d are in one shard", n, name, most)
		expect.That(t, len(buckets) >= n/2, "%d keys that differ in %s: got %d buckets", n, name, len(buckets))
		expect.That(t, same <= 10,
			"%d of %d keys that differ in %s have the same hash in another index", same, n, name)
	}
}

func TestConcurrentUse(t *testing.T) {
	x := New()
	var wg sync.WaitGroup
	for w := range 8 {
		wg.Go(func() {
			for i := range 3000 {
				k := key(uint64(i % 100))
				switch (i + w) % 4 {
				case 0:
					x.Put(Entry{Key: k, Stamp: uint32(i)})
				case 1:
					x.Update(k, func(e *Entry) { e.Stamp++ })
				case 2:
					x.Remove(k, func(e *Entry) bool { return e.Stamp%2 == 0 })
				case 3:
					if e, ok := x.Get(k); ok && e.Key != k {
						t.Errorf("got the entry of another key")
					}
				}
			}
			x.Each(func(*Entry) bool { return true })
		})
	}
	wg.Wait()
}

// TestSlotIsSmall: there may be millions of entries.
func TestSlotIsSmall(t *testing.T) {
	expect.Equal(t, reflect.TypeFor[slot]().Size(), 64, "bytes")
}
