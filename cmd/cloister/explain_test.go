// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"strings"
	"testing"

	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
)

// TestCodesAreExplained: explain knows exactly the kinds of events, the exit codes and the reasons of backends that the
// source declares. Those of package compare check the causes.
func TestCodesAreExplained(t *testing.T) {
	missing := map[string]string{"0": "exit code"}
	for _, file := range []struct{ path, prefix, kind string }{
		{"../../sandbox/event.go", "Event", "event"},
		{"../internal/exit/exit.go", "", "exit code"},
		{"../../sandbox/internal/preflight/preflight.go", "", "reason"},
	} {
		f := must.Get(parser.ParseFile(token.NewFileSet(), file.path, nil, 0))(t)
		for _, d := range f.Decls {
			g, ok := d.(*ast.GenDecl)
			if !ok || g.Tok != token.CONST {
				continue
			}
			for _, s := range g.Specs {
				spec := s.(*ast.ValueSpec)
				kind, typed := spec.Type.(*ast.Ident)
				if value, ok := spec.Values[0].(*ast.BasicLit); ok && (file.prefix == "" || typed && kind.Name == "EventKind") {
					missing[strings.Trim(value.Value, `"`)] = file.kind
				}
			}
		}
	}
	expect.That(t, len(missing) >= 43, "found %d codes, want 43 or more", len(missing))
	seen := map[string]bool{}
	for _, e := range explanations() {
		expect.That(t, !seen[e.Code] && e.Meaning != "" && e.Remedy != "", "%q has no meaning or remedy, or two", e.Code)
		seen[e.Code] = true
		if e.Kind != "cause" {
			expect.Equal(t, missing[e.Code], e.Kind, "kind of "+e.Code+" in the source")
			delete(missing, e.Code)
		}
	}
	expect.Equal(t, len(missing), 0, fmt.Sprintf("codes without explanation: %v", missing))
}

// TestCodesDocumentIsCurrent compares docs/codes.md with the explanations.
func TestCodesDocumentIsCurrent(t *testing.T) {
	const document = "../../docs/codes.md"
	var b strings.Builder
	b.WriteString("# Codes\n\nWhat the codes in messages, logs and reports mean, as `cloister explain CODE` prints it. `make reference` generates\nthis page; [causes.md](causes.md) has more fixes of each cause.\n")
	kind := ""
	for _, e := range explanations() {
		if e.Kind != kind {
			kind = e.Kind
			fmt.Fprintf(&b, "\n## %ss\n\n| Code | Meaning | What to do |\n|---|---|---|\n", strings.ToUpper(kind[:1])+kind[1:])
		}
		fmt.Fprintf(&b, "| `%s` | %s | %s |\n", e.Code, strings.ReplaceAll(e.Meaning, "|", `\|`), strings.ReplaceAll(e.Remedy, "|", `\|`))
	}
	if *updateReference {
		must.Succeed(t, os.WriteFile(document, []byte(b.String()), 0o644))
	}
	committed := string(must.Get(os.ReadFile(document))(t))
	expect.That(t, committed == b.String(), "docs/codes.md is not current; run make reference")
}

// TestExplain prints one explanation, also of a code of two words, and refuses unknown codes.
func TestExplain(t *testing.T) {
	for _, c := range []struct {
		args string
		code int
		want string
	}{
		{"explain", 0, "cause"},
		{"explain connect", 0, "remedy       add what it needs"},
		{"explain member order", 0, "member order\nmeaning      the order"},
		{"explain 5 --json", 0, `"kind": "exit code"`},
		{"explain nothing", 4, "cloister explain lists the codes"},
	} {
		out, code := runCLI(t, strings.Fields(c.args)...)
		expect.That(t, code == c.code && strings.Contains(out, c.want), "%s: exit %d, %s, want %d, %s", c.args, code, out, c.code, c.want)
	}
}
