// SPDX-License-Identifier: Apache-2.0

package overlay

import (
	"errors"
	"sync"

	"github.com/cloister-build/cloister/cas"
)

// maxDoubts is how many blobs of each kind are remembered.
const maxDoubts = 1 << 16

// doubts are the blobs that Missing calls absent whatever near and far say of them, so that somebody puts them
// again. They are forgotten with the process.
type doubts struct {
	mu     sync.Mutex
	unsent map[key]bool // near has them, and the write far failed: not under Back, whose journal knows them
	full   bool         // there were more of unsent than fit
	unread map[key]bool // far was asked for them in vain; any of them is forgotten for a new one
}

// sent notes how it ended that blobs were written far.
func (s *store) sent(d cas.Digest, err error) {
	if s.o.config.Policy == Back {
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
		o.full = true
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

// doubted returns those of ds, of which near lacks absent, that are to be put again; all says that only far knows
// of the others.
func (s *store) doubted(ds, absent []cas.Digest) (again map[cas.Digest]bool, all bool) {
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
	return again, o.full
}
