// SPDX-License-Identifier: Apache-2.0

package disk

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/disk/internal/index"
	"github.com/cloister-build/cloister/cas/disk/internal/segment"
)

// locateTries limits how often Locate starts again after damage or a write by another process.
const locateTries = 4

// Locate implements cas.Locator for blobs smaller than Config.Pack. It reads and verifies what this process has not
// verified, and everything in segments to which another process wrote. It drops damaged blobs. The files stay unchanged
// until Release even if their segments are removed (see Stats.HeldBytes) or the store is closed.
func (s *Store) Locate(ctx context.Context, ds []cas.Digest) (cas.Location, error) {
	end, err := s.cache.beginWith(ctx)
	if err != nil {
		return nil, err
	}
	defer end()
	for range locateTries {
		at := &location{extents: make([]cas.Extent, len(ds))}
		l := locator{cache: s.cache, location: at, file: map[uint32]int32{}}
		sound, err := l.locateAll(ctx, s.name, ds)
		if sound {
			s.findSpliced(l.extents, ds)
		}
		if sound && l.Valid() {
			return at, nil
		}
		l.Release()
		if err != nil {
			return nil, fmt.Errorf("store %s: %w", s.cache.dir, err)
		}
	}
	return nil, fmt.Errorf("store %s: another process keeps writing to the segments of %d blobs", s.cache.dir, len(ds))
}

// findSpliced marks the absent blobs that are stored as chunks as Unpacked, and renews their leases.
func (s *Store) findSpliced(extents []cas.Extent, ds []cas.Digest) {
	asked := map[cas.Digest]int32{}
	for i, d := range ds {
		if extents[i].File != cas.Absent {
			continue
		}
		if _, ok := asked[d]; !ok {
			asked[d] = cas.Absent
			if _, _, ok := s.spliced(d); ok {
				asked[d] = cas.Unpacked
			}
		}
		extents[i].File = asked[d]
	}
}

// A location implements cas.Location.
type location struct {
	extents []cas.Extent
	files   []*os.File

	mu       sync.Mutex
	views    []segment.View // guarded by mu; of files
	released bool           // guarded by mu
}

func (l *location) Extents() []cas.Extent { return l.extents }
func (l *location) Files() []*os.File     { return l.files }

// Valid implements cas.Location with one system call for each file.
func (l *location) Valid() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	for i := range l.views {
		if !l.views[i].Valid() {
			return false
		}
	}
	return !l.released
}

// Removed implements cas.Location.
func (l *location) Removed() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.ContainsFunc(l.views, func(v segment.View) bool { return v.Removed() })
}

// Release implements cas.Location.
func (l *location) Release() {
	l.mu.Lock()
	defer l.mu.Unlock()
	for i := range l.views {
		l.views[i].Release()
	}
	l.views, l.released = nil, true
}

// A locator makes a location.
type locator struct {
	cache *Cache
	*location
	file       map[uint32]int32 // index of the file of each segment, or cas.Unpacked
	unverified []index.Entry
}

// locateAll fills the location. It returns false if it found damage and must be repeated.
func (l *locator) locateAll(ctx context.Context, instance string, ds []cas.Digest) (sound bool, err error) {
	n, known := l.cache.instances.find(instance)
	now := l.cache.now()
	var stale []int
	for i, d := range ds {
		l.extents[i].File = cas.Absent
		if d.IsEmpty() {
			l.extents[i].File = cas.Unpacked
		} else if known {
			e, ok := l.cache.index.Get(keyOf(n, blob, d))
			if ok && l.cache.stale(&e, now) {
				stale = append(stale, i)
			} else if err := l.locate(i, e, ok); err != nil {
				return false, err
			}
		}
	}
	if len(stale) > 0 {
		keys := make(map[index.Key]bool, len(stale)) // a set: ds may have duplicates
		for _, i := range stale {
			keys[keyOf(n, blob, ds[i])] = true
		}
		l.cache.touch(slices.Collect(maps.Keys(keys)), now)
		for _, i := range stale {
			e, ok := l.cache.index.Get(keyOf(n, blob, ds[i]))
			if err := l.locate(i, e, ok); err != nil {
				return false, err
			}
		}
	}
	return l.verify(ctx)
}

// locate sets the extent of blob i. Its entry is e if ok is true.
func (l *locator) locate(i int, e index.Entry, ok bool) error {
	for ok && !e.File {
		if n, open := l.file[e.Segment]; open && n == cas.Unpacked {
			break
		} else if open {
			l.extents[i] = cas.Extent{File: n, Offset: int64(e.Offset) * segment.Block}
			if !e.Verified || l.views[n].Suspect {
				l.unverified = append(l.unverified, e)
			}
			return nil
		}
		err := l.open(e.Segment)
		// Look the entry up again: damage found before the View was made does not invalidate it.
		was := e.Position
		e, ok = l.cache.index.Get(e.Key)
		if err != nil && (!errors.Is(err, segment.ErrGone) || ok && e.Position == was) {
			return err
		}
	}
	if ok {
		l.extents[i].File = cas.Unpacked
	}
	return nil
}

// open adds the file of segment n.
func (l *locator) open(n uint32) error {
	g := l.cache.segments.Segment(n)
	if g == nil {
		return segment.ErrGone
	}
	v, err := g.View()
	if errors.Is(err, segment.ErrHidden) {
		if g.Hide() {
			l.cache.config.Log.Warn("a segment is used by copying from it; restart the process that uses the store", "err", err)
		}
		l.file[n] = cas.Unpacked
		return nil
	} else if err != nil {
		return err
	}
	l.file[n] = int32(len(l.files))
	l.mu.Lock()
	defer l.mu.Unlock()
	l.files, l.views = append(l.files, v.File), append(l.views, v)
	return nil
}

// verify reads runs of entries: up to runBytes at once, with gaps of up to runGap bytes.
const (
	runBytes = 128 << 10
	runGap   = 4 << 10
)

// runs returns the unverified entries, without duplicates, in runs.
func (l *locator) runs() (runs [][]index.Entry) {
	all := l.unverified
	slices.SortFunc(all, func(a, b index.Entry) int {
		return cmp.Or(cmp.Compare(a.Segment, b.Segment), cmp.Compare(a.Offset, b.Offset))
	})
	all = slices.CompactFunc(all, func(a, b index.Entry) bool { return a.Position == b.Position })
	for first := 0; first < len(all); {
		last := first
		for last+1 < len(all) && all[last+1].Segment == all[first].Segment &&
			start(&all[last+1])-end(&all[last]) <= runGap && end(&all[last+1])-start(&all[first]) <= runBytes {
			last++
		}
		runs = append(runs, all[first:last+1])
		first = last + 1
	}
	return runs
}

// start and end are the offsets of a packed entry and of the end of its padding, in bytes.
func start(e *index.Entry) int64 { return int64(e.Offset) * segment.Block }
func end(e *index.Entry) int64   { return start(e) + segment.Padded(int64(e.Length)) }

// verify reads the unverified entries in parallel, and reports whether all are sound. It drops damaged entries.
func (l *locator) verify(ctx context.Context) (sound bool, err error) {
	runs := l.runs()
	var next atomic.Int64
	var bad atomic.Bool
	errs := make([]error, min(len(runs), runtime.GOMAXPROCS(0)))
	var group sync.WaitGroup
	for w := range errs {
		group.Go(func() {
			buf := buffers.Get().(*[]byte)
			defer buffers.Put(buf)
			for i := next.Add(1) - 1; i < int64(len(runs)) && errs[w] == nil; i = next.Add(1) - 1 {
				if errs[w] = ctx.Err(); errs[w] == nil {
					var sound bool
					if sound, errs[w] = l.verifyRun(ctx, runs[i], *buf); !sound {
						bad.Store(true)
					}
				}
			}
		})
	}
	group.Wait()
	err = errors.Join(errs...)
	return err == nil && !bad.Load(), err
}

// verifyRun reads and verifies the entries of a run. It uses buf if that is large enough.
func (l *locator) verifyRun(ctx context.Context, run []index.Entry, buf []byte) (sound bool, err error) {
	c := l.cache
	from, to := start(&run[0]), end(&run[len(run)-1])
	if to-from > int64(len(buf)) {
		buf = make([]byte, to-from)
	}
	buf = buf[:to-from]
	_, failed := l.files[l.file[run[0].Segment]].ReadAt(buf, from)
	sound = true
	for _, e := range run {
		b := buf[start(&e)-from : end(&e)-from]
		if failed == nil && padded(b, e.Length) && c.sound(&e, b[:e.Length]) {
			c.setVerified(e)
			continue
		}
		sound = false
		if err := c.check(ctx, e); err != nil && !isDropped(err) {
			return false, err
		}
	}
	return sound, nil
}

// padded reports whether b has only zeros after its first n bytes.
func padded(b []byte, n uint32) bool {
	for _, v := range b[n:] {
		if v != 0 {
			return false
		}
	}
	return true
}
