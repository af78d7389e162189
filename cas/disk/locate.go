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
	"time"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/disk/internal/index"
	"github.com/cloister-build/cloister/cas/disk/internal/segment"
)

// placeTries is how often Place begins anew because it found damage, or somebody else's write.
const placeTries = 4

// Locate implements cas.Locator: in segments is what is smaller than Config.Pack. What this process has not yet compared
// with its digest is read; of what somebody else has written to, everything is, each time. A damaged blob is absent
// from then on. The files are kept as they are until Release also if their segments are removed, which Stats.HeldBytes
// tells, or the store is closed.
func (s *Store) Locate(ctx context.Context, ds []cas.Digest) (cas.Location, error) {
	end, err := s.cache.beginWith(ctx)
	if err != nil {
		return nil, err
	}
	defer end()
	for range placeTries {
		p := placing{cache: s.cache, placement: &placement{extents: make([]cas.Extent, len(ds))}, file: map[uint32]int32{}}
		sound, err := p.place(ctx, s.name, ds)
		if sound {
			s.findMapped(p.extents, ds)
		}
		if sound && p.Valid() {
			return p.placement, nil
		}
		p.Release()
		if err != nil {
			return nil, fmt.Errorf("store %s: %w", s.cache.dir, err)
		}
	}
	return nil, fmt.Errorf("store %s: segments of %d blobs change again and again: see who else writes to them", s.cache.dir, len(ds))
}

// findMapped notes which of the blobs that are not there by themselves are kept as chunks, and leases them anew.
func (s *Store) findMapped(extents []cas.Extent, ds []cas.Digest) {
	asked := map[cas.Digest]int32{}
	for i, d := range ds {
		if extents[i].File != cas.Absent {
			continue
		}
		if _, ok := asked[d]; !ok {
			asked[d] = cas.Absent
			if _, _, ok := s.mapped(d); ok {
				asked[d] = cas.Unpacked
			}
		}
		extents[i].File = asked[d]
	}
}

// A placement implements cas.Location.
type placement struct {
	extents []cas.Extent
	files   []*os.File

	mu       sync.Mutex
	views    []segment.View // guarded by mu; of files
	released bool           // guarded by mu
}

func (p *placement) Extents() []cas.Extent { return p.extents }
func (p *placement) Files() []*os.File     { return p.files }

// Valid implements cas.Location, with one question to the file system for each file.
func (p *placement) Valid() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	for i := range p.views {
		if !p.views[i].Valid() {
			return false
		}
	}
	return !p.released
}

func (p *placement) Release() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for i := range p.views {
		p.views[i].Release()
	}
	p.views, p.released = nil, true
}

// A placing makes a placement.
type placing struct {
	cache *Cache
	*placement
	file     map[uint32]int32 // by segment: the index of its file
	doubtful []index.Entry    // that are to be read
}

// place fills the placement. It is not sound if damage was found: then it is to be made anew.
func (p *placing) place(ctx context.Context, instance string, ds []cas.Digest) (sound bool, err error) {
	n, known := p.cache.instances.find(instance)
	now := seconds(time.Now())
	var stale []int
	for i, d := range ds {
		p.extents[i].File = cas.Absent
		if d.IsEmpty() {
			p.extents[i].File = cas.Unpacked
		} else if known {
			e, ok := p.cache.index.Get(keyOf(n, blob, d))
			if ok && p.cache.stale(&e, now) {
				stale = append(stale, i)
			} else if err := p.locate(i, e, ok); err != nil {
				return false, err
			}
		}
	}
	if len(stale) > 0 {
		keys := make(map[index.Key]bool, len(stale)) // not each time that a blob is named is to be noted
		for _, i := range stale {
			keys[keyOf(n, blob, ds[i])] = true
		}
		p.cache.touch(slices.Collect(maps.Keys(keys)), now)
		for _, i := range stale {
			e, ok := p.cache.index.Get(keyOf(n, blob, ds[i]))
			if err := p.locate(i, e, ok); err != nil {
				return false, err
			}
		}
	}
	return p.verify(ctx)
}

// locate says where blob i is, whose entry is e if there is one.
func (p *placing) locate(i int, e index.Entry, ok bool) error {
	for ok && !e.File {
		if n, held := p.file[e.Segment]; held {
			p.extents[i] = cas.Extent{File: n, Offset: int64(e.Offset) * segment.Block}
			if !e.Verified || p.views[n].Suspect {
				p.doubtful = append(p.doubtful, e)
			}
			return nil
		}
		err := p.hold(e.Segment)
		// What its view does not tell of, for it was found before, the index tells now.
		was := e.Position
		if e, ok = p.cache.index.Get(e.Key); err != nil && (!errors.Is(err, segment.ErrGone) || ok && e.Position == was) {
			return err
		}
	}
	if ok {
		p.extents[i].File = cas.Unpacked
	}
	return nil
}

// hold adds the file of a segment.
func (p *placing) hold(n uint32) error {
	g := p.cache.segments.Segment(n)
	if g == nil {
		return segment.ErrGone
	}
	v, err := g.View()
	if err != nil {
		return err
	}
	p.file[n] = int32(len(p.files))
	p.mu.Lock()
	defer p.mu.Unlock()
	p.files, p.views = append(p.files, v.File), append(p.views, v)
	return nil
}

// runBytes is how much is read at once, and runGap how much of that may be of no use.
const (
	runBytes = 128 << 10
	runGap   = 4 << 10
)

// runs returns the entries that are to be read, each once, by what is read at once.
func (p *placing) runs() (runs [][]index.Entry) {
	all := p.doubtful
	slices.SortFunc(all, func(a, b index.Entry) int {
		return cmp.Or(cmp.Compare(a.Segment, b.Segment), cmp.Compare(a.Offset, b.Offset))
	})
	all = slices.CompactFunc(all, func(a, b index.Entry) bool { return a.Position == b.Position })
	for first := 0; first < len(all); {
		last := first
		for last+1 < len(all) && all[last+1].Segment == all[first].Segment &&
			begin(&all[last+1])-stop(&all[last]) <= runGap && stop(&all[last+1])-begin(&all[first]) <= runBytes {
			last++
		}
		runs = append(runs, all[first:last+1])
		first = last + 1
	}
	return runs
}

// begin and stop are where a packed entry and its padding begin and end, in bytes.
func begin(e *index.Entry) int64 { return int64(e.Offset) * segment.Block }
func stop(e *index.Entry) int64  { return begin(e) + segment.Padded(int64(e.Length)) }

// verify reads what is doubtful, in parallel, and reports whether all of it is what it should be. What is not is absent
// after it, or elsewhere.
func (p *placing) verify(ctx context.Context) (sound bool, err error) {
	runs := p.runs()
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
					if sound, errs[w] = p.verifyRun(ctx, runs[i], *buf); !sound {
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

// verifyRun reads the entries of a run, with buf if it is large enough.
func (p *placing) verifyRun(ctx context.Context, run []index.Entry, buf []byte) (sound bool, err error) {
	c := p.cache
	from, to := begin(&run[0]), stop(&run[len(run)-1])
	if to-from > int64(len(buf)) {
		buf = make([]byte, to-from)
	}
	buf = buf[:to-from]
	_, failed := p.files[p.file[run[0].Segment]].ReadAt(buf, from)
	sound = true
	for _, e := range run {
		b := buf[begin(&e)-from : stop(&e)-from]
		if failed == nil && padded(b, e.Length) && c.sound(&e, b[:e.Length]) {
			c.setVerified(e)
			continue
		}
		sound = false
		if err := c.check(ctx, e); err != nil && !errors.Is(err, cas.ErrCorrupt) && !errors.Is(err, cas.ErrNotFound) {
			return false, err
		}
	}
	return sound, nil
}

// padded reports whether nothing but zeros follows the first n bytes of b.
func padded(b []byte, n uint32) bool {
	for _, v := range b[n:] {
		if v != 0 {
			return false
		}
	}
	return true
}
