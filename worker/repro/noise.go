// SPDX-License-Identifier: Apache-2.0

package repro

import (
	"context"
	"math"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/cloister-build/cloister/worker/repro/compare"
)

// noise holds the locations, by item, that differ although all factors are held.
type noise map[string]map[string]explanation

// An explanation is why a location differs although all factors are held: the responsible factor, or "", and the cause
// that the difference shows.
type explanation struct {
	factor Factor
	cause  compare.Cause
}

// A location is where an item differs, with the cause that the difference shows.
type location struct {
	key    string // of locationKey, or wholeItem
	cause  compare.Cause
	format string // the format of the differing file
	a, b   string // the values
}

// wholeItem is the key of a location that is an entire item.
const wholeItem = "\x00"

// maxPlaced limits the items whose locations are distinguished.
const maxPlaced = 20

// unknown returns the locations in which an item differs in two runs, except known noise.
func (n noise) unknown(ctx context.Context, name string, a, b *Run) []location {
	all := []location{{key: wholeItem}}
	if n[name] != nil || len(n) < maxPlaced {
		all = locationsOf(ctx, name, a, b)
	}
	uptime := b.uptime - a.uptime
	return slices.DeleteFunc(all, func(l location) bool { return n.knows(name, l.key) && !leaps(l.a, l.b, uptime) })
}

var numbers = regexp.MustCompile(`[0-9]+(\.[0-9]+)?`)

// leaps reports whether a number in two texts differs by a duration other than 0, plus or minus an hour, in a usual
// unit. Readings of a running clock always differ, but by that much only if the clock was shifted.
func leaps(a, b string, by time.Duration) bool {
	x, y := numbers.FindAllString(a, -1), numbers.FindAllString(b, -1)
	if by == 0 || len(x) != len(y) {
		return false
	}
	for i := range x {
		before, _ := strconv.ParseFloat(x[i], 64) // both match
		after, _ := strconv.ParseFloat(y[i], 64)
		for _, unit := range []float64{1, 100, 1e3, 1e6, 1e9} { // seconds, clock ticks, and fractions
			if math.Abs((after-before)/unit-by.Seconds()) < time.Hour.Seconds() {
				return true
			}
		}
	}
	return false
}

func (n noise) add(name, key string, e explanation) {
	if n[name] == nil {
		n[name] = map[string]explanation{}
	}
	n[name][key] = e
}

// has reports whether a location of an item shows a cause.
func (n noise) has(name string, cause compare.Cause) bool {
	for _, e := range n[name] {
		if e.cause == cause {
			return true
		}
	}
	return false
}

// beyond returns the items in which two runs differ in more than noise.
func (n noise) beyond(ctx context.Context, a, b *Run) []string {
	return slices.DeleteFunc(differing(a, b), func(name string) bool {
		return n[name] != nil && len(n.unknown(ctx, name, a, b)) == 0
	})
}

func (n noise) knows(name, key string) bool {
	_, all := n[name][wholeItem]
	_, known := n[name][key]
	return all || known
}

func (n noise) explanation(name, key string) explanation {
	if e, ok := n[name][key]; ok {
		return e
	}
	return n[name][wholeItem]
}

// locationsOf returns where an item differs in two runs. If that is unknown, or there are many locations, it returns
// the entire item.
func locationsOf(ctx context.Context, name string, a, b *Run) []location {
	if name == exitCode {
		return []location{{key: wholeItem}}
	}
	const limit = 100 // package compare reports no more
	found, err := differences(ctx, name, a, b)
	if err != nil || len(found) == 0 {
		return []location{{key: wholeItem}}
	}
	var all []location
	for i := range found {
		all = append(all, location{locationKey(&found[i]), found[i].Cause, found[i].Format, found[i].A, found[i].B})
	}
	if len(found) <= limit {
		return all
	}
	whole := location{key: wholeItem, cause: all[0].cause}
	if slices.ContainsFunc(all, func(l location) bool { return l.cause != whole.cause }) {
		whole.cause = compare.Unknown
	}
	return []location{whole}
}

// locationKey identifies the location of a difference regardless of its content.
func locationKey(d *compare.Difference) string {
	what, _, _ := strings.Cut(d.What, ", ") // "content, of 5 and 6 bytes"
	return strings.Join(d.Where, "\x00") + "\x00" + what
}

// exitCode stands for the exit code among the names of items.
const exitCode = "exit code/"

// differing returns the names of the items in which two runs differ.
func differing(a, b *Run) []string {
	var names []string
	for _, name := range itemNames([]Run{*a, *b}) {
		if !a.items[name].equal(b.items[name]) {
			names = append(names, name)
		}
	}
	if a.ExitCode != b.ExitCode || a.Code != b.Code {
		names = append(names, exitCode)
	}
	return names
}

// displayName returns the name of an item in a Verdict.
func displayName(name string) string {
	switch name {
	case stdout:
		return compare.Stdout
	case stderr:
		return compare.Stderr
	case exitCode:
		return "(exit code)"
	}
	return text(name)
}

func displayNames(names []string) []string {
	all := make([]string, 0, len(names))
	for _, name := range names {
		all = append(all, displayName(name))
	}
	return all
}
