// SPDX-License-Identifier: Apache-2.0

package repro

import (
	"bytes"
	_ "embed"
	"errors"
	"fmt"
	"html/template"
	"strings"
)

// A Report is what is told of several actions.
type Report []*Verdict

// maxPage bounds a page, in bytes.
const maxPage = 60_000

//go:embed report.html
var page string

// pages is the template of a page. What actions made is escaped by it, as all else.
var pages = template.Must(template.New("report").Funcs(template.FuncMap{
	"inc":   func(i int) int { return i + 1 },
	"join":  strings.Join,
	"short": func(s string) string { return s[:min(len(s), 12)] },
	"clip":  clip,
}).Parse(page))

// clip returns the text of s as a page shows it. Names are long where somebody wants them to be.
func clip(s string) string {
	const most = 300
	if s = text(s); len(s) > most {
		return s[:most] + "..."
	}
	return s
}

// A cut is how much of each verdict a page shows.
type cut struct{ verdicts, outputs, differences, runs int }

// cuts are tried in this order. The last one takes less than maxPage, whatever it is that is told.
var cuts = []cut{
	{1000, 200, 60, MaxRuns}, {200, 60, 20, MaxRuns}, {100, 20, 8, MaxRuns}, {40, 10, 3, MaxRuns}, {10, 5, 2, MaxRuns}, {3, 3, 1, MaxRuns},
	{200, 20, 8, 10}, {40, 10, 3, 5}, {10, 5, 2, 3}, {1, 3, 1, 3},
}

// A sheet is a verdict as a page shows it.
type sheet struct {
	*Verdict
	Ran      []Run
	Rows     []row
	Shown    []*Difference
	Runless  int // runs that are not in Ran, nor in the cells of Rows
	Outputs  int // that are not in Rows
	Unshown  int // differences
	Unknown  []string
	Headline string
	Skips    []Skipped
}

// A row is an output in all runs.
type row struct {
	*Output
	Cells []cell
}

// A cell is what one run made: equal ones of a row have one number.
type cell struct {
	Digest string
	Class  int
}

// HTML returns a page that needs nothing else: no script, no other file. It is at most 60 kB, for which it leaves out
// outputs that are the same, then differences, and then runs.
func (r Report) HTML() ([]byte, error) {
	for _, c := range cuts {
		var b bytes.Buffer
		var sheets []*sheet
		for _, v := range r[:min(len(r), c.verdicts)] {
			sheets = append(sheets, v.sheet(c))
		}
		if err := pages.Execute(&b, map[string]any{"Sheets": sheets, "All": r, "More": len(r) - len(sheets)}); err != nil {
			return nil, err
		}
		if b.Len() <= maxPage {
			return b.Bytes(), nil
		}
	}
	return nil, errors.New("even the shortest page takes more than 60 kB: write the report as .json or .md")
}

// sheet returns what a page shows of v.
func (v *Verdict) sheet(c cut) *sheet {
	ran := min(len(v.Runs), c.runs)
	s := &sheet{Verdict: v, Headline: v.conclusion(), Skips: v.skips(), Ran: v.Runs[:ran], Runless: len(v.Runs) - ran}
	s.Unknown = v.Unexplained[:min(len(v.Unexplained), c.differences)]
	for _, differ := range []bool{true, false} {
		for i := range v.Outputs {
			o := &v.Outputs[i]
			if o.Differ != differ {
				continue
			}
			if len(s.Rows) == c.outputs {
				s.Outputs++
				continue
			}
			s.Rows = append(s.Rows, row{o, o.cells()[:ran]})
		}
	}
	for i := range v.Differences {
		if len(s.Shown) == c.differences {
			s.Unshown = len(v.Differences) - i
			break
		}
		s.Shown = append(s.Shown, &v.Differences[i])
	}
	return s
}

func (o *Output) cells() []cell {
	var all []cell
	seen := map[string]int{}
	for _, d := range o.Digests {
		if _, ok := seen[d]; !ok {
			seen[d] = min(len(seen), 5)
		}
		all = append(all, cell{orNone(d), seen[d]})
	}
	return all
}

// Location says where a difference is.
func (d *Difference) Location() string {
	s := text(strings.Join(d.Where, " > ")) + ": " + text(d.What)
	if d.Offset >= 0 {
		s += fmt.Sprintf(", byte %d", d.Offset)
	}
	return s
}

// Markdown returns the report as a text for a review or an issue. Of several actions it begins with how many there are of
// each result, and has further only those that are not the same.
func (r Report) Markdown() []byte {
	var b bytes.Buffer
	line := func(format string, args ...any) { fmt.Fprintf(&b, format+"\n", args...) }
	line("# Reproducibility")
	if len(r) > 1 {
		kinds, all := r.tally()
		line("\n| mnemonic | actions | same | differs | flaky exit |\n|---|---|---|---|---|")
		for _, k := range kinds {
			line("| %s | %d | %d | %d | %d |", code(orNone(k.mnemonic)), k.actions(), k.same, k.differ, k.flaky)
		}
		line("| all | %d | %d | %d | %d |", all.actions(), all.same, all.differ, all.flaky)
	}
	for _, v := range r {
		if len(r) > 1 && v.Result == Same {
			continue
		}
		line("\n## %s\n\n**%s.** %s", code(v.Title()), v.Result, v.conclusion())
		line("\n| run | where | ended | varied |\n|---|---|---|---|")
		for i, run := range v.Runs {
			line("| %d | %s | %s | %s |", i+1, code(run.On), run.Ended(), cells(run.Varied))
		}
		if len(v.Differing()) > 0 {
			line("\n| output | digests | depends on |\n|---|---|---|")
		}
		for _, name := range v.Differing() {
			o := v.output(name)
			line("| %s | %d in %d runs | %s |", code(name), o.Distinct(), len(o.Digests), strings.Join(o.Factors, ", "))
		}
		if len(v.Differences) > 0 {
			line("\n| where | one run | another | why | fix |\n|---|---|---|---|---|")
		}
		for i := range v.Differences {
			d := &v.Differences[i]
			why := string(d.Cause)
			if len(d.Factors) > 0 {
				why = strings.TrimPrefix(why+", found by varying "+strings.Join(d.Factors, ", "), ", ")
			}
			line("| %s | %s | %s | %s | %s |", code(d.Location()), code(text(d.A)), code(text(d.B)), why, code(text(d.Fix)))
		}
		if v.Bisection != nil {
			line("\nBisected in %d runs: %s.", v.Bisection.Runs, code(v.Bisection.Summary))
		}
		for _, s := range v.skips() {
			line("\nNot varied: %s: %s.", s.Factor, code(s.Why))
		}
	}
	return b.Bytes()
}

// code returns s as Markdown shows it as it is, also in a table; "" is nothing.
func code(s string) string {
	if s == "" {
		return ""
	}
	// No backquote and no bar of a text is told apart from one of ours.
	return "`" + strings.NewReplacer("`", "'", "|", "\\x7c", "\n", " ").Replace(s) + "`"
}

func cells(all []string) string {
	if len(all) == 0 {
		return "as usual"
	}
	return code(strings.Join(all, ", "))
}
