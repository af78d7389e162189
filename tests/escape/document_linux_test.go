// SPDX-License-Identifier: Apache-2.0

package escape_test

import (
	"flag"
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
)

var update = flag.Bool("update", false, "rewrite docs/escapes.md")

// TestDocumentIsCurrent compares the table of docs/escapes.md with the attacks. That they are held is for TestEscapes and
// TestEscapesFromGVisor to show.
func TestDocumentIsCurrent(t *testing.T) {
	const document, begin = "../../docs/escapes.md", "| Attack |"
	var table strings.Builder
	fmt.Fprintf(&table, "%s Guarantee | In namespaces | In gVisor |\n|---|---|---|---|\n", begin)
	for _, g := range guarantees(&fixture{}) {
		control := "not repeated: " + g.reason
		if len(g.without) > 0 {
			layers := make([]string, len(g.without))
			for i, l := range g.without {
				layers[i] = string(l)
			}
			control = "succeeds without " + strings.Join(layers, ", ")
		}
		inGVisor := "held"
		if why := ownKernel[g.name]; why != "" {
			inGVisor = "not run: " + why
		}
		fmt.Fprintf(&table, "| *%s* | %s | held; %s | %s |\n", g.name, strings.TrimSuffix(g.promise, "."), control, inGVisor)
	}
	page := string(must.Get(os.ReadFile(document))(t))
	text, _, found := strings.Cut(page, begin)
	must.Be(t, found, "%s has no table", document)
	if *update {
		must.Succeed(t, os.WriteFile(document, []byte(text+table.String()), 0o644))
		return
	}
	expect.That(t, page == text+table.String(), "%s is not current; run make reference", document)
}
