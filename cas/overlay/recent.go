// SPDX-License-Identifier: Apache-2.0

package overlay

import (
	"sync"
	"time"

	"github.com/cloister-build/cloister/cas"
)

const (
	recentTime = 5 * time.Minute
	maxRecent  = 1 << 13 // blobs of a generation
)

// recent are blobs that the upstream has received in the last minutes. A result usually follows its blobs, so that no
// query for them is needed.
type recent struct {
	mu       sync.Mutex
	now, old map[key]time.Time // guarded by mu; two generations
}

// add records that the upstream has received k.
func (r *recent) add(k key) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.now == nil || len(r.now) >= maxRecent {
		r.now, r.old = make(map[key]time.Time), r.now
	}
	r.now[k] = time.Now()
}

// forget removes k, which the upstream has lost.
func (r *recent) forget(k key) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.now, k)
	delete(r.old, k)
}

// without returns the blobs of ds that are not recent.
func (r *recent) without(instance string, ds []cas.Digest) []cas.Digest {
	r.mu.Lock()
	defer r.mu.Unlock()
	found := map[cas.Digest]bool{}
	for _, d := range ds {
		k := key{instance, d}
		at, ok := r.now[k]
		if !ok {
			at = r.old[k]
		}
		if time.Since(at) < recentTime {
			found[d] = true
		}
	}
	return without(ds, found)
}
