// SPDX-License-Identifier: Apache-2.0

package repro_test

import (
	"bytes"
	"fmt"
	"strings"
	"testing"

	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
	"github.com/cloister-build/cloister/worker"
	"github.com/cloister-build/cloister/worker/repro"
	"github.com/cloister-build/cloister/worker/repro/compare"
)

// hostile is a name and a content that an action may choose.
const hostile = "<script>alert(1)</script>`|\x1b[2J\"'&"

func hostileVerdict(t *testing.T, files int) *repro.Verdict {
	s := newScript(t, func(n int, _ *worker.Variation) made {
		m := made{files: map[string]string{}, stdout: fmt.Sprint(hostile, n)}
		for i := range files {
			m.files[fmt.Sprint(hostile, i)] = fmt.Sprint(strings.Repeat(hostile, 20), n, i)
		}
		return m
	})
	o := s.options()
	o.Bisect, o.Factors = true, []repro.Factor{"hostname"}
	task := s.action()
	task.Target, task.Mnemonic = hostile, hostile
	v := check(t, task, o)
	v.Differences = append(v.Differences, repro.Difference{Difference: compare.Difference{Where: []string{hostile, hostile}, What: hostile, A: hostile, B: hostile, Fix: hostile}})
	return v
}

func TestReportsEscapeHostileText(t *testing.T) {
	r := repro.Report{hostileVerdict(t, 2)}
	html := must.Get(r.HTML())(t)
	var text bytes.Buffer
	must.Succeed(t, r[0].Text(&text, repro.TextOptions{}))
	for what, b := range map[string][]byte{"html": html, "text": text.Bytes(), "markdown": r.Markdown(), "line": []byte(r[0].Line())} {
		expect.That(t, !bytes.ContainsAny(b, "\x1b\x00"), "%s has a control character:\n%s", what, b)
	}
	expect.That(t, !bytes.Contains(html, []byte("<script")) && bytes.Contains(html, []byte("&lt;script&gt;")),
		"hostile text is not escaped:\n%s", html)
	if bytes.Contains(html, []byte("http")) && strings.Count(string(html), "http") != strings.Count(string(html), "http-equiv") {
		t.Error("the page has external references")
	}
	for i, line := range strings.Split(string(r.Markdown()), "\n") {
		expect.That(t, !strings.HasPrefix(line, "| `") || strings.Count(line, "`")%2 == 0,
			"line %d of the Markdown has an open code span: %s", i, line)
	}
}

func TestPageOmitsOutputs(t *testing.T) {
	v := hostileVerdict(t, 25)
	for i := range 300 { // equal ones
		v.Outputs = append(v.Outputs, repro.Output{Path: fmt.Sprint(hostile, i), Kind: "file", Digests: v.Outputs[0].Digests})
	}
	r := repro.Report{v, v, v}
	html, err := r.HTML()
	expect.That(t, err == nil && len(html) <= 60_000, "%d bytes, %v", len(html), err)
	expect.That(t, bytes.Contains(html, []byte(" more</tr>")), "the page does not tell that outputs were omitted")
}

func TestPageIsSmallWithLongNames(t *testing.T) {
	long := strings.Repeat("\"&", 600)
	v := hostileVerdict(t, 5)
	for i := range v.Outputs {
		v.Outputs[i].Path += long
		for len(v.Outputs[i].Digests) < repro.MaxRuns {
			v.Outputs[i].Digests = append(v.Outputs[i].Digests, fmt.Sprint("-> ", len(v.Outputs[i].Digests), long))
		}
	}
	for len(v.Runs) < repro.MaxRuns {
		r := v.Runs[1]
		r.On, r.Worker, r.Action = long, long, long
		v.Runs = append(v.Runs, r)
	}
	for range 51 {
		v.Unexplained = append(v.Unexplained, long)
	}
	v.Bisection.Summary, v.Target = long, long
	for _, n := range []int{0, 3} {
		r := repro.Report{v, v, v, v}[n:]
		html, err := r.HTML()
		expect.That(t, err == nil && len(html) <= 60_000 && bytes.Contains(html, []byte("<th>run 3")),
			"%d verdicts: %d bytes, %v", len(r), len(html), err)
	}
}

func TestTextShowsRunsCausesAndFactors(t *testing.T) {
	s := newScript(t, func(n int, v *worker.Variation) made {
		return made{files: map[string]string{"lib.a": "for " + observed("hostname", n, v), "x": "1"}}
	})
	o := s.options()
	o.Bisect, o.Factors = true, []repro.Factor{"hostname", "umask"}
	v := check(t, s.action(), o)
	var b bytes.Buffer
	must.Succeed(t, v.Text(&b, repro.TextOptions{Verbose: true}))
	for _, want := range []string{
		"//a:b  Make  " + v.Action + "  DIFFERS  3 runs: local\n",
		"  run 1   local, no variation\n", "  run 2   local, hostname elsewhere1, umask 0077\n",
		"  lib.a  DIFFERS  3 digests in 3 runs  (1 of 2 outputs)  depends on hostname\n",
		"found by varying: hostname", "  bisected in 8 runs: caused by hostname\n", "  not reproducible: hostname\n",
	} {
		expect.Text(t, b.String(), want)
	}
}

func TestTextCountsSimilarDifferences(t *testing.T) {
	s := newScript(t, func(n int, v *worker.Variation) made {
		m := made{directory: map[string]string{}}
		for i := range 40 {
			m.directory[fmt.Sprintf("f%02d", i)] = "for " + observed("hostname", n, v)
		}
		return m
	})
	var b bytes.Buffer
	must.Succeed(t, check(t, s.action(), s.options()).Text(&b, repro.TextOptions{}))
	if !strings.Contains(b.String(), "\n    hostname in 40 files\n") || strings.Contains(b.String(), "nothing") {
		t.Errorf("got\n%s", b.String())
	}
}

// Outputs that differ alike are described once, but each with -v.
func TestTextGroupsOutputs(t *testing.T) {
	s := newScript(t, func(n int, v *worker.Variation) made {
		m := made{files: map[string]string{"z": "umask " + observed("umask", n, v)}}
		for i := range 6 {
			m.files[fmt.Sprint("f", i)] = "for " + observed("hostname", n, v)
		}
		return m
	})
	v := check(t, s.action(), s.options())
	var short, long bytes.Buffer
	must.Succeed(t, v.Text(&short, repro.TextOptions{}))
	must.Succeed(t, v.Text(&long, repro.TextOptions{Verbose: true}))
	if !strings.Contains(short.String(), "\n  alike: f1, f2, f3 and 2 more\n  z  DIFFERS") || strings.Count(short.String(), "!=") != 2 {
		t.Errorf("got\n%s", short.String())
	}
	if strings.Contains(long.String(), "alike") || strings.Count(long.String(), "!=") != 7 {
		t.Errorf("with -v: got\n%s", long.String())
	}
}

func TestReportsCountActionsByMnemonic(t *testing.T) {
	verdict := func(mnemonic string, result repro.Result) *repro.Verdict {
		return &repro.Verdict{Action: "0123", Target: "//a:" + mnemonic, Mnemonic: mnemonic, Result: result, Runs: []repro.Run{{}}}
	}
	r := repro.Report{verdict("Link", repro.Differs), verdict("Compile", repro.Same), verdict("Compile", repro.FlakyExit), verdict("", repro.Same), verdict("", repro.Unvaried)}
	r[0].Differences = []repro.Difference{
		{Difference: compare.Difference{Cause: compare.Timestamp}},
		{Difference: compare.Difference{Cause: compare.Owner}},
		{Difference: compare.Difference{Cause: compare.Timestamp, What: "a|b", A: "x|y"}},
	}
	r[2].Differences = r[0].Differences[:1]
	r[2].Runs = []repro.Run{{ExitCode: 1, Stderr: "no | here"}}
	var b bytes.Buffer
	must.Succeed(t, r.Table(&b))
	want := `
mnemonic        actions     same  unvaried  differs  flaky exit
nothing               2        1         1        0           0
Compile               2        1         0        0           1
Link                  1        0         0        1           0
2 actions: timestamp
1 action: owner
5 actions: 2 same, 1 unvaried, 1 differ, 1 with flaky exit
`
	expect.That(t, strings.HasSuffix(b.String(), want), "got\n%s\nwant at the end\n%s", &b, want)
	md := string(r.Markdown())
	if !strings.Contains(md, "| `Compile` | 2 | 1 | 0 | 0 | 1 |\n") || !strings.Contains(md, "| all | 5 | 2 | 1 | 1 | 1 |\n") {
		t.Errorf("no counts in\n%s", md)
	}
	for _, want := range []string{"`: a\\|b, byte 0`", "`x\\|y`", "| exit 1 `no \\| here` |"} {
		expect.That(t, strings.Contains(md, want), "%q is not in\n%s", want, md)
	}
	expect.That(t, strings.Count(md, "\n## ") == 3,
		"want a section per action that is not known to be reproducible in\n%s", md)
	r[2].Differences[0].Factors = []repro.Factor{"time", "zone"}
	html := must.Get(r.HTML())(t)
	for _, want := range []string{
		"<p>5 actions: 2 same, 1 unvaried, 1 differ, 1 with flaky exit</p>", "<th>action<th>result<th>timestamp<th>owner</tr>",
		`<td>//a:Link  Link  0123<td>differs<td class="k1">time, zone<td class="k1">yes</tr>`,
		`<td>//a:Compile  Compile  0123<td>flaky exit<td class="k1">time, zone<td></tr>`, "<tr><th>actions<th><th>2<th>1</tr>",
	} {
		expect.That(t, strings.Contains(string(html), want), "%q is not in\n%s", want, html)
	}
	expect.That(t, strings.Count(string(html), "<h2>") == 2, "want a section per irreproducible action in\n%s", html)
	if one := string(r[1:2].Markdown()); !strings.Contains(one, "\n## ") {
		t.Errorf("want a section for a single reproducible action in\n%s", one)
	}
}

// The page of a large build shows all of its actions, if not the details of each.
func TestPageOfABuildHasAMatrix(t *testing.T) {
	var r repro.Report
	for i := range 100 {
		v := *hostileVerdict(t, 0)
		v.Target = fmt.Sprint("//a:", i)
		r = append(r, &v)
	}
	html := must.Get(r.HTML())(t)
	for i := range r {
		expect.That(t, strings.Contains(string(html), fmt.Sprintf("<td>//a:%d  ", i)), "the matrix lacks action %d", i)
	}
}
