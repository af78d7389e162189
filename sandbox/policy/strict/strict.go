// SPDX-License-Identifier: Apache-2.0

// Package strict decodes configuration files written in a subset of YAML: mappings, lists and scalars. An unknown key
// is an error, and every error gives its position in the file.
package strict

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/agnivade/levenshtein"
	"github.com/goccy/go-yaml/ast"
	"github.com/goccy/go-yaml/parser"
	"github.com/goccy/go-yaml/token"
)

// A SyntaxError is an error at a position in a file.
type SyntaxError struct {
	File         string
	Line, Column int // from 1; the column in characters
	Message      string
	Hint         string // what the author probably meant, or ""

	source []string // the lines up to Line
}

// Error returns the message, the last lines of the file up to the position, and a caret.
func (e *SyntaxError) Error() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s: [%d:%d] %s", e.File, e.Line, e.Column, e.Message)
	var gutter string
	for i := max(0, len(e.source)-3); i < len(e.source); i++ {
		mark := ' '
		if i == len(e.source)-1 {
			mark = '>'
		}
		gutter = fmt.Sprintf("%c%3d | ", mark, i+1)
		fmt.Fprintf(&b, "\n%s%s", gutter, e.source[i])
	}
	fmt.Fprintf(&b, "\n%*s^", len(gutter)+e.Column-1, "")
	if e.Hint != "" {
		fmt.Fprintf(&b, " did you mean %q?", e.Hint)
	}
	return b.String()
}

// A Node is a part of a file: a mapping, a list or a scalar.
type Node struct{ yaml ast.Node }

// IsMapping reports whether n is a mapping.
func (n *Node) IsMapping() bool {
	switch n.yaml.(type) {
	case *ast.MappingNode, *ast.MappingValueNode:
		return true
	}
	return false
}

// IsSequence reports whether n is a list.
func (n *Node) IsSequence() bool {
	_, ok := n.yaml.(*ast.SequenceNode)
	return ok
}

// maxBytes is far more than a person writes. The parser's time grows with the square of the nesting depth, and its
// stack with the depth.
const maxBytes = 64 << 10

// A Decoder decodes one file. It accepts mappings, sequences and scalars, but no anchors, aliases, merges or tags. It
// is not safe for concurrent use.
type Decoder struct {
	file, what string
	lines      []string // printable, one column per character
}

// NewDecoder returns a Decoder for text. The file's name and a noun phrase for the file, such as "a policy", appear in
// messages.
func NewDecoder(file, what string, text []byte) *Decoder {
	printable := func(r rune) rune {
		if r == '\t' {
			return ' '
		}
		if !unicode.IsPrint(r) {
			return '?'
		}
		return r
	}
	d := &Decoder{file: file, what: what}
	for line := range strings.SplitSeq(string(text), "\n") {
		d.lines = append(d.lines, strings.Map(printable, strings.TrimSuffix(line, "\r")))
	}
	return d
}

// errorAt returns an error at a position, which it clamps to the text.
func (d *Decoder) errorAt(line, column int, hint, format string, args ...any) error {
	line = min(max(line, 1), len(d.lines))
	column = min(max(column, 1), utf8.RuneCountInString(d.lines[line-1])+1)
	return &SyntaxError{
		File: d.file, Line: line, Column: column, Message: fmt.Sprintf(format, args...), Hint: hint,
		source: d.lines[:line],
	}
}

// Errorf returns an error at a node.
func (d *Decoder) Errorf(n *Node, format string, args ...any) error {
	return d.suggest(n, "", format, args...)
}

func (d *Decoder) suggest(n *Node, hint, format string, args ...any) error {
	line, column := 1, 1
	if t := start(n.yaml); t != nil && t.Position != nil {
		line, column = t.Position.Line, t.Position.Column
	}
	return d.errorAt(line, column, hint, format, args...)
}

// At returns the position of a node as FILE:LINE.
func (d *Decoder) At(n *Node) string {
	return fmt.Sprintf("%s:%d", d.file, start(n.yaml).Position.Line)
}

// start returns the first token of a node, which for a block mapping is its first key.
func start(n ast.Node) *token.Token {
	if m, ok := n.(*ast.MappingNode); ok && !m.IsFlowStyle && len(m.Values) > 0 {
		return m.Values[0].Key.GetToken()
	}
	return n.GetToken()
}

// Parse returns the only document of text.
func (d *Decoder) Parse(text []byte) (*Node, error) {
	if len(text) > maxBytes {
		return nil, d.errorAt(1, 1, "", "the file has %d bytes, but %s may have at most %d", len(text), d.what, maxBytes)
	}
	if !utf8.Valid(text) {
		return nil, d.errorAt(1, 1, "", "the file is not UTF-8 text")
	}
	f, err := parser.ParseBytes(text, 0)
	if err != nil {
		var at interface {
			GetToken() *token.Token
			GetMessage() string
		}
		if errors.As(err, &at) && at.GetToken() != nil && at.GetToken().Position != nil {
			p := at.GetToken().Position
			return nil, d.errorAt(p.Line, p.Column, "", "%s", at.GetMessage())
		}
		return nil, d.errorAt(1, 1, "", "%v", err)
	}
	var bodies []*Node
	for _, doc := range f.Docs {
		if doc.Body != nil {
			bodies = append(bodies, &Node{doc.Body})
		}
	}
	switch len(bodies) {
	case 0:
		return nil, d.errorAt(1, 1, "", "the file is empty: write version: 1")
	case 1:
		return bodies[0], nil
	}
	return nil, d.Errorf(bodies[1], "a second document begins here, but %s is a single document", d.what)
}

// Entries calls f for each entry of a mapping, in order. The parser refuses duplicate keys.
func (d *Decoder) Entries(n *Node, f func(name string, key, value *Node) error) error {
	var pairs []*ast.MappingValueNode
	switch m := n.yaml.(type) {
	case *ast.MappingNode:
		pairs = m.Values
	case *ast.MappingValueNode:
		pairs = []*ast.MappingValueNode{m}
	default:
		return d.Errorf(n, "expected a mapping, such as {key: value}")
	}
	for _, pair := range pairs {
		key := &Node{pair.Key}
		name, err := d.Scalar(key)
		if err != nil {
			return err
		}
		if err := f(name, key, &Node{pair.Value}); err != nil {
			return err
		}
	}
	return nil
}

// Keys are the functions that decode the values of a mapping, by key.
type Keys map[string]func(value *Node) error

// Mapping decodes a mapping of known keys.
func (d *Decoder) Mapping(n *Node, known Keys) error {
	return d.Entries(n, func(name string, key, value *Node) error {
		read, ok := known[name]
		if !ok {
			return d.Unknown(key, "key", name, slices.Sorted(maps.Keys(known)))
		}
		return read(value)
	})
}

// Unknown returns the error for a name that is not among those known.
func (d *Decoder) Unknown(n *Node, what, name string, known []string) error {
	if nearest := Nearest(name, known); nearest != "" {
		return d.suggest(n, nearest, "unknown %s %q", what, name)
	}
	return d.Errorf(n, "unknown %s %q: write one of %s", what, name, strings.Join(known, ", "))
}

// Sequence calls f for each element of a list.
func (d *Decoder) Sequence(n *Node, f func(*Node) error) error {
	s, ok := n.yaml.(*ast.SequenceNode)
	if !ok {
		return d.Errorf(n, "expected a list, such as [a, b]")
	}
	for _, v := range s.Values {
		if err := f(&Node{v}); err != nil {
			return err
		}
	}
	return nil
}

// Scalar returns the text of a plain or quoted scalar on one line, as written: 08 is "08".
func (d *Decoder) Scalar(n *Node) (string, error) {
	switch v := n.yaml.(type) {
	case *ast.StringNode:
		return v.Value, nil
	case *ast.IntegerNode, *ast.FloatNode, *ast.BoolNode:
		return v.GetToken().Value, nil
	case *ast.MappingNode:
		if text, ok := rejoined(v); ok {
			return text, nil
		}
	}
	return "", d.Errorf(n, "expected one value, on one line")
}

// rejoined returns the plain scalar "a:b". In a list inside braces the parser takes it for a mapping, although YAML
// requires a space after the colon of a mapping (go-yaml issue 832).
func rejoined(n *ast.MappingNode) (string, bool) {
	if len(n.Values) != 1 || n.Start.Type != token.MappingValueType {
		return "", false
	}
	key, colon, value := n.Values[0].Key.GetToken(), n.Start.Position, n.Values[0].Value.GetToken()
	if key.Type != token.StringType || value.Position.Line != colon.Line || value.Position.Column != colon.Column+1 {
		return "", false
	}
	return key.Value + ":" + value.Value, true
}

// Nearest returns the name of which s is most likely a misspelling, or "".
func Nearest(s string, names []string) string {
	best, least := "", 2+len(s)/4
	for _, name := range names {
		if d := levenshtein.ComputeDistance(s, name); d < least {
			best, least = name, d
		}
	}
	return best
}
