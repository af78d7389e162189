// SPDX-License-Identifier: Apache-2.0

package compare

import (
	"fmt"
	"io"
)

// A piece is a named part of a file, such as a section.
type piece struct {
	name string
	data *io.SectionReader
}

// overlap reports whether pieces claim several times the size of the file. Comparing them would take too long.
func overlap(pieces []piece, size int64) bool {
	total := int64(0)
	for _, p := range pieces {
		if total += p.data.Size(); total > 4*size {
			return true
		}
	}
	return false
}

// pieces adds the pieces that only one side has or a difference in their order. Then it calls differ for each pair of
// pieces with the same name and different content.
func (c *comparison) pieces(kind string, a, b []piece, differ func(a, b piece) error) error {
	unique(a)
	unique(b)
	inB := map[string]piece{}
	var namesA, namesB []string
	for _, p := range b {
		inB[p.name] = p
		namesB = append(namesB, p.name)
	}
	for _, p := range a {
		namesA = append(namesA, p.name)
	}
	onlyA, onlyB := subtract(namesA, namesB), subtract(namesB, namesA)
	c.unmatched(kind, onlyA, onlyB)
	if len(onlyA)+len(onlyB) == 0 {
		c.order(kind+"s", namesA, namesB)
	}
	for _, p := range a {
		q, ok := inB[p.name]
		if !ok {
			continue
		}
		at, err := firstDifference(p.data, q.data)
		if err == nil && at >= 0 {
			err = differ(p, q)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// unique names the second piece of a name "NAME [2]".
func unique(pieces []piece) {
	seen := map[string]int{}
	for i := range pieces {
		name := pieces[i].name
		if seen[name]++; seen[name] > 1 {
			pieces[i].name = fmt.Sprintf("%s [%d]", name, seen[name])
		}
	}
}

// withBytes calls see with the contents of a and b in memory, within the limits.
func (c *comparison) withBytes(a, b *io.SectionReader, see func(a, b []byte) error) error {
	dataA, release, err := c.load(a, a.Size())
	if err != nil {
		return err
	}
	defer release()
	dataB, release, err := c.load(b, b.Size())
	if err != nil {
		return err
	}
	defer release()
	return see(dataA, dataB)
}

// load is unpack into bytes.
func (c *comparison) load(r io.Reader, packed int64) (data []byte, release func(), err error) {
	s, release, err := c.unpack(r, packed)
	if err != nil {
		return nil, nil, err
	}
	data, err = window(s, 0, int(s.Size()))
	return data, release, err
}

// pieceContents adds the differences of two pieces. Of large ones it adds the first only.
func (c *comparison) pieceContents(a, b piece) error {
	err := c.withBytes(fromStart(a.data), fromStart(b.data), func(x, y []byte) error {
		c.contents(x, y, a.name)
		return nil
	})
	if err == nil || c.ctx.Err() != nil {
		return c.ctx.Err()
	}
	at, err := firstDifference(a.data, b.data)
	if err != nil || at < 0 {
		return err
	}
	return c.within(a.name).plain(a.data, b.data, at)
}

// firstCause returns the first cause found, for its consequences.
func (c *comparison) firstCause() Cause {
	for _, d := range c.found.diffs {
		if d.Cause != Unknown {
			return d.Cause
		}
	}
	return Unknown
}

// identity adds a difference of an ID that a tool computes from the rest or draws at random. If there are other
// differences it is their consequence.
func (c *comparison) identity(what, a, b string, below ...string) {
	if c.found.none() {
		c.differ(what, a, b, -1, BuildID, below...)
		return
	}
	c.follows(what+", which follows from the rest", a, b, c.firstCause(), below...)
}
