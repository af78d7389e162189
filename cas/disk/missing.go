// SPDX-License-Identifier: Apache-2.0

package disk

import (
	"context"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/disk/internal/index"
)

// Missing implements cas.Store. It only reads the disk for chunk lists.
func (s *Store) Missing(ctx context.Context, ds []cas.Digest) ([]cas.Digest, error) {
	if err := cas.CheckDigests(ds...); err != nil {
		return nil, err
	}
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

// absent returns the digests without their own entry, in order and without duplicates, and renews the leases of the
// others.
func (s *Store) absent(ds []cas.Digest) []cas.Digest {
	var missing []cas.Digest
	var stale []index.Key
	asked := map[index.Key]bool{} // set of stale
	now := s.cache.now()
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
			stale = append(stale, e.Key)
		}
	}
	if len(stale) > 0 && len(s.cache.touch(stale, now)) > 0 {
		return s.absent(ds) // some were evicted before their leases were renewed
	}
	return unique(missing)
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
