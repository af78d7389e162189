// SPDX-License-Identifier: Apache-2.0

package compare

import (
	"fmt"
	"io"
)

// A piece is a part of a file that has a name there, such as a section.
type piece struct {
	name string
	data *io.SectionReader
}

// overlap reports whether pieces of a file of so many bytes claim more than it has several times: comparing each would
// take as many times as long.
func overlap(pieces []piece, size int64) bool {
	total := int64(0)
	for _, p := range pieces {
		if total += p.data.Size(); total > 4*size {
			return true
		}
	}
	return false
}

// pieces adds the pieces, of this kind, that only one side has, or that their order differs, and then calls differ
// with those of the same name that are different, in their order.
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
	onlyA, onlyB := lessTexts(namesA, namesB), lessTexts(namesB, namesA)
	c.lists(kind, onlyA, onlyB)
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

// unique gives the second piece with a name the name "NAME [2]".
func unique(pieces []piece) {
	seen := map[string]int{}
	for i := range pieces {
		name := pieces[i].name
		if seen[name]++; seen[name] > 1 {
			pieces[i].name = fmt.Sprintf("%s [%d]", name, seen[name])
		}
	}
}

// loaded calls see with the content of two pieces, in memory within the bounds.
func (c *comparison) loaded(a, b *io.SectionReader, see func(a, b []byte) error) error {
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

// pieceContents adds how two pieces differ, below their name; of those too large for memory where they begin to.
func (c *comparison) pieceContents(a, b piece) error {
	err := c.loaded(fromStart(a.data), fromStart(b.data), func(x, y []byte) error {
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

// firstCause is what there was found first, for what follows from it.
func (c *comparison) firstCause() Cause {
	for _, d := range c.found.diffs {
		if d.Cause != Unknown {
			return d.Cause
		}
	}
	return Unknown
}

// identity adds a difference in what a tool computes from all the rest, or draws at random: as a consequence, if
// anything else was found.
func (c *comparison) identity(what, a, b string, offset int64, below ...string) {
	if c.found.none() {
		c.differ(what, a, b, offset, BuildID, below...)
		return
	}
	c.follows(what+", which follows from the rest", a, b, offset, c.firstCause(), below...)
}
