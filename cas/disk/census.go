// SPDX-License-Identifier: Apache-2.0

package disk

import (
	"cmp"
	"math"
	"math/bits"
	"slices"
	"time"

	"github.com/cloister-build/cloister/cas/disk/internal/index"
	"github.com/cloister-build/cloister/cas/disk/internal/segment"
)

// classes is the number of age classes.
const classes = 124

// class returns the class of an age in seconds.
func class(age uint32) int {
	if age < 4 {
		return int(age)
	}
	k := bits.Len32(age) - 1
	return 4*(k-1) + int(age>>(k-2)&3)
}

// youngest returns the lowest age in a class.
func youngest(class int) uint32 {
	if class < 4 {
		return uint32(class)
	}
	return uint32(4+class%4) << (class/4 - 1)
}

// A census counts entries by age.
type census struct {
	now, latest    uint32 // entries used after latest must stay
	leased, pinned int64
	leasedBlobs    int64
	ages           [classes]int64             // evictable bytes
	blobs          [classes]int64             // evictable entries
	files          []oldFile                  // evictable, oldest first
	packed         map[uint32]int64           // packed entries by segment
	cold           map[uint32]*[classes]int64 // evictable bytes by segment, including records
	copies         []idleCopy
}

type oldFile struct {
	key   index.Key
	stamp uint32
}

// takeCensus visits all entries, for a collection of those that were not used for the time unused.
func (c *Cache) takeCensus(unused time.Duration) *census {
	n := &census{now: c.now(), packed: map[uint32]int64{}, cold: map[uint32]*[classes]int64{}}
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
			age-- // so that a class is old as a whole
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

// dead returns the size of g and how much of it is dead. The record of a live entry is not dead.
func (n *census) dead(g *segment.Segment) (size, dead int64) {
	data, log := g.Size()
	return data + log, data + log - g.Live.Load() - recordBytes*(n.packed[g.N]+g.Files.Load())
}

// rows returns the histogram in coarse buckets for users.
func (n *census) rows() []AgeBucket {
	const day = 24 * 60 * 60
	rows := []AgeBucket{{"leased", true, n.leasedBlobs, n.leased}}
	for _, span := range []struct {
		label    string
		from, to uint32
	}{
		{"used within a day", 0, day},
		{"1 to 7 days", day, 7 * day},
		{"7 to 30 days", 7 * day, 30 * day},
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

// A plan selects what to evict: entries last used at or before cutoff, until bytes and files are free.
type plan struct {
	*census
	bytes, files int64
	cutoff       uint32
	minOld       int64 // percentage of a segment that must be old or dead to evict it
	held         int64 // most bytes of removed segments that Locations may keep afterwards
	dry          bool
	report       CollectReport
}

// choose sets cutoff, to at most latest, and minOld.
func (p *plan) choose(c *Cache, latest uint32) {
	segments := c.segments.Segments()
	size, dead := make([]int64, len(segments)), make([]int64, len(segments))
	for i, g := range segments {
		size[i], dead[i] = p.dead(g)
	}
	for _, p.minOld = range []int64{50, 20, leastOld} {
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
				if 100*old[i] >= p.minOld*size[i] {
					sum += old[i]
				}
			}
			if sum >= p.bytes && count >= p.files {
				return
			}
		}
	}
}

// leastOld is the smallest percentage for which a segment is evicted.
const leastOld = 1

// addMargin increases the goal by a twentieth of the budgets.
func (p *plan) addMargin(c *Cache) {
	if p.bytes > 0 {
		p.bytes += min(c.config.MaxBytes/20, math.MaxInt64-p.bytes)
	}
	if p.files > 0 {
		p.files += c.config.MaxFiles / 20
	}
	if p.choose(c, p.latest); p.minOld == leastOld {
		p.minOld = 20
	}
}

// A candidate is a segment that may be evicted.
type candidate struct {
	g         *segment.Segment
	size, old int64
}

// part returns the fraction of the segment that is old or dead.
func (s *candidate) part() float64 { return float64(s.old) / float64(s.size) }

// candidates returns the segments of which enough is old or dead, those with the largest part first.
func (p *plan) candidates(c *Cache) []candidate {
	var all []candidate
	for _, g := range c.segments.Segments() {
		size, dead := p.dead(g)
		s := candidate{g, size, dead}
		if cold := p.cold[g.N]; cold != nil {
			for a := range classes {
				// The class of the cutoff is old as a whole.
				if p.now-min(youngest(a+1)-1, p.now) <= p.cutoff {
					s.old += cold[a]
				}
			}
		}
		// Dead records alone do not justify rewriting a segment.
		if s.old > dead && p.minOld == 0 || s.old > 0 && 100*s.old >= max(p.minOld, 1)*s.size {
			all = append(all, s)
		}
	}
	slices.SortFunc(all, func(a, b candidate) int {
		return cmp.Or(cmp.Compare(b.part(), a.part()), cmp.Compare(a.g.N, b.g.N))
	})
	return all
}
