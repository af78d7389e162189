// SPDX-License-Identifier: Apache-2.0

package compare

import (
	"errors"
	"fmt"
	"io"
	"strings"
)

// Limits of the members of an archive that are read into memory.
const (
	maxMembers     = 100_000
	maxMemberBytes = 16 << 20 // of names and fields
)

var errManyMembers = errors.New("too many members or too long names")

// A member is a member of an archive.
type member struct {
	name   string
	fields []field
	// content opens the content; nil if there is none. The caller calls release when done.
	content func() (s *io.SectionReader, release func(), err error)
	// derived means that it follows from the other members, like an index.
	derived bool
}

// A field is a property of a member or an archive. If cause is Unknown the text determines it.
type field struct {
	what, text string
	cause      Cause
}

// inPlace returns the content of an uncompressed member.
func inPlace(s *io.SectionReader, off, n int64) func() (*io.SectionReader, func(), error) {
	return func() (*io.SectionReader, func(), error) {
		return io.NewSectionReader(s, off, max(0, min(n, s.Size()-off))), func() {}, nil
	}
}

// A memberLimit limits the memory that the members of an archive take.
type memberLimit struct{ members, bytes int }

// take counts a member with n bytes of names and fields.
func (m *memberLimit) take(n int) error {
	m.members++
	m.bytes += n
	if m.members > maxMembers || m.bytes > maxMemberBytes {
		return errManyMembers
	}
	return nil
}

// compareFields adds the fields that differ.
func (c *comparison) compareFields(a, b []field, below ...string) {
	inB := make(map[string]string, len(b))
	for _, f := range b {
		inB[f.what] = f.text
	}
	for _, f := range a {
		text, ok := inB[f.what]
		delete(inB, f.what)
		if ok && text == f.text {
			continue
		}
		c.differ(f.what, f.text, text, -1, c.fieldCause(f, text), below...)
	}
	for _, f := range b {
		if _, ok := inB[f.what]; ok {
			c.differ(f.what, "", f.text, -1, c.fieldCause(f, ""), below...)
		}
	}
}

func (c *comparison) fieldCause(f field, other string) Cause {
	if f.cause != Unknown {
		return f.cause
	}
	return c.classify(f.text, other)
}

// compareMembers adds the differences of the members of two archives: order, missing members, fields and contents.
func (c *comparison) compareMembers(a, b []member) error {
	namesA, namesB := distinct(a), distinct(b)
	inB := make(map[string]int, len(b))
	for j, name := range namesB {
		inB[name] = j
	}
	c.compareOrder(namesA, namesB, inB)
	inA := make(map[string]int, len(a))
	for i, name := range namesA {
		inA[name] = i
		if j, ok := inB[name]; ok {
			if err := c.compareMember(name, &a[i], &b[j]); err != nil {
				return err
			}
		}
	}
	renamed, onlyA, onlyB := c.renamed(subtract(namesA, namesB), subtract(namesB, namesA))
	for _, pair := range renamed {
		name, other := pair[0], pair[1]
		c.differ("name", name, other, -1, c.classify(name, other), name)
		if err := c.compareMember(name, &a[inA[name]], &b[inB[other]]); err != nil {
			return err
		}
	}
	for _, name := range onlyA {
		c.oneSided(&a[inA[name]], name, "present", "")
	}
	for _, name := range onlyB {
		c.oneSided(&b[inB[name]], name, "", "present")
	}
	return nil
}

// renamed pairs names that only one side has and that differ only in words that depend on the run. It also returns the
// other names in their order.
func (c *comparison) renamed(namesA, namesB []string) (pairs [][2]string, onlyA, onlyB []string) {
	t := c.classifier
	normalized := func(name string) string { // by both lexers, since a name may contain a fact of the other side
		return t.normalized(t.b, t.normalized(t.a, name))
	}
	inB := map[string][]string{} // by their normalized form
	for _, name := range namesB {
		inB[normalized(name)] = append(inB[normalized(name)], name)
	}
	var paired []string
	for _, name := range namesA {
		key := normalized(name)
		if len(inB[key]) == 0 {
			onlyA = append(onlyA, name)
			continue
		}
		pairs = append(pairs, [2]string{name, inB[key][0]})
		paired = append(paired, inB[key][0])
		inB[key] = inB[key][1:]
	}
	return pairs, onlyA, subtract(namesB, paired)
}

func (c *comparison) oneSided(m *member, name, a, b string) {
	if m.derived {
		c.follows("member", a, b, Unknown, name)
		return
	}
	c.differ("member", a, b, -1, Unknown, name)
}

// distinct returns the names of members. It numbers duplicates.
func distinct(ms []member) []string {
	times := make(map[string]int, len(ms))
	names := make([]string, len(ms))
	for i, m := range ms {
		names[i] = m.name
		if times[m.name]++; times[m.name] > 1 {
			names[i] = fmt.Sprintf("%s (%d)", m.name, times[m.name])
		}
	}
	return names
}

// compareOrder adds a difference if the common members are in a different order.
func (c *comparison) compareOrder(a, b []string, inB map[string]int) {
	var common []string
	isCommon := make(map[string]bool, len(a))
	for _, name := range a {
		if _, ok := inB[name]; ok && !isCommon[name] {
			common = append(common, name)
			isCommon[name] = true
		}
	}
	i := 0
	other := make([]string, 0, len(common))
	for _, name := range b {
		if isCommon[name] {
			other = append(other, name)
			isCommon[name] = false
		}
	}
	for i < len(common) && common[i] == other[i] {
		i++
	}
	if i == len(common) {
		return
	}
	cause := MemberOrder
	if t := c.classifier; sortedByLocale(common, other) {
		cause = t.classifyOrder(common, other)
	}
	const shown = 8
	list := func(names []string) string {
		names = names[i:]
		if len(names) > shown {
			names = append(append([]string{}, names[:shown]...), ellipsis)
		}
		return strings.Join(names, " ")
	}
	c.differ("order of members", list(common), list(other), -1, cause)
}

// compareMember compares two members.
func (c *comparison) compareMember(name string, a, b *member) error {
	in := c
	if a.derived || b.derived {
		sub := *c
		sub.found = &findings{}
		in = &sub
		defer func() {
			for _, d := range sub.found.all() {
				c.found.addAfter(d)
			}
		}()
	}
	in.compareFields(a.fields, b.fields, name)
	if a.content == nil || b.content == nil {
		return nil
	}
	sa, release, err := a.content()
	if err != nil {
		return in.skipTooMuch(name, err)
	}
	defer release()
	sb, release, err := b.content()
	if err != nil {
		return in.skipTooMuch(name, err)
	}
	defer release()
	return in.descend(name, sa, sb)
}

// skipTooMuch turns errTooMuch into a difference that tells that the content was not compared.
func (c *comparison) skipTooMuch(name string, err error) error {
	if !errors.Is(err, errTooMuch) {
		return err
	}
	c.follows("content, not compared: "+errTooMuch.Error(), "", "", Unknown, name)
	return nil
}
