// SPDX-License-Identifier: Apache-2.0

package compare

import (
	"errors"
	"fmt"
	"io"
	"strings"
)

// What is read of the members of an archive into memory.
const (
	maxMembers     = 100_000
	maxMemberBytes = 16 << 20 // of names and fields
)

var errManyMembers = errors.New("it has too many members, or too long names")

// A member is one thing in an archive.
type member struct {
	name   string
	fields []field
	// content is what it holds, nil if nothing is held. release is called when it is no longer looked at.
	content func() (s *io.SectionReader, release func(), err error)
	// follows says that it follows from the other members, as an index does.
	follows bool
}

// A field is something that an archive says of a member, or of itself. cause is Unknown where the text is to be looked at.
type field struct {
	what, text string
	cause      Cause
}

// stays is the content of a member that is part of the archive as it is.
func stays(s *io.SectionReader, off, n int64) func() (*io.SectionReader, func(), error) {
	return func() (*io.SectionReader, func(), error) {
		return io.NewSectionReader(s, off, max(0, min(n, s.Size()-off))), func() {}, nil
	}
}

// memory bounds what the members of one archive take.
type memory struct{ members, bytes int }

// take counts a member with so many bytes of names and fields.
func (m *memory) take(n int) error {
	m.members++
	m.bytes += n
	if m.members > maxMembers || m.bytes > maxMemberBytes {
		return errManyMembers
	}
	return nil
}

// compareFields adds the differences between fields of what is called below. They are paired by what they are.
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
	return c.attribute(f.text, other)
}

// compareMembers adds the differences between the members of two archives: their order, those that one has, what is said of each and
// what each holds.
func (c *comparison) compareMembers(a, b []member) error {
	namesA, namesB := distinct(a), distinct(b)
	inB := make(map[string]int, len(b))
	for j, name := range namesB {
		inB[name] = j
	}
	c.compareOrder(namesA, namesB, inB)
	matched := make([]bool, len(b))
	var left []int // of a, that b has not
	for i, name := range namesA {
		j, ok := inB[name]
		if !ok {
			left = append(left, i)
			continue
		}
		matched[j] = true
		if err := c.compareMember(name, &a[i], &b[j]); err != nil {
			return err
		}
	}
	return c.compareRenamed(a, b, namesA, namesB, left, matched)
}

// compareRenamed compares members that only one side has: those that are called the same but for what runs differ in belong together.
func (c *comparison) compareRenamed(a, b []member, namesA, namesB []string, left []int, matched []bool) error {
	t := c.attributor
	renamed := map[string][]int{}
	for j, name := range namesB {
		if !matched[j] {
			renamed[t.canonical(t.b, name)] = append(renamed[t.canonical(t.b, name)], j)
		}
	}
	for _, i := range left {
		name := namesA[i]
		others := renamed[t.canonical(t.a, name)]
		if len(others) == 0 {
			c.oneSided(&a[i], name, "present", "")
			continue
		}
		j := others[0]
		renamed[t.canonical(t.a, name)] = others[1:]
		matched[j] = true
		c.differ("name", name, namesB[j], -1, c.attribute(name, namesB[j]), name)
		if err := c.compareMember(name, &a[i], &b[j]); err != nil {
			return err
		}
	}
	for j, name := range namesB {
		if !matched[j] {
			c.oneSided(&b[j], name, "", "present")
		}
	}
	return nil
}

func (c *comparison) oneSided(m *member, name, a, b string) {
	if m.follows {
		c.follows("member", a, b, -1, Unknown, name)
		return
	}
	c.differ("member", a, b, -1, Unknown, name)
}

// distinct returns the names of members, with a number after those that there are twice.
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

// compareOrder says so if the members that both have are in another order.
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
	if t := c.attributor; collated(common, other) {
		cause = t.orderCause(common, other)
	}
	const shown = 8
	list := func(names []string) string {
		names = names[i:]
		if len(names) > shown {
			names = append(append([]string{}, names[:shown]...), cut)
		}
		return strings.Join(names, " ")
	}
	c.differ("order of members", list(common), list(other), -1, cause)
}

// compareMember compares two members of a name.
func (c *comparison) compareMember(name string, a, b *member) error {
	in := c
	if a.follows || b.follows {
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
		return in.unread(name, err)
	}
	defer release()
	sb, release, err := b.content()
	if err != nil {
		return in.unread(name, err)
	}
	defer release()
	return in.descend(name, sa, sb)
}

// unread says of what is called name that it was not compared, if that is because it takes too much.
func (c *comparison) unread(name string, err error) error {
	if !errors.Is(err, errTooMuch) {
		return err
	}
	c.follows("content, not looked into: "+errTooMuch.Error(), "", "", -1, Unknown, name)
	return nil
}
