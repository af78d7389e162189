// SPDX-License-Identifier: Apache-2.0

package compare

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"

	"github.com/cloister-build/cloister/worker/repro/internal/listdiff"
)

// Limits of JSON. Beyond them files are compared as text.
const (
	maxJSON      = 8 << 20
	maxJSONDepth = 200
	maxJSONNodes = 200_000
)

func isJSON(head []byte, name string) bool {
	trimmed := bytes.TrimLeft(head, " \t\r\n")
	return len(trimmed) > 0 && (trimmed[0] == '{' || trimmed[0] == '[') && isTextFile(head, name)
}

// A value is a JSON value. Unlike a map it keeps the order of keys.
type value struct {
	kind     byte // '{', '[' or, for other values, 'v'
	text     string
	keys     []string
	children []*value
}

// compareJSON compares values by their paths, and the order of keys.
func compareJSON(c *comparison, a, b *io.SectionReader) error {
	va, err := c.parseJSON(a)
	if err != nil {
		return err
	}
	vb, err := c.parseJSON(b)
	if err != nil {
		return err
	}
	c.compareValues("$", va, vb)
	return nil
}

func (c *comparison) parseJSON(s *io.SectionReader) (*value, error) {
	if s.Size() > maxJSON {
		return nil, errTooMuch
	}
	d := json.NewDecoder(contextReader{c.ctx, s})
	d.UseNumber()
	left := maxJSONNodes
	v, err := parseValue(d, &left, 0)
	if err != nil {
		return nil, err
	}
	if _, err := d.Token(); err != io.EOF {
		return nil, errors.New("more than one value")
	}
	return v, nil
}

func parseValue(d *json.Decoder, left *int, depth int) (*value, error) {
	if *left--; *left < 0 || depth > maxJSONDepth {
		return nil, errTooMuch
	}
	token, err := d.Token()
	if err != nil {
		return nil, err
	}
	delim, ok := token.(json.Delim)
	if !ok {
		text, err := json.Marshal(token)
		return &value{kind: 'v', text: string(text)}, err
	}
	v := &value{kind: byte(delim)}
	for d.More() {
		if delim == '{' {
			key, err := d.Token()
			if err != nil {
				return nil, err
			}
			v.keys = append(v.keys, fmt.Sprint(key))
		}
		child, err := parseValue(d, left, depth+1)
		if err != nil {
			return nil, err
		}
		v.children = append(v.children, child)
	}
	_, err = d.Token()
	return v, err
}

// compareValues adds the differences of two values at a path.
func (c *comparison) compareValues(path string, a, b *value) {
	switch {
	case c.found.full():
	case a.kind != b.kind:
		c.differ("value of another type", a.String(), b.String(), -1, Unknown, path)
	case a.kind == '{':
		c.compareObjects(path, a, b)
	case a.kind == '[':
		c.compareArrays(path, a, b)
	case a.text != b.text:
		for _, cause := range c.causes(lastKey(path)+": "+a.text, lastKey(path)+": "+b.text) {
			c.differ("value", a.text, b.text, -1, cause, path)
		}
	}
}

// lastKey returns the last key of a path, which names the value.
func lastKey(path string) string {
	return strings.TrimRight(path[strings.LastIndexByte(path, '.')+1:], "[]0123456789")
}

func (c *comparison) compareObjects(path string, a, b *value) {
	inB := make(map[string]int, len(b.keys))
	for j, key := range b.keys {
		inB[key] = j
	}
	both := make(map[string]bool, len(a.keys))
	for i, key := range a.keys {
		if both[key] {
			continue // a duplicate
		}
		j, ok := inB[key]
		if !ok {
			c.differ("key", a.children[i].String(), "", -1, Unknown, below(path, key))
			continue
		}
		both[key] = true
		c.compareValues(below(path, key), a.children[i], b.children[j])
	}
	for j, key := range b.keys {
		if !both[key] {
			c.differ("key", "", b.children[j].String(), -1, Unknown, below(path, key))
		}
	}
	if sameItems(a.keys, b.keys) {
		for i := range a.keys {
			if a.keys[i] != b.keys[i] {
				cause := c.classifier.plausible(HashSeed)
				if sortedByLocale(a.keys, b.keys) {
					cause = Locale
				}
				c.differ("order of keys", strings.Join(a.keys[i:], " "), strings.Join(b.keys[i:], " "), -1, cause, path)
				return
			}
		}
	}
}

func below(path, key string) string { return path + "." + key }

func (c *comparison) compareArrays(path string, a, b *value) {
	itemsA, itemsB := a.items(), b.items()
	if sameItems(itemsA, itemsB) {
		i := 0
		for i < len(itemsA) && itemsA[i] == itemsB[i] {
			i++
		}
		if i < len(itemsA) {
			c.differ("order of items, from item "+strconv.Itoa(i), strings.Join(itemsA[i:], ","),
				strings.Join(itemsB[i:], ","), -1, c.classifier.classifyOrder(unquoted(itemsA), unquoted(itemsB)), path)
			return
		}
	}
	for _, h := range listdiff.Hunks(itemsA, itemsB) {
		n := min(h.EndA-h.A, h.EndB-h.B)
		for i := range n {
			c.compareValues(fmt.Sprintf("%s[%d]", path, h.A+i), a.children[h.A+i], b.children[h.B+i])
		}
		for i := h.A + n; i < h.EndA; i++ {
			c.differ("item", itemsA[i], "", -1, Unknown, fmt.Sprintf("%s[%d]", path, i))
		}
		for i := h.B + n; i < h.EndB; i++ {
			c.differ("item", "", itemsB[i], -1, Unknown, fmt.Sprintf("%s[%d]", path, i))
		}
	}
}

// items returns the texts of the items, shortened, to pair them.
func (v *value) items() []string {
	all := make([]string, len(v.children))
	for i, child := range v.children {
		all[i] = child.String()
	}
	return all
}

func unquoted(items []string) []string {
	all := make([]string, len(items))
	for i, item := range items {
		all[i] = strings.Trim(item, `"`)
	}
	return all
}

// String returns the value as JSON, shortened if it is long.
func (v *value) String() string {
	var b strings.Builder
	v.write(&b)
	return b.String()
}

func (v *value) write(b *strings.Builder) {
	if v.kind == 'v' {
		b.WriteString(v.text[:min(len(v.text), 4*maxText)])
		return
	}
	b.WriteByte(v.kind)
	for i, child := range v.children {
		if i > 0 {
			b.WriteByte(',')
		}
		if b.Len() > 4*maxText {
			b.WriteString(ellipsis)
			break
		}
		if v.kind == '{' {
			b.WriteString(v.keys[i] + ":")
		}
		child.write(b)
	}
	b.WriteByte(v.kind + 2)
}
