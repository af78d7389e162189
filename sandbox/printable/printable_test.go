// SPDX-License-Identifier: Apache-2.0

package printable_test

import (
	"math"
	"strings"
	"testing"

	"github.com/cloister-build/cloister/sandbox/printable"
	"github.com/cloister-build/cloister/tests/expect"
)

func TestText(t *testing.T) {
	for _, c := range []struct{ name, in, want string }{
		{"empty", "", ""},
		{"ASCII", `a "b" \c ~`, `a "b" \c ~`},
		{"line ends", "a\r\nb\tc", `a\r\nb\tc`},
		{"terminal control", "\x1b[2J\a\x7f", `\x1b[2J\a\x7f`},
		{"letters beyond ASCII", "é世", `\u00e9\u4e16`},
		{"bidirectional override", "a\u202eb", `a\u202eb`},
		{"beyond the basic plane", "\U0001f600", `\U0001f600`},
		{"invalid UTF-8", "a\xffb\xe2\x82", `a\xffb\xe2\x82`},
		{"replacement character", "\ufffd", `\ufffd`},
	} {
		expect.Equal(t, printable.Text(c.in), c.want, "%s: Text(%q)", c.name, c.in)
	}
}

func TestLimits(t *testing.T) {
	for _, c := range []struct {
		in         string
		limit      int
		head, tail string
	}{
		{"abcdefgh", 8, "abcdefgh", "abcdefgh"},
		{"abcdefghi", 8, "abcde...", "...efghi"},
		{"abcdé", 9, "abcd...", `...\u00e9`},
		{"abcdefgé", 9, "abcdef...", `...\u00e9`},
		{"abcd", 3, "...", "..."},
		{"", 3, "", ""},
	} {
		expect.Equal(t, printable.Head(c.in, c.limit), c.head, "Head(%q, %d)", c.in, c.limit)
		expect.Equal(t, printable.Tail(c.in, c.limit), c.tail, "Tail(%q, %d)", c.in, c.limit)
	}
}

func TestQuote(t *testing.T) {
	for _, c := range []struct {
		in    string
		limit int
		want  string
	}{
		{"//a:b", math.MaxInt, "//a:b"},
		{"", math.MaxInt, `""`},
		{"a b", math.MaxInt, `"a b"`},
		{`a"b`, math.MaxInt, `"a\"b"`},
		{"é\n", math.MaxInt, `"\u00e9\n"`},
		{"abcdefghi", 8, "abcde..."},
		{"abc defghi", 8, `"abc ...`},
	} {
		expect.Equal(t, printable.Quote(c.in, c.limit), c.want, "Quote(%q, %d)", c.in, c.limit)
	}
}

func FuzzText(f *testing.F) {
	for _, s := range []string{"", "plain", `a\b"c`, "a\n\x1b\xff", "é\u202e\U0001f600", "\xe2\x82", strings.Repeat("é", 20)} {
		f.Add(s, 10)
	}
	f.Fuzz(func(t *testing.T, s string, limit int) {
		limit = max(limit, 3)
		text := printable.Text(s)
		head, tail := printable.Head(s, limit), printable.Tail(s, limit)
		for name, got := range map[string]string{"Text": text, "Head": head, "Tail": tail, "Quote": printable.Quote(s, limit)} {
			if i := strings.IndexFunc(got, func(r rune) bool { return r < ' ' || r > '~' }); i >= 0 {
				t.Errorf("%s(%q) = %q, not printable at %d", name, s, got, i)
			}
			expect.That(t, name == "Text" || len(got) <= limit, "%s(%q, %d) has %d bytes", name, s, limit, len(got))
		}
		expect.Equal(t, printable.Text(text), text, "Text")
		expect.Equal(t, printable.Head(head, limit), head, "Head of at most %d bytes", limit)
		expect.Equal(t, printable.Tail(tail, limit), tail, "Tail of at most %d bytes", limit)
		if len(text) <= limit && (head != text || tail != text) {
			t.Errorf("Head, Tail = %q, %q, want all of %q", head, tail, text)
		}
		if !strings.HasPrefix(text, strings.TrimSuffix(head, "...")) || !strings.HasSuffix(text, strings.TrimPrefix(tail, "...")) {
			t.Errorf("Head, Tail = %q, %q, want ends of %q", head, tail, text)
		}
	})
}
