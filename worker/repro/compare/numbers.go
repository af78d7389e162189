// SPDX-License-Identifier: Apache-2.0

package compare

import (
	"encoding/binary"
	"math"
	"time"
)

// maxRuns limits the runs of different bytes that are examined. A cause shows in the first few or not at all.
const maxRuns = 256

// numbers returns the cause that most of the different bytes of a and b indicate: times of the two runs, addresses,
// user IDs or random bytes. It returns Unknown if only few of many places agree, because any number may look like a
// time. It compares bytes at equal offsets and finds nothing after an insertion.
func numbers(a, b []byte, k Known) Cause {
	n := min(len(a), len(b))
	a, b = a[:n], b[:n]
	t := tally{first: map[Cause]run{}, seen: map[Cause]int{}}
	for end := 0; t.runs < maxRuns; {
		r, ok := nextRun(a, b, end)
		if !ok {
			break
		}
		end = t.add(a, b, r, k)
	}
	cause, _ := t.most()
	return cause
}

// A tally counts the causes that runs of different bytes indicate.
type tally struct {
	first map[Cause]run
	seen  map[Cause]int
	runs  int
	facts bool
}

// add counts a run and returns where to continue.
func (t *tally) add(a, b []byte, r run, k Known) int {
	cause, end := guessRun(a, b, r, k)
	t.facts = k.timed()
	t.runs++
	t.seen[cause]++
	if t.seen[cause] == 1 {
		t.first[cause] = r
	}
	return end
}

// most returns the most frequent cause and its first run; Unknown if it is rare.
func (t *tally) most() (Cause, run) {
	best := Unknown
	for _, cause := range []Cause{Random, Address, Owner, Timestamp} {
		if t.seen[cause] > 0 && (best == Unknown || t.seen[cause] > t.seen[best]) {
			best = cause
		}
	}
	few := 2
	if t.facts {
		few = 8
	}
	if best == Unknown || t.seen[best]*few < t.runs {
		first := t.first[Unknown]
		for _, r := range t.first {
			if t.seen[Unknown] == 0 || r.from < first.from {
				first = r
			}
		}
		return Unknown, first
	}
	return best, t.first[best]
}

// A run is a range of bytes that all differ.
type run struct{ from, to int }

// nextRun returns the first run at from or later. a and b have the same length.
func nextRun(a, b []byte, from int) (run, bool) {
	for from < len(a) && a[from] == b[from] {
		from++
	}
	to := from
	for to < len(a) && a[to] != b[to] {
		to++
	}
	return run{from, to}, to > from
}

// guessRun returns the cause that a run indicates, and where to continue: after the number that contains it.
func guessRun(a, b []byte, r run, k Known) (Cause, int) {
	if to, ok := disorder(a, b, r.from); ok && !k.both(func(f *Facts) bool { return f.HeldRandom }) {
		return Random, to
	}
	for _, width := range []int{8, 4, 2} {
		first := r.to - width
		if k.timed() {
			first = r.from - width + 1 // the next number may differ as well
		}
		for _, at := range offsetsOf(max(0, first), r.from, width, len(a)) {
			if at%4 != 0 && !k.timed() {
				break // without facts, many unaligned numbers would look like times
			}
			if c := guessNumber(a[at:at+width], b[at:at+width], k); c != Unknown {
				return c, at + width
			}
		}
	}
	if to, ok := notedTimes(a, b, r, k); ok {
		return Timestamp, to
	}
	return Unknown, r.to
}

// offsetsOf returns the offsets between two at which a number of width bytes may be, aligned ones first.
func offsetsOf(first, last, width, size int) []int {
	var aligned, others []int
	for at := first; at <= last && at+width <= size; at++ {
		if at%width == 0 {
			aligned = append(aligned, at)
		} else {
			others = append(others, at)
		}
	}
	return append(aligned, others...)
}

// guessNumber returns the cause that two numbers of 2, 4 or 8 bytes indicate, in either byte order.
func guessNumber(a, b []byte, k Known) Cause {
	for _, order := range []binary.ByteOrder{binary.LittleEndian, binary.BigEndian} {
		switch len(a) {
		case 2: // file systems had such numbers of users
			if x, y := uint32(order.Uint16(a)), uint32(order.Uint16(b)); k.timed() && k.isOwner(x, y) {
				return Owner
			}
			continue
		case 4:
			x, y := order.Uint32(a), order.Uint32(b)
			switch {
			case k.mayBeTimes(uint64(x), uint64(y)) &&
				k.times(time.Unix(int64(x), 0), time.Unix(int64(y), 0), time.Second):
				return Timestamp
			case k.isOwner(x, y):
				return Owner
			}
			continue
		}
		x, y := order.Uint64(a), order.Uint64(b)
		switch {
		case isAddress(x) && isAddress(y) && !k.both(func(f *Facts) bool { return f.FixedLayout }):
			return Address
		case k.mayBeTimes(x, y) && k.timeNumbers(x, y):
			return Timestamp
		}
	}
	return Unknown
}

// isOwner reports whether two numbers are those of the users of the runs, or of the owners of inputs.
func (k Known) isOwner(x, y uint32) bool {
	return x != y && k.A != nil && k.B != nil &&
		(x == k.A.UID && y == k.B.UID || x == k.A.InputOwner && y == k.B.InputOwner)
}

// isAddress reports whether v is an address of a program, library, stack or mapping on Linux for amd64 or arm64.
func isAddress(v uint64) bool {
	high := v >> 32
	return 0x5500 <= high && high < 0x5700 || 0x7e00 <= high && high < 0x8000 || // 47 bits
		0xaaaa <= high && high < 0xaab0 || 0xfff0 <= high && high < 0x10000 // 48 bits
}

// mayBeTimes reports whether two numbers are more than small numbers in the other order of bytes, which without facts
// look like times.
func (k Known) mayBeTimes(x, y uint64) bool { return k.timed() || x&0xffff != 0 && y&0xffff != 0 }

// timeNumbers reports whether two numbers are times in a usual unit.
func (k Known) timeNumbers(x, y uint64) bool {
	for unit := time.Second; unit >= time.Nanosecond; unit /= 1000 {
		most := uint64(math.MaxInt64 / int64(unit))
		if unit == time.Second {
			most = math.MaxUint32 // else the bytes of most texts would be times
		}
		if x <= most && y <= most && k.times(inUnits(x, unit), inUnits(y, unit), unit) {
			return true
		}
	}
	p, q := math.Float64frombits(x), math.Float64frombits(y)
	return p > 1e9 && p < 1e10 && q > 1e9 && q < 1e10 &&
		k.times(inUnits(uint64(p), time.Second), inUnits(uint64(q), time.Second), time.Second)
}

func inUnits(v uint64, unit time.Duration) time.Time {
	per := uint64(time.Second / unit)
	return time.Unix(int64(v/per), int64(v%per)*int64(unit))
}

// Without facts, times must be recent and not far apart.
var (
	firstTime = time.Unix(14e8, 0) // 2014
	lastTime  = time.Unix(22e8, 0) // 2039
)

const farApart = 5 * 366 * 24 * time.Hour

// times reports whether s and t, in a unit, are times of the two runs or, without facts, of any two runs.
func (k Known) times(s, t time.Time, unit time.Duration) bool {
	if k.timed() {
		return k.A.ran(s, unit) && k.B.ran(t, unit)
	}
	if unit != time.Second && s.Sub(t).Abs() < 256*unit {
		return false // too close for two runs
	}
	return s.After(firstTime) && t.After(firstTime) && s.Before(lastTime) && t.Before(lastTime) &&
		s.Sub(t).Abs() < farApart
}

// ran reports whether the command ran at t, which was truncated to a unit.
func (f *Facts) ran(t time.Time, unit time.Duration) bool {
	end := f.End
	if end.IsZero() {
		end = f.Start.Add(time.Hour)
	}
	return !t.Before(f.Start.Add(-unit)) && !t.After(end.Add(time.Second))
}

// timed reports whether the times of both runs are known.
func (k Known) timed() bool { return k.both(func(f *Facts) bool { return !f.Start.IsZero() }) }

// both reports whether is holds for the facts of both sides.
func (k Known) both(is func(*Facts) bool) bool {
	return k.A != nil && k.B != nil && is(k.A) && is(k.B)
}

// Limits of the bytes that are checked for randomness.
const (
	minDisorder = 8
	maxDisorder = 4096
)

// disorder reports whether random bytes begin at from in both slices, and their end.
func disorder(a, b []byte, from int) (int, bool) {
	to, equal := from, 0
	for i := from; i < len(a) && i < from+maxDisorder && equal <= 2; i++ {
		if a[i] == b[i] {
			equal++ // one byte in 256 is equal by chance
			continue
		}
		equal, to = 0, i+1
	}
	if to-from < minDisorder {
		return 0, false
	}
	return to, spread(a[from:to]) && spread(b[from:to])
}

// spread reports whether s has about as many distinct bytes as random data, unlike text, code and numbers.
func spread(s []byte) bool {
	var has [256]bool
	high, kinds := 0, 0
	for _, c := range s {
		if c >= 0x80 {
			high++
		}
		if !has[c] {
			has[c] = true
			kinds++
		}
	}
	expected := 256 * (1 - math.Pow(255.0/256, float64(len(s))))
	return float64(kinds) >= 0.85*expected && high*5 >= len(s) && high*5 <= 4*len(s)
}
