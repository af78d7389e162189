// SPDX-License-Identifier: Apache-2.0

package disk

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"math/bits"
	"os"
	"slices"
	"time"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/disk/internal/commit"
	"github.com/cloister-build/cloister/cas/disk/internal/index"
	"github.com/cloister-build/cloister/cas/disk/internal/segment"
	"github.com/cloister-build/cloister/cas/durable"
)

// # Eviction
//
// A file goes alone. What is packed goes with its segment: what is still wanted of that is written to another one,
// which is flushed to the disk, and then the segment is removed. So room is made where little has to be moved: of
// the segments that are half old and dead, if there are enough of them, and else of those that are less.
//
// "Old" is what was used before some time. That is chosen as early as possible, by the ages of all entries that are
// not leased, in classes whose width is a quarter of the age.

// CollectOptions says what Collect is to remove. Nothing that is leased, or handed out by File, is ever removed.
type CollectOptions struct {
	// MaxBytes is down to which size; 0 is no aim.
	MaxBytes int64
	// OlderThan is for how long what goes must not have been used. If MaxBytes is 0, all that was not goes.
	OlderThan time.Duration
	// DryRun removes nothing, and only says what would go.
	DryRun bool
}

// A CollectReport says what was removed, or what would be. All sizes are in bytes.
type CollectReport struct {
	Blobs    int   // packed blobs and results that were evicted
	Files    int   // blobs with a file of their own
	Copies   int   // files that were made for File
	Segments int   // segments that were removed
	Freed    int64 // what less counts against the budget
	Moved    int64 // what was written again, because it shared a segment with what went

	Bytes, MaxBytes int64 // what counts against the budget now, and the budget
	Leased          int64 // of all that there was before, what could not go because it was used too recently
	Pinned          int64 // and what could not because it is handed out
	Ages            []AgeBucket
}

// An AgeBucket says how much there was that was used last within a span of time.
type AgeBucket struct {
	Label  string
	Leased bool
	Blobs  int64
	Bytes  int64
}

// Collect removes what o says, and reports that. It may run beside all else; if ctx ends it stops where it is.
func (c *Cache) Collect(ctx context.Context, o CollectOptions) (CollectReport, error) {
	end, err := c.beginWith(ctx)
	if err != nil {
		return CollectReport{}, err
	}
	defer end()
	if o.MaxBytes < 0 || o.OlderThan < 0 {
		return CollectReport{}, fmt.Errorf("%w collection: a size or an age is negative", cas.ErrInvalid)
	}
	if o.MaxBytes == 0 && o.OlderThan == 0 {
		return CollectReport{}, fmt.Errorf("%w collection: it has neither a size nor an age as its aim", cas.ErrInvalid)
	}
	c.room.Lock()
	defer c.room.Unlock()
	n := c.takeCensus(o.OlderThan)
	used, _ := c.used()
	p := plan{census: n, dry: o.DryRun, cutoff: n.latest, bytes: math.MaxInt64, files: math.MaxInt64}
	if o.MaxBytes > 0 {
		p.bytes, p.files = max(used-o.MaxBytes, 0), 0
		p.choose(c, p.cutoff)
	}
	if p.bytes > 0 {
		err = c.carryOut(ctx, &p)
	}
	r := p.report
	r.Leased, r.Pinned, r.Ages, r.MaxBytes = n.leased, n.pinned, n.rows(), c.MaxBytes
	if r.Bytes, _ = c.used(); o.DryRun {
		r.Bytes -= r.Freed
	} else {
		r.Freed = used - r.Bytes
	}
	return r, err
}

// evict frees room for n bytes and so many files, and some more, so that not every Put must. The caller holds room.
func (c *Cache) evict(n, files int64) error {
	used, usedFiles := c.used()
	p := plan{census: c.takeCensus(0)}
	p.bytes = used - (c.most() - n)
	if c.MaxFiles > 0 {
		p.files = usedFiles + files + spareFiles - c.MaxFiles
	}
	p.choose(c, p.latest)
	// Not if nearly everything would have to be moved for it.
	if p.least > leastOld {
		p.more(c)
	}
	return c.carryOut(context.Background(), &p)
}

// classes is the number of classes of ages.
const classes = 124

// class returns the class of an age in seconds, and youngest the least age in a class.
func class(age uint32) int {
	if age < 4 {
		return int(age)
	}
	k := bits.Len32(age) - 1
	return 4*(k-1) + int(age>>(k-2)&3)
}

func youngest(class int) uint32 {
	if class < 4 {
		return uint32(class)
	}
	return uint32(4+class%4) << (class/4 - 1)
}

// A census is how old everything is.
type census struct {
	now, latest    uint32 // what was used after latest is not wanted to go
	leased, pinned int64
	leasedBlobs    int64
	ages           [classes]int64 // bytes that may go
	blobs          [classes]int64
	files          []oldFile                  // that may go, the oldest first
	packed         map[uint32]int64           // entries in the data, by segment
	cold           map[uint32]*[classes]int64 // bytes that may go, records included, by segment
	copies         []idleCopy
}

type oldFile struct {
	key   index.Key
	stamp uint32
}

// takeCensus looks at every entry, for a collection of what was not used for so long.
func (c *Cache) takeCensus(unused time.Duration) *census {
	n := &census{now: seconds(time.Now()), packed: map[uint32]int64{}, cold: map[uint32]*[classes]int64{}}
	n.latest = n.now - uint32(min(int64(unused/time.Second), int64(n.now)))
	c.index.Each(func(e *index.Entry) bool {
		size := segment.Padded(int64(e.Length))
		if e.File {
			size = charge(e.Size)
		} else {
			n.packed[e.Segment]++
		}
		switch {
		case c.leased(e, n.now):
			n.leased += size
			n.leasedBlobs++
			return true
		case e.File && c.pins.has(e.Key):
			n.pinned += size
			return true
		}
		age := class(n.now - min(e.Stamp, n.now))
		n.ages[age] += size
		n.blobs[age]++
		if e.File {
			n.files = append(n.files, oldFile{e.Key, e.Stamp})
			return true
		}
		cold := n.cold[e.Segment]
		if cold == nil {
			cold = new([classes]int64)
			n.cold[e.Segment] = cold
		}
		if e.Stamp > n.latest && age > 0 && age == class(n.now-n.latest) {
			age-- // so that no class is old in part
		}
		cold[age] += size + recordBytes
		return true
	})
	slices.SortFunc(n.files, func(a, b oldFile) int { return cmp.Compare(a.stamp, b.stamp) })
	var pinned int64
	n.copies, pinned = c.copies.idle()
	n.pinned += pinned
	return n
}

// dead returns what g takes, and how much of that nothing needs: a record is needed as long as its entry is there.
func (n *census) dead(g *segment.Segment) (size, dead int64) {
	data, log := g.Size()
	return data + log, data + log - g.Live.Load() - recordBytes*(n.packed[g.N]+g.Files.Load())
}

// rows returns the ages for people to read.
func (n *census) rows() []AgeBucket {
	const day = 24 * 60 * 60
	rows := []AgeBucket{{"leased", true, n.leasedBlobs, n.leased}}
	for _, span := range []struct {
		label    string
		from, to uint32
	}{
		{"used within a day", 0, day}, {"1 to 7 days", day, 7 * day}, {"7 to 30 days", 7 * day, 30 * day},
		{"older", 30 * day, math.MaxUint32},
	} {
		row := AgeBucket{Label: span.label}
		for a := range classes {
			if y := youngest(a); y >= span.from && y < span.to {
				row.Blobs += n.blobs[a]
				row.Bytes += n.ages[a]
			}
		}
		rows = append(rows, row)
	}
	return rows
}

// A plan is what is to go: what was used last at cutoff or before, until so many bytes and files are free.
type plan struct {
	*census
	bytes, files int64
	cutoff       uint32
	least        int64 // of the size of a segment, in hundredths, what must be old or dead for it to go
	dry          bool
	report       CollectReport
}

// choose sets the cutoff, which is not after latest, and how much of a segment must be old.
func (p *plan) choose(c *Cache, latest uint32) {
	segments := c.segments.Segments()
	size, dead := make([]int64, len(segments)), make([]int64, len(segments))
	for i, g := range segments {
		size[i], dead[i] = p.dead(g)
	}
	for _, p.least = range []int64{50, 20, leastOld} {
		old := slices.Clone(dead)
		var files, count int64
		next := 0
		for a := classes - 1; a >= 0; a-- {
			p.cutoff = p.now - min(youngest(a), p.now)
			if p.cutoff > latest {
				p.cutoff = latest
				break
			}
			for ; next < len(p.census.files) && p.census.files[next].stamp <= p.cutoff; next++ {
				files += charge(p.census.files[next].key.Size)
				count++
			}
			sum := files
			for i, g := range segments {
				if cold := p.cold[g.N]; cold != nil {
					old[i] += cold[a]
				}
				if 100*old[i] >= p.least*size[i] {
					sum += old[i]
				}
			}
			if sum >= p.bytes && count >= p.files {
				return
			}
		}
	}
}

// leastOld is the least part of a segment, in hundredths, that is worth to remove it for.
const leastOld = 1

// more aims at a twentieth of the budgets more than is needed, so that not every Put must make room.
func (p *plan) more(c *Cache) {
	if p.bytes > 0 {
		p.bytes += min(c.MaxBytes/20, math.MaxInt64-p.bytes)
	}
	if p.files > 0 {
		p.files += c.MaxFiles / 20
	}
	if p.choose(c, p.latest); p.least == leastOld {
		p.least = 20
	}
}

// done reports whether enough is free.
func (p *plan) done(c *Cache, usedBefore, filesBefore int64) bool {
	if p.dry {
		return p.report.Freed >= p.bytes && int64(p.report.Files+p.report.Copies) >= p.files
	}
	used, files := c.used()
	return usedBefore-used >= p.bytes && filesBefore-files >= p.files
}

// carryOut removes what p says. What cannot be removed is passed over.
func (c *Cache) carryOut(ctx context.Context, p *plan) error {
	used, files := c.used()
	var first error
	done := func() bool {
		first = cmp.Or(first, ctx.Err())
		return ctx.Err() != nil || c.closed.Load() || p.done(c, used, files)
	}
	for _, idle := range p.copies {
		if done() {
			return first
		}
		if seconds(idle.used) <= p.cutoff && (p.dry || c.removeCopy(idle.key, idle.f)) {
			p.report.Copies++
			p.report.Freed += charge(idle.key.key.Size)
		}
	}
	for _, f := range p.census.files {
		if f.stamp > p.cutoff || done() {
			break
		}
		if removed, err := c.evictFile(p, f.key); err != nil {
			first = cmp.Or(first, err)
		} else if removed {
			p.report.Files++
			p.report.Freed += charge(f.key.Size)
		}
	}
	for _, s := range p.candidates(c) {
		if done() {
			break
		}
		if p.dry {
			p.report.Segments++
			p.report.Freed += s.old
			p.report.Moved += s.size - s.old
			continue
		}
		if err := c.rewrite(ctx, p, s.g); err != nil {
			first = cmp.Or(first, err)
		}
	}
	return first
}

// evictFile removes a file that is still as old as p says.
func (c *Cache) evictFile(p *plan, k index.Key) (removed bool, err error) {
	if p.dry {
		return true, nil
	}
	_, removed, err = c.removeFile(k, unseen, func(e *index.Entry) bool { return c.mayGo(p, e) && !c.pins.has(k) }, os.Remove)
	if removed {
		c.evictedBlobs.Add(1)
		c.evictedBytes.Add(charge(k.Size))
	}
	return removed, err
}

func (c *Cache) mayGo(p *plan, e *index.Entry) bool {
	return e.Stamp <= p.cutoff && !c.leased(e, seconds(time.Now()))
}

// A candidate is a segment that may be worth its removal.
type candidate struct {
	g         *segment.Segment
	size, old int64
}

// candidates returns the segments of which enough is old, the one first of which most is.
func (p *plan) candidates(c *Cache) []candidate {
	var all []candidate
	for _, g := range c.segments.Segments() {
		size, dead := p.dead(g)
		s := candidate{g, size, dead}
		if cold := p.cold[g.N]; cold != nil {
			for a := range classes {
				// Of the class in which the cutoff is all are.
				if p.now-min(youngest(a+1)-1, p.now) <= p.cutoff {
					s.old += cold[a]
				}
			}
		}
		// A few notes in its log are no reason to write all of a segment anew.
		if s.old > dead && p.least == 0 || s.old > 0 && 100*s.old >= max(p.least, 1)*s.size {
			all = append(all, s)
		}
	}
	slices.SortFunc(all, func(a, b candidate) int {
		return cmp.Or(cmp.Compare(float64(b.old)/float64(b.size), float64(a.old)/float64(a.size)), cmp.Compare(a.g.N, b.g.N))
	})
	return all
}

// moveBytes is how much is moved in one commit.
const moveBytes = 1 << 20

// rewrite evicts from g what p says, moves the rest to another segment, and removes g. If it fails g stays, without
// what was evicted or moved.
func (c *Cache) rewrite(ctx context.Context, p *plan, g *segment.Segment) error {
	c.seal(g)
	m := mover{cache: c}
	var evicted []index.Entry // results and mappings
	var failed error
	err := g.Puts(0, func(r *segment.Record) bool {
		if failed = ctx.Err(); failed == nil && c.closed.Load() {
			failed = c.closedError()
		}
		if failed != nil {
			return false
		}
		e, ok := c.index.Get(r.Key)
		if !ok || e.Position != r.Position {
			return true
		}
		if !e.File && c.evictPacked(p, &e) {
			if isRecord(e.Key) {
				evicted = append(evicted, e)
			}
			return true
		}
		failed = m.add(r, e)
		return failed == nil
	})
	if err = cmp.Or(failed, err); err == nil {
		err = m.flush()
	}
	p.report.Moved += m.bytes
	if err != nil {
		err = c.writeError(err)
	} else {
		err = c.removeSegment(p, g)
	}
	if err != nil {
		// As long as the segment stays, its log must not tell of them.
		for i := range evicted {
			c.forget(&evicted[i])
		}
	}
	return err
}

// evictPacked removes e if it is as old as p says.
func (c *Cache) evictPacked(p *plan, e *index.Entry) bool {
	gone, removed := c.index.Remove(e.Key, func(now *index.Entry) bool {
		return now.Position == e.Position && c.mayGo(p, now)
	})
	if removed {
		c.uncount(&gone)
		p.report.Blobs++
		c.evictedBlobs.Add(1)
		c.evictedBytes.Add(segment.Padded(int64(gone.Length)))
	}
	return removed
}

// removeSegment removes a segment of which nothing is wanted. What was moved from it outlives a loss of power before
// it goes.
func (c *Cache) removeSegment(p *plan, g *segment.Segment) error {
	if live, files := g.Live.Load(), g.Files.Load(); live != 0 || files != 0 {
		return fmt.Errorf("store %s: segment %d is kept: %d bytes and %d files of it are still wanted", c.dir, g.N, live, files)
	}
	if err := errors.Join(c.moved.Flush(), durable.SyncDir(c.segments.Dir)); err != nil {
		return c.writeError(err)
	}
	commit.Point("moved and flushed")
	if err := c.segments.Remove(g); err != nil {
		return c.writeError(err)
	}
	p.report.Segments++
	return nil
}

// A mover moves entries to another segment, many in a commit.
type mover struct {
	cache *Cache
	items []segment.Item
	from  []index.Position
	size  int64 // of the data of items
	bytes int64 // that were moved in all
}

// add moves e, whose record is r, now or with a later commit. A damaged one stays behind.
func (m *mover) add(r *segment.Record, e index.Entry) error {
	it := segment.Item{Record: *r}
	it.Stamp = e.Stamp
	if !e.File {
		b, err := m.cache.read(e)
		switch {
		case err == nil && !m.cache.sound(&e, b):
			_ = m.cache.damaged(e, b)
			return nil
		case errors.Is(err, cas.ErrNotFound), errors.Is(err, cas.ErrCorrupt):
			return nil
		case err != nil:
			return err
		}
		it.Data, it.Verified = b, true
	} else {
		it.Verified = e.Verified
	}
	m.items, m.from = append(m.items, it), append(m.from, e.Position)
	if m.size += int64(len(it.Data)); m.size < moveBytes && len(m.items) < 10_000 {
		return nil
	}
	return m.flush()
}

// sound reports whether b is what e should be.
func (c *Cache) sound(e *index.Entry, b []byte) bool {
	if isRecord(e.Key) {
		return soundRecord(b)
	}
	f, err := functionOf(e.Key)
	return err == nil && is(e.Key, f.Sum(b))
}

// flush moves what was added.
func (m *mover) flush() error {
	if len(m.items) == 0 {
		return nil
	}
	var late []index.Key // used since their stamp was read
	i := 0
	err := m.cache.moved.Append(m.items, func(it *segment.Item) {
		from := m.from[i]
		i++
		var old index.Entry
		moved := false
		m.cache.index.Update(it.Key, func(e *index.Entry) {
			if e.Position != from {
				return
			}
			old, moved = *e, true
			stamp, verified := max(e.Stamp, it.Stamp), e.Verified || it.Verified
			if stamp > it.Stamp {
				late = append(late, it.Key)
			}
			*e = it.Entry
			e.Stamp, e.Verified = stamp, verified
		})
		switch {
		case moved:
			m.cache.weigh(&old, -1)
			m.cache.weigh(&it.Entry, 1)
		case isRecord(it.Key):
			m.cache.forget(&it.Entry) // it was replaced meanwhile, and must not come back
		}
	})
	if err != nil {
		return err
	}
	commit.Point("moved")
	if len(late) > 0 {
		m.cache.touch(late, seconds(time.Now()))
	}
	m.bytes += m.size
	m.items, m.from, m.size = m.items[:0], m.from[:0], 0
	return nil
}
