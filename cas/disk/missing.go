// SPDX-License-Identifier: Apache-2.0

package disk

import (
	"context"
	"time"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/disk/internal/index"
)

// Missing implements cas.Store. It only reads the disk for chunk lists.
func (s *Store) Missing(ctx context.Context, ds []cas.Digest) ([]cas.Digest, error) {
	end, err := s.cache.beginWith(ctx)
	if err != nil {
		return nil, err
	}
	defer end()
	missing := s.absent(ds)
	kept := missing[:0]
	for _, d := range missing {
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		if _, _, ok := s.spliced(d); !ok {
			kept = append(kept, d)
		}
	}
	return kept, nil
}

// absent returns the digests without an entry of their own, in order and without duplicates, and renews the leases of
// the others.
func (s *Store) absent(ds []cas.Digest) []cas.Digest {
	var missing []cas.Digest
	var old []index.Key // with stale stamps
	var oldDigests []cas.Digest
	asked := map[index.Key]bool{} // set of old
	now := seconds(time.Now())
	instance, known := s.cache.instances.find(s.name)
	for _, d := range ds {
		if d.IsEmpty() {
			continue
		}
		var e index.Entry
		present := false
		if known {
			e, present = s.cache.index.Get(keyOf(instance, blob, d))
		}
		switch {
		case !present:
			missing = append(missing, d)
		case s.cache.stale(&e, now) && !asked[e.Key]:
			asked[e.Key] = true
			old, oldDigests = append(old, e.Key), append(oldDigests, d)
		}
	}
	if len(old) > 0 {
		missing = append(missing, digestsOf(s.cache.touch(old, now), old, oldDigests)...)
		if len(missing) > 0 {
			missing = inOrder(ds, missing)
		}
	}
	return unique(missing)
}

// digestsOf returns the digests of the keys in absent, a subset of keys; ds holds the digests of keys.
func digestsOf(absent, keys []index.Key, ds []cas.Digest) []cas.Digest {
	wanted := setOf(absent)
	var found []cas.Digest
	for i, k := range keys {
		if wanted[k] {
			found = append(found, ds[i])
		}
	}
	return found
}

// inOrder returns missing in the order of ds.
func inOrder(ds, missing []cas.Digest) []cas.Digest {
	wanted := setOf(missing)
	missing = missing[:0]
	for _, d := range ds {
		if wanted[d] {
			missing = append(missing, d)
		}
	}
	return missing
}

func setOf[T comparable](all []T) map[T]bool {
	set := make(map[T]bool, len(all))
	for _, v := range all {
		set[v] = true
	}
	return set
}

// unique returns ds without duplicates.
func unique(ds []cas.Digest) []cas.Digest {
	if len(ds) < 2 {
		return ds
	}
	seen := make(map[cas.Digest]bool, len(ds))
	kept := ds[:0]
	for _, d := range ds {
		if !seen[d] {
			seen[d] = true
			kept = append(kept, d)
		}
	}
	return kept
}
