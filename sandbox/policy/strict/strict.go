// SPDX-License-Identifier: Apache-2.0

// Package strict reads files that operators write: YAML of mappings, lists and scalars alone, in which a key that
// nobody reads is a mistake. Each mistake is told with its place in the file. It knows neither what a file means nor
// where it lies.
package strict

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/goccy/go-yaml/ast"
	"github.com/goccy/go-yaml/parser"
	"github.com/goccy/go-yaml/token"
)

// A SyntaxError is a mistake in a file, with its place.
type SyntaxError struct {
	File         string
	Line, Column int    // from 1; the column in characters
	Message      string // what is wrong
	Hint         string // what was probably meant, or ""

	source []string // the lines up to this one
}

// Error returns several lines: the message, the lines of the file that lead to the place, and a caret.
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

// maxBytes is far more than a person writes. The parser's time grows with the square of how deep a text
// nests, and its stack with the depth.
const maxBytes = 64 << 10

// A Decoder reads the nodes of one file. It accepts mappings, sequences and scalars, and none of YAML's
// ways to say something elsewhere than where it applies: anchors, aliases, merges and tags. It is for one goroutine.
type Decoder struct {
	file, what string
	lines      []string // printable, a column a character
}

// NewDecoder returns a Decoder of text. The file's name, and what the file is ("a policy"), are for messages alone.
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

// errorAt returns a mistake at a place. A place outside the text is moved to its end.
func (d *Decoder) errorAt(line, column int, hint, format string, args ...any) error {
	line = min(max(line, 1), len(d.lines))
	column = min(max(column, 1), utf8.RuneCountInString(d.lines[line-1])+1)
	return &SyntaxError{
		File: d.file, Line: line, Column: column, Message: fmt.Sprintf(format, args...), Hint: hint, source: d.lines[:line],
	}
}

// Errorf returns a mistake at a node.
func (d *Decoder) Errorf(n ast.Node, format string, args ...any) error {
	return d.suggest(n, "", format, args...)
}

func (d *Decoder) suggest(n ast.Node, hint, format string, args ...any) error {
	line, column := 1, 1
	if t := start(n); t != nil && t.Position != nil {
		line, column = t.Position.Line, t.Position.Column
	}
	return d.errorAt(line, column, hint, format, args...)
}

// At returns where a node is, for a person.
func (d *Decoder) At(n ast.Node) string {
	return fmt.Sprintf("%s:%d", d.file, start(n).Position.Line)
}

// start returns the first token of a node. That of a mapping in several lines is its first key.
func start(n ast.Node) *token.Token {
	if m, ok := n.(*ast.MappingNode); ok && !m.IsFlowStyle && len(m.Values) > 0 {
		return m.Values[0].Key.GetToken()
	}
	return n.GetToken()
}

// Parse returns the one document of text.
func (d *Decoder) Parse(text []byte) (ast.Node, error) {
	if len(text) > maxBytes {
		return nil, d.errorAt(1, 1, "", "the file has %d bytes: %s has at most %d", len(text), d.what, maxBytes)
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
	var bodies []ast.Node
	for _, doc := range f.Docs {
		if doc.Body != nil {
			bodies = append(bodies, doc.Body)
		}
	}
	switch len(bodies) {
	case 0:
		return nil, d.errorAt(1, 1, "", "the file says nothing: write version: 1")
	case 1:
		return bodies[0], nil
	}
	return nil, d.Errorf(bodies[1], "a second document begins here: %s is one", d.what)
}

// Entries calls f for each pair of a mapping, in order. The parser has refused a name that occurs twice.
func (d *Decoder) Entries(n ast.Node, f func(name string, key, value ast.Node) error) error {
	var pairs []*ast.MappingValueNode
	switch n := n.(type) {
	case *ast.MappingNode:
		pairs = n.Values
	case *ast.MappingValueNode:
		pairs = []*ast.MappingValueNode{n}
	default:
		return d.Errorf(n, "a mapping belongs here, as {key: value}")
	}
	for _, pair := range pairs {
		name, err := d.Scalar(pair.Key)
		if err != nil {
			return err
		}
		if err := f(name, pair.Key, pair.Value); err != nil {
			return err
		}
	}
	return nil
}

// Keys are what a mapping may say, and who reads it.
type Keys map[string]func(value ast.Node) error

// Mapping reads a mapping of known keys.
func (d *Decoder) Mapping(n ast.Node, known Keys) error {
	return d.Entries(n, func(name string, key, value ast.Node) error {
		read, ok := known[name]
		if !ok {
			return d.Unknown(key, "key", name, slices.Sorted(maps.Keys(known)))
		}
		return read(value)
	})
}

// Unknown returns a mistake in a name that should be one of several.
func (d *Decoder) Unknown(n ast.Node, what, name string, known []string) error {
	if near := Nearest(name, known); near != "" {
		return d.suggest(n, near, "unknown %s %q", what, name)
	}
	return d.Errorf(n, "unknown %s %q: one of %s belongs here", what, name, strings.Join(known, ", "))
}

// Sequence calls f for each element of a list.
func (d *Decoder) Sequence(n ast.Node, f func(ast.Node) error) error {
	s, ok := n.(*ast.SequenceNode)
	if !ok {
		return d.Errorf(n, "a list belongs here, as [a, b]")
	}
	for _, v := range s.Values {
		if err := f(v); err != nil {
			return err
		}
	}
	return nil
}

// Scalar returns the text of a plain or quoted scalar in one line, as it is written: 08 is "08".
func (d *Decoder) Scalar(n ast.Node) (string, error) {
	switch n := n.(type) {
	case *ast.StringNode:
		return n.Value, nil
	case *ast.IntegerNode, *ast.FloatNode, *ast.BoolNode:
		return n.GetToken().Value, nil
	case *ast.MappingNode:
		if text, ok := rejoined(n); ok {
			return text, nil
		}
	}
	return "", d.Errorf(n, "one value belongs here, in one line")
}

// rejoined returns the plain scalar "a:b". In a list inside of braces the parser takes it for a mapping,
// which YAML has only where a space follows the colon (go-yaml issue 832).
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

// Nearest returns the name that s is most likely a misspelling of, or "".
func Nearest(s string, names []string) string {
	best, least := "", 2+len(s)/4
	for _, name := range names {
		if d := distance(s, name); d < least {
			best, least = name, d
		}
	}
	return best
}

// distance is Levenshtein's: how many bytes must be added, removed or changed.
func distance(a, b string) int {
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		diagonal := row[0]
		row[0] = i + 1
		for j := range len(b) {
			changed := diagonal
			if a[i] != b[j] {
				changed++
			}
			diagonal = row[j+1]
			row[j+1] = min(changed, row[j]+1, row[j+1]+1)
		}
	}
	return row[len(b)]
}
