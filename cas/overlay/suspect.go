// SPDX-License-Identifier: Apache-2.0

package overlay

import (
	"errors"
	"hash/maphash"
	"sync"

	"github.com/cloister-build/cloister/cas"
)

const (
	maxDoubts = 1 << 16 // blobs of each kind that are remembered
	places    = 1 << 22 // bytes that remember roughly those of unsent that do not fit
)

// doubts are the blobs that Missing calls absent whatever near and far say of them, so that somebody puts them
// again. They are forgotten with the process.
type doubts struct {
	mu     sync.Mutex
	unsent map[key]bool // near has them, and the write far failed: not under Back, whose journal knows them
	unread map[key]bool // far was asked for them in vain; any of them is forgotten for a new one

	// spilled marks, by their hashes, those of unsent that did not fit; it is nil until there is one. Blobs share
	// places, so no mark is ever taken away: it says no more than that far is to be asked.
	spilled []bool
	seed    maphash.Seed
}

func newDoubts() doubts {
	return doubts{unsent: map[key]bool{}, unread: map[key]bool{}, seed: maphash.MakeSeed()}
}

// place returns the mark of k. The caller holds o.mu, and spilled is not nil.
func (o *doubts) place(k key) *bool { return &o.spilled[maphash.Comparable(o.seed, k)%places] }

// sent notes how it ended that blobs were written far.
func (s *store) sent(d cas.Digest, err error) {
	if s.o.config.Policy == WriteBack {
		return
	}
	o := &s.o.doubts
	o.mu.Lock()
	defer o.mu.Unlock()
	switch k := (key{s.name, d}); {
	case err == nil:
		delete(o.unsent, k)
	case len(o.unsent) < maxDoubts:
		o.unsent[k] = true
	default:
		if o.spilled == nil {
			o.spilled = make([]bool, places)
		}
		*o.place(k) = true
	}
}

// brought notes how it ended that a blob was asked of far.
func (s *store) brought(d cas.Digest, err error) {
	o := &s.o.doubts
	o.mu.Lock()
	defer o.mu.Unlock()
	k := key{s.name, d}
	switch {
	case err == nil:
		delete(o.unread, k)
	case errors.Is(err, cas.ErrNotFound), errors.Is(err, cas.ErrCorrupt):
		for old := range o.unread {
			if len(o.unread) < maxDoubts {
				break
			}
			delete(o.unread, old)
		}
		o.unread[k] = true
	}
}

// doubted returns those of ds, of which near lacks absent, that are to be put again, and in order those that far is
// to be asked for.
func (s *store) doubted(ds, absent []cas.Digest) (again map[cas.Digest]bool, ask []cas.Digest) {
	o := &s.o.doubts
	o.mu.Lock()
	defer o.mu.Unlock()
	again = map[cas.Digest]bool{}
	add := func(marked map[key]bool, ds []cas.Digest) {
		if len(marked) == 0 {
			return
		}
		for _, d := range ds {
			if marked[key{s.name, d}] {
				again[d] = true
			}
		}
	}
	add(o.unsent, ds)
	add(o.unread, absent)
	if o.spilled == nil {
		return again, absent
	}
	lacked := map[cas.Digest]bool{}
	for _, d := range absent {
		lacked[d] = true
	}
	for _, d := range ds {
		if lacked[d] || *o.place(key{s.name, d}) {
			ask = append(ask, d)
		}
	}
	return again, ask
}
