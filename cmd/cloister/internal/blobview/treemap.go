// SPDX-License-Identifier: Apache-2.0

package blobview

import (
	"cmp"
	"slices"
)

// A Rect is a rectangle of a treemap.
type Rect struct {
	X, Y, W, H float64
	Entry
	Inner bool // it is inside another one
}

// Size of a treemap, and the number of entries that it shows of the directory and of each subdirectory.
const (
	mapWidth, mapHeight = 960, 320
	outerEntries        = 24
	innerEntries        = 8
)

// Treemap returns the rectangles of the largest entries of a directory and of its subdirectories, by size.
func (t *Inputs) Treemap(entries []Entry) []Rect {
	var all []Rect
	for _, outer := range divide(largest(entries, outerEntries), 0, 0, mapWidth, mapHeight) {
		all = append(all, outer)
		if outer.Kind != Directory || outer.W < 20 || outer.H < 20 {
			continue
		}
		m, err := t.read(outer.Digest)
		if err != nil {
			continue
		}
		below, err := t.entries(m, outer.Path)
		if err != nil {
			continue
		}
		const border, title = 3, 14
		for _, inner := range divide(largest(below, innerEntries), outer.X+border, outer.Y+title, outer.W-2*border, outer.H-title-border) {
			inner.Inner = true
			all = append(all, inner)
		}
	}
	return all
}

// largest returns the largest entries, the largest first.
func largest(entries []Entry, n int) []Entry {
	all := slices.DeleteFunc(slices.Clone(entries), func(e Entry) bool { return e.Bytes <= 0 })
	slices.SortStableFunc(all, func(a, b Entry) int { return cmp.Compare(b.Bytes, a.Bytes) })
	return all[:min(len(all), n)]
}

// divide divides a rectangle among entries by size: it halves them by weight and cuts along the longer side.
func divide(entries []Entry, x, y, w, h float64) []Rect {
	switch len(entries) {
	case 0:
		return nil
	case 1:
		return []Rect{{X: x, Y: y, W: w, H: h, Entry: entries[0]}}
	}
	var total, first float64
	for _, e := range entries {
		total += float64(e.Bytes)
	}
	n := 0
	for n < len(entries)-1 && (n == 0 || first+float64(entries[n].Bytes) <= total/2) {
		first += float64(entries[n].Bytes)
		n++
	}
	part := first / total
	if w >= h {
		return append(divide(entries[:n], x, y, w*part, h), divide(entries[n:], x+w*part, y, w*(1-part), h)...)
	}
	return append(divide(entries[:n], x, y, w, h*part), divide(entries[n:], x, y+h*part, w, h*(1-part))...)
}
