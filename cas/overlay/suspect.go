// SPDX-License-Identifier: Apache-2.0

package overlay

import (
	"errors"
	"hash/maphash"
	"sync"

	"github.com/cloister-build/cloister/cas"
)

const (
	maxSuspects = 1 << 16 // blobs in each map
	filterSize  = 1 << 22 // bytes of the filter for further unsent blobs
)

// suspects are the blobs that Missing reports as absent whatever the stores claim, so that a client puts them again.
// They are in memory only.
type suspects struct {
	mu     sync.Mutex
	unsent map[key]bool // local, but the write to the upstream failed; unused with WriteBack, whose journal has them
	unread map[key]bool // the upstream failed to deliver them; a new one may replace any of them

	// overflow is a filter, by hash, of unsent blobs beyond maxSuspects, or nil. Blobs share its bytes, so none is ever
	// cleared: a set byte only means that the upstream must be queried.
	overflow []bool
	seed     maphash.Seed
}

func newSuspects() suspects {
	return suspects{unsent: map[key]bool{}, unread: map[key]bool{}, seed: maphash.MakeSeed()}
}

// inOverflow returns the filter entry of k. The caller holds mu, and overflow is not nil.
func (u *suspects) inOverflow(k key) *bool {
	return &u.overflow[maphash.Comparable(u.seed, k)%filterSize]
}

// recordSend records the result of writing d to the upstream.
func (s *store) recordSend(d cas.Digest, err error) {
	if s.o.config.Policy == WriteBack {
		return
	}
	u := &s.o.suspect
	u.mu.Lock()
	defer u.mu.Unlock()
	switch k := (key{s.name, d}); {
	case err == nil:
		delete(u.unsent, k)
	case len(u.unsent) < maxSuspects:
		u.unsent[k] = true
	default:
		if u.overflow == nil {
			u.overflow = make([]bool, filterSize)
		}
		*u.inOverflow(k) = true
	}
}

// recordFetch records the result of reading d from the upstream.
func (s *store) recordFetch(d cas.Digest, err error) {
	u := &s.o.suspect
	u.mu.Lock()
	defer u.mu.Unlock()
	k := key{s.name, d}
	switch {
	case err == nil:
		delete(u.unread, k)
	case errors.Is(err, cas.ErrNotFound), errors.Is(err, cas.ErrCorrupt):
		for old := range u.unread {
			if len(u.unread) < maxSuspects {
				break
			}
			delete(u.unread, old)
		}
		u.unread[k] = true
	}
}

// classify returns the suspect blobs of ds, of which absent are not local, and in order the blobs for which the
// upstream must be queried.
func (s *store) classify(ds, absent []cas.Digest) (suspect map[cas.Digest]bool, query []cas.Digest) {
	u := &s.o.suspect
	u.mu.Lock()
	defer u.mu.Unlock()
	suspect = map[cas.Digest]bool{}
	add := func(marked map[key]bool, ds []cas.Digest) {
		if len(marked) == 0 {
			return
		}
		for _, d := range ds {
			if marked[key{s.name, d}] {
				suspect[d] = true
			}
		}
	}
	add(u.unsent, ds)
	add(u.unread, absent)
	if u.overflow == nil {
		return suspect, absent
	}
	isAbsent := map[cas.Digest]bool{}
	for _, d := range absent {
		isAbsent[d] = true
	}
	for _, d := range ds {
		if isAbsent[d] || *u.inOverflow(key{s.name, d}) {
			query = append(query, d)
		}
	}
	return suspect, query
}
