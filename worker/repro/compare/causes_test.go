// SPDX-License-Identifier: Apache-2.0

package compare

import (
	"bytes"
	"flag"
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"slices"
	"strconv"
	"testing"
)

var update = flag.Bool("update", false, "write the table of causes into docs/causes.md")

// docs/causes.md has the table between two lines.
const (
	causesDocument = "../../../docs/causes.md"
	tableBegins    = "<!-- the table of causes -->\n"
	tableEnds      = "<!-- end of the table -->\n"
)

func TestDocumentHasTheTableOfCauses(t *testing.T) {
	old, err := os.ReadFile(causesDocument)
	if err != nil {
		t.Fatal(err)
	}
	before, rest, ok := bytes.Cut(bytes.ReplaceAll(old, []byte("\r\n"), []byte("\n")), []byte(tableBegins))
	_, after, ok2 := bytes.Cut(rest, []byte(tableEnds))
	if !ok || !ok2 {
		t.Fatalf("%s has no lines %q and %q", causesDocument, tableBegins, tableEnds)
	}
	want := slices.Concat(before, []byte(tableBegins), []byte(CausesTable()), []byte(tableEnds), after)
	if *update {
		if err := os.WriteFile(causesDocument, want, 0o644); err != nil {
			t.Fatal(err)
		}
	} else if table, _, _ := bytes.Cut(rest, []byte(tableEnds)); string(table) != CausesTable() {
		t.Errorf("%s has another table of causes; go test ./worker/repro/compare -run Causes -update writes it", causesDocument)
	}
}

// Each cause that compare.go declares has a row, a meaning and a fix, in its order.
func TestCausesAreComplete(t *testing.T) {
	file, err := parser.ParseFile(token.NewFileSet(), "compare.go", nil, 0)
	if err != nil {
		t.Fatal(err)
	}
	declared := map[Cause]bool{}
	ast.Inspect(file, func(n ast.Node) bool {
		if spec, ok := n.(*ast.ValueSpec); ok {
			if name, ok := spec.Type.(*ast.Ident); ok && name.Name == "Cause" {
				text, err := strconv.Unquote(spec.Values[0].(*ast.BasicLit).Value)
				if err != nil {
					t.Fatal(err)
				}
				declared[Cause(text)] = true
			}
		}
		return true
	})
	delete(declared, Unknown)
	if len(declared) < 17 {
		t.Fatalf("%d causes are declared", len(declared))
	}
	// What is not told by its first bytes: all, directories, and programs that the go command linked.
	beside := []string{"", "tree", "go"}
	for _, row := range Causes {
		if !declared[row.Cause] {
			t.Errorf("%q is there twice, or not declared", row.Cause)
		}
		delete(declared, row.Cause)
		if row.Meaning == "" || len(row.Fixes) == 0 || row.Fixes[0].Format != "" {
			t.Errorf("%q has no meaning, or no fix for all formats first", row.Cause)
		}
		for _, f := range row.Fixes {
			if printable(f.Text, MaxText) != f.Text {
				t.Errorf("%q is too long, or not printable", f.Text)
			}
			isFormat := func(g format) bool { return g.name == f.Format }
			if !slices.Contains(beside, f.Format) && !slices.ContainsFunc(formats(), isFormat) {
				t.Errorf("%q has a fix for %q, which is no format", row.Cause, f.Format)
			}
		}
	}
	for cause := range declared {
		t.Errorf("%q has no row", cause)
	}
}

func TestFixForTellsFormatsApart(t *testing.T) {
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
