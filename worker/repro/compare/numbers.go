// SPDX-License-Identifier: Apache-2.0

package compare

import (
	"encoding/binary"
	"math"
	"time"
)

// maxRuns bounds the differing places that are looked at: a cause shows in the first few or not at all.
const maxRuns = 256

// numbers returns what the bytes in which a and b differ look like, or Unknown: the times of the two runs, addresses,
// user ids, or bytes without any order. It compares a and b place by place, so that it tells nothing of two things one
// of which has more bytes before the place. Where several causes show it returns the one that shows most often, and
// none that shows in few places of many: any number looks like a time somewhere.
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

// A tally counts what differing places look like.
type tally struct {
	first map[Cause]run
	seen  map[Cause]int
	runs  int
	facts bool
}

// add counts the run, and returns where to look on.
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

// most returns the cause that most places show, and the first of these: Unknown if it shows in few of them.
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

// A run is a stretch of bytes, from its first to behind its last, in which two slices differ at each.
type run struct{ from, to int }

// nextRun returns the first run of a and b, which are of one length, that begins at from or later.
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

// guessRun returns what the run looks like, and where to look on: behind the number of which it is a part.
func guessRun(a, b []byte, r run, k Known) (Cause, int) {
	if to, ok := disorder(a, b, r.from); ok && !k.both(func(f *Facts) bool { return f.HeldRandom }) {
		return Random, to
	}
	for _, width := range []int{8, 4} {
		for _, at := range placesOf(r, width, len(a)) {
			if at%4 != 0 && !k.timed() {
				break // without facts the numbers of most places would be times
			}
			if c := guessNumber(a[at:at+width], b[at:at+width], k); c != Unknown {
				return c, at + width
			}
		}
	}
	return Unknown, r.to
}

// placesOf returns where a number of width bytes may begin that has the run within it, in data of size bytes: first
// the places where compilers put them, then the others.
func placesOf(r run, width, size int) []int {
	var aligned, others []int
	for at := max(0, r.to-width); at <= r.from && at+width <= size; at++ {
		if at%width == 0 {
			aligned = append(aligned, at)
		} else {
			others = append(others, at)
		}
	}
	return append(aligned, others...)
}

// guessNumber returns what two numbers of 4 or 8 bytes look like, in either order of bytes.
func guessNumber(a, b []byte, k Known) Cause {
	for _, order := range []binary.ByteOrder{binary.LittleEndian, binary.BigEndian} {
		if len(a) == 4 {
			x, y := order.Uint32(a), order.Uint32(b)
			switch {
			case k.mayBeTimes(uint64(x), uint64(y)) && k.times(time.Unix(int64(x), 0), time.Unix(int64(y), 0), time.Second):
				return Timestamp
			case k.A != nil && k.B != nil && k.A.UID != k.B.UID && x == k.A.UID && y == k.B.UID:
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

// isAddress reports whether v is where the kernels of amd64 and arm64 put programs, libraries, stacks and mappings.
func isAddress(v uint64) bool {
	high := v >> 32
	return 0x5500 <= high && high < 0x5700 || 0x7e00 <= high && high < 0x8000 || // 47 bits
		0xaaaa <= high && high < 0xaab0 || 0xfff0 <= high && high < 0x10000 // 48 bits
}

// mayBeTimes reports whether two numbers are more than small numbers in the other order of bytes, which without facts
// look like times.
func (k Known) mayBeTimes(x, y uint64) bool { return k.timed() || x&0xffff != 0 && y&0xffff != 0 }

// timeNumbers reports whether two numbers are times, in any of the usual units.
func (k Known) timeNumbers(x, y uint64) bool {
	for unit := time.Second; unit >= time.Nanosecond; unit /= 1000 {
		most := uint64(math.MaxInt64 / int64(unit))
		if unit == time.Second {
			most = math.MaxUint32 // or the bytes of most texts would be times
		}
		if x <= most && y <= most && k.times(inUnits(x, unit), inUnits(y, unit), unit) {
			return true
		}
	}
	p, q := math.Float64frombits(x), math.Float64frombits(y)
	return p > 1e9 && p < 1e10 && q > 1e9 && q < 1e10 && k.times(inUnits(uint64(p), time.Second), inUnits(uint64(q), time.Second), time.Second)
}

func inUnits(v uint64, unit time.Duration) time.Time {
	per := uint64(time.Second / unit)
	return time.Unix(int64(v/per), int64(v%per)*int64(unit))
}

// Times that are not known to be those of a run must look like it: they are of these years, and not far apart.
var (
	firstTime = time.Unix(14e8, 0) // 2014
	lastTime  = time.Unix(22e8, 0) // 2039
)

const farApart = 5 * 366 * 24 * time.Hour

// times reports whether s and t, in the named unit, are times of the two runs, or of two runs where nothing is known
// of these.
func (k Known) times(s, t time.Time, unit time.Duration) bool {
	if k.timed() {
		return k.A.ran(s, unit) && k.B.ran(t, unit)
	}
	if unit != time.Second && s.Sub(t).Abs() < 256*unit {
		return false // no two runs are as near
	}
	return s.After(firstTime) && t.After(firstTime) && s.Before(lastTime) && t.Before(lastTime) &&
		s.Sub(t).Abs() < farApart
}

// ran reports whether the command ran at t, which was cut to a unit.
func (f *Facts) ran(t time.Time, unit time.Duration) bool {
	end := f.End
	if end.IsZero() {
		end = f.Start.Add(time.Hour)
	}
	return !t.Before(f.Start.Add(-unit)) && !t.After(end.Add(time.Second))
}

// timed reports whether it is known when both commands ran.
func (k Known) timed() bool { return k.both(func(f *Facts) bool { return !f.Start.IsZero() }) }

// both reports whether something is known of both sides.
func (k Known) both(is func(*Facts) bool) bool {
	return k.A != nil && k.B != nil && is(k.A) && is(k.B)
}

// Bytes without order: at least minDisorder of them, of which few occur twice.
const (
	minDisorder = 8
	maxDisorder = 4096
)

// disorder reports whether bytes of no order begin at from in both slices, and where they end.
func disorder(a, b []byte, from int) (int, bool) {
	to, equal := from, 0
	for i := from; i < len(a) && i < from+maxDisorder && equal <= 2; i++ {
		if a[i] == b[i] {
			equal++ // one in 256 is equal by chance
			continue
		}
		equal, to = 0, i+1
	}
	if to-from < minDisorder {
		return 0, false
	}
	return to, spread(a[from:to]) && spread(b[from:to])
}

// spread reports whether the bytes are as many different ones as random bytes would be, or nearly: neither text nor
// code nor numbers are.
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
