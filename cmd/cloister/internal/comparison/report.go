// SPDX-License-Identifier: Apache-2.0

package comparison

import (
	"bytes"
	"fmt"
	"io"
	"strings"

	"github.com/cloister-build/cloister/cmd/cloister/internal/render"
	"github.com/cloister-build/cloister/worker/repro/changes"
	"github.com/cloister-build/cloister/worker/repro/compare"
)

// A diffReport is what diff prints of two operands.
type diffReport struct {
	Kind    string        `json:"kind"`
	A       string        `json:"a"`
	B       string        `json:"b"`
	Same    bool          `json:"same"`
	Changes []shownChange `json:"changes,omitempty"`
	// Differences are those of two blobs.
	Differences []compare.Difference `json:"differences,omitempty"`
	// Diffoscope is the output of diffoscope, if requested.
	Diffoscope string `json:"diffoscope,omitempty"`
}

// A shownChange is a change with the differences between the blobs that it names.
type shownChange struct {
	changes.Change
	Differences []compare.Difference `json:"differences,omitempty"`
	Note        string               `json:"note,omitempty"`
}

func (r *diffReport) equal() bool { return r.Same }

// print prints r for a person. Text chosen by others is printable already.
func (r *diffReport) print(out io.Writer) error {
	if r.Same {
		return nil
	}
	var b bytes.Buffer
	fmt.Fprintf(&b, "%s\n  - %s\n  + %s\n", r.Kind, render.Quote(r.A), render.Quote(r.B))
	printChanges(&b, "", r.Changes)
	printDifferences(&b, "", r.Differences)
	b.WriteString(r.Diffoscope)
	_, err := out.Write(b.Bytes())
	return err
}

// sides prints both values, without lines for empty ones.
func sides(b *bytes.Buffer, indent, x, y string) {
	if x != "" {
		fmt.Fprintf(b, "%s  - %s\n", indent, x)
	}
	if y != "" {
		fmt.Fprintf(b, "%s  + %s\n", indent, y)
	}
}

func printChanges(b *bytes.Buffer, indent string, all []shownChange) {
	for _, c := range all {
		fmt.Fprintf(b, "%s%s\n", indent, strings.TrimSpace(c.What+" "+c.Name))
		sides(b, indent, c.A, c.B)
		printDifferences(b, indent+"    ", c.Differences)
		if c.Note != "" {
			fmt.Fprintf(b, "%s    %s\n", indent, c.Note)
		}
	}
}

func printDifferences(b *bytes.Buffer, indent string, all []compare.Difference) {
	for _, d := range all {
		fmt.Fprintf(b, "%s%s: %s", indent, strings.Join(d.Where, " > "), d.What)
		if d.Offset >= 0 {
			fmt.Fprintf(b, ", from byte %d on", d.Offset)
		}
		b.WriteByte('\n')
		sides(b, indent, d.A, d.B)
		if d.Cause != compare.Unknown {
			fmt.Fprintf(b, "%s  cause: %s\n", indent, d.Cause)
		}
		if d.Fix != "" {
			fmt.Fprintf(b, "%s  fix: %s\n", indent, d.Fix)
		}
	}
}
