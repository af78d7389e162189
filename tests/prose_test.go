// SPDX-License-Identifier: Apache-2.0

package tests

import (
	"flag"
	"go/ast"
	"go/parser"
	"go/token"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
)

var proseBelow = flag.String("prose-below", "", "check the prose of files below this directory only")

// bannedPhrases are phrases of translated English that docs, comments and messages avoid, each with what to write
// instead.
var bannedPhrases = []struct{ pattern, instead string }{
	{`has (?:[a-z]+ ){1,2}do`, "makes, asks or runs"},
	{`(?:is|are|was|were|be|been|being|not|ever|never) told`, "learns, receives; is reported, shown or logged"},
	{`tells? of`, "reports, shows, logs"},
	{`says of`, "reports, shows, logs"},
	{`so (?:many|often)`, "the name of the number: count, limit, interval"},
	{`of whatever (?:make|kind)`, "any kind of"},
	{`whoever`, "the caller, the client, the user, anyone who"},
	{`there is no (?:[a-z]+ ){1,4}that`, "no X does Y"},
	{`what is [^,.;:()]{1,40}, (?:is|are)`, "a noun"},
	{`that which`, "what, or a noun"},
	{`for as long as`, "while"},
	{`in vain`, "without success, or what failed"},
	{`(?:go|goes|went|gone|going) on`, "continue, resume, proceed"},
	{`together with which`, "with"},
	{`the like`, "and so on, or name them"},
	{`all that`, "everything, every"},
	{`one after the other`, "in order, sequentially"},
	{`a share of`, "a sample of, a fraction of"},
	{`judg(?:e|es|ed|ing|ement|ment)`, "check, evaluate, decide"},
	{`is meant by`, "is the default, means"},
	{`do(?:es)? not believe`, "distrust, verify"},
	{`held against`, "checked against"},
	{`by turns`, "alternately"},
}

var bannedPhrase = func() *regexp.Regexp {
	var all []string
	for _, p := range bannedPhrases {
		all = append(all, p.pattern)
	}
	return regexp.MustCompile(`(?i)\b(?:` + strings.Join(all, "|") + `)\b`)
}()

var space = regexp.MustCompile(`\s+`)

// checkProse reports the banned phrases in a text that begins at a line of a file.
func checkProse(t *testing.T, path string, line int, text string) {
	t.Helper()
	text = space.ReplaceAllString(text, " ")
	for _, found := range bannedPhrase.FindAllString(text, -1) {
		for _, p := range bannedPhrases {
			if regexp.MustCompile(`(?i)^(?:` + p.pattern + `)$`).MatchString(found) {
				t.Errorf("%s:%d: %q: write: %s", path, line, found, p.instead)
				break
			}
		}
	}
}

// TestProseIsPlain checks Go comments and string literals, Markdown, scripts and schemas for banned phrases.
func TestProseIsPlain(t *testing.T) {
	skipped := func(path string) bool {
		return !strings.HasPrefix(filepath.ToSlash(path), *proseBelow) || path == filepath.Join("tests", "prose_test.go")
	}
	sources(t, func(path, text string) {
		if skipped(path) || strings.HasSuffix(path, ".pb.go") {
			return
		}
		set := token.NewFileSet()
		f := must.Get(parser.ParseFile(set, path, text, parser.ParseComments))(t)
		for _, c := range f.Comments {
			checkProse(t, path, set.Position(c.Pos()).Line, c.Text())
		}
		ast.Inspect(f, func(n ast.Node) bool {
			if l, ok := n.(*ast.BasicLit); ok && l.Kind == token.STRING {
				checkProse(t, path, set.Position(l.Pos()).Line, must.Get(strconv.Unquote(l.Value))(t))
			}
			return true
		})
	}, ".go")
	sources(t, func(path, text string) {
		if skipped(path) {
			return
		}
		line := 1
		for paragraph := range strings.SplitSeq(text, "\n\n") {
			checkProse(t, path, line, paragraph)
			line += strings.Count(paragraph, "\n") + 2
		}
	}, ".md", ".sh", ".yaml", ".yml", ".proto", ".txtar", ".bzl")
}

// TestProseCheckBites checks the checker with phrases that it must find and others that it must leave alone.
func TestProseCheckBites(t *testing.T) {
	for _, s := range []string{
		"It has the caller do this", "the client is told of it", "Whoever calls", "so often", "what is absent, is missing",
		"There is no blob of that name that matches", "for as long as it runs", "uploads that go on", "judges", "all that it wrote",
	} {
		expect.That(t, bannedPhrase.MatchString(s), "%q passes, want it refused", s)
	}
	for _, s := range []string{"what is missing", "a shared cache", "something likely", "by turning", "although", "ongoing"} {
		expect.Equal(t, bannedPhrase.FindString(s), "", "%q is refused", s)
	}
}
