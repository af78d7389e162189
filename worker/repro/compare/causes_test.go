// SPDX-License-Identifier: Apache-2.0

package compare

import (
	"bytes"
	"cmp"
	"flag"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/cloister-build/cloister/sandbox/printable"
	"github.com/cloister-build/cloister/tests/must"
)

var update = flag.Bool("update", false, "write the table of causes to docs/causes.md")

// docs/causes.md contains the table between two lines.
const (
	causesDocument = "../../../docs/causes.md"
	tableBegins    = "<!-- the table of causes -->\n"
	tableEnds      = "<!-- end of the table -->\n"
)

func TestDocumentContainsCausesTable(t *testing.T) {
	old := must.Get(os.ReadFile(causesDocument))(t)
	before, rest, ok := bytes.Cut(bytes.ReplaceAll(old, []byte("\r\n"), []byte("\n")), []byte(tableBegins))
	_, after, ok2 := bytes.Cut(rest, []byte(tableEnds))
	if !ok || !ok2 {
		t.Fatalf("%s lacks the line %q or %q", causesDocument, tableBegins, tableEnds)
	}
	want := slices.Concat(before, []byte(tableBegins), []byte(causesTable()), []byte(tableEnds), after)
	if *update {
		must.Succeed(t, os.WriteFile(causesDocument, want, 0o644))
	} else if table, _, _ := bytes.Cut(rest, []byte(tableEnds)); string(table) != causesTable() {
		t.Errorf("%s is out of date; run go test ./worker/repro/compare -run Causes -update", causesDocument)
	}
}

// Each declared cause has a row, a meaning and a fix.
func TestCausesAreComplete(t *testing.T) {
	file := must.Get(parser.ParseFile(token.NewFileSet(), "compare.go", nil, 0))(t)
	declared := map[Cause]bool{}
	ast.Inspect(file, func(n ast.Node) bool {
		if spec, ok := n.(*ast.ValueSpec); ok {
			if name, ok := spec.Type.(*ast.Ident); ok && name.Name == "Cause" {
				text := must.Get(strconv.Unquote(spec.Values[0].(*ast.BasicLit).Value))(t)
				declared[Cause(text)] = true
			}
		}
		return true
	})
	delete(declared, Unknown)
	if len(declared) < 17 {
		t.Fatalf("got %d declared causes, want at least 17", len(declared))
	}
	// Values of Fix.Format that are not in formats: directories, and programs that the go command linked.
	beside := []string{"tree", "go"}
	for _, row := range Causes {
		if !declared[row.Cause] {
			t.Errorf("%q is a duplicate or not declared", row.Cause)
		}
		delete(declared, row.Cause)
		i := slices.IndexFunc(fixes, func(f Fix) bool { return f.Cause == row.Cause })
		if row.Meaning == "" || i < 0 || fixes[i].Format != "" || fixes[i].Programs != "" {
			t.Errorf("%q has no meaning, or its first fix is not for all files", row.Cause)
		}
	}
	for i := range fixes {
		f := &fixes[i]
		if printable.Head(f.Text, maxText) != f.Text {
			t.Errorf("fix %q is too long or not printable", f.Text)
		}
		isFormat := func(g format) bool { return g.name == f.Format }
		if f.Format != "" && !slices.Contains(beside, f.Format) && !slices.ContainsFunc(formats(), isFormat) {
			t.Errorf("%q has a fix for %q, which is not a format", f.Cause, f.Format)
		}
	}
	for cause := range declared {
		t.Errorf("%q has no row", cause)
	}
}

func TestFixForDependsOnFormat(t *testing.T) {
	if tar, zip := FixFor(Timestamp, "tar"), FixFor(Timestamp, "zip"); tar == zip || tar == "" || zip == "" {
		t.Errorf("got %q and %q", tar, zip)
	}
	if got, want := FixFor(Hostname, "tar"), FixFor(Hostname, ""); got != want {
		t.Errorf("got %q, want %q", got, want)
	}
	if got := FixFor(Unknown, "tar"); got != "" {
		t.Errorf("got %q", got)
	}
}

// causesTable returns Causes and the fixes as a Markdown table.
func causesTable() string {
	var b strings.Builder
	b.WriteString("| Cause | Meaning | Format | Program | Fix |\n|---|---|---|---|---|\n")
	any := func(name string) string { return strings.ReplaceAll(cmp.Or(name, "all"), " ", ", ") }
	for _, row := range Causes {
		cause, meaning := "`"+string(row.Cause)+"`", row.Meaning
		for _, f := range fixes {
			if f.Cause != row.Cause {
				continue
			}
			format := cmp.Or(f.Format, "all")
			fmt.Fprintf(&b, "| %s | %s | %s | %s | %s |\n", cause, meaning, format, any(f.Programs), strings.ReplaceAll(f.Text, "|", `\|`))
			cause, meaning = "", ""
		}
	}
	return b.String()
}
