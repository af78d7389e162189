// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"html"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/cloister-build/cloister/sandbox/sandboxtest"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/internal/bazelrun"
	"github.com/cloister-build/cloister/tests/must"
)

// Without Bazel the demo must show the same: actions execute once, then come from the cache, and the sandbox refuses
// forbidden attempts.
func TestDemoWithoutBazelExecutesThenHitsThenRefuses(t *testing.T) {
	if _, err := exec.LookPath("/usr/bin/gcc"); err != nil {
		sandboxtest.Unavailable(t, "bazel", err) // which installs the compiler
	}
	cloister := filepath.Join(t.TempDir(), "cloister")
	must.Succeed(t, bazelrun.BuildCloister(cloister))
	if err := bazelrun.Confines(t.Context(), cloister, nil); err != nil {
		sandboxtest.Unavailable(t, "namespaces", err)
	}
	t.Chdir("../..")
	temp := t.TempDir()
	t.Setenv("TMPDIR", temp)
	var out strings.Builder
	if err := run([]string{"-sdk", "-cloister", cloister}, &out); err != nil {
		t.Fatalf("%v\n%s", err, out.String())
	}
	for _, want := range []string{
		`(?m)^first build +40 +40 +0 `,
		`(?m)^after clean +40 +0 +40 `,
		`(?m)^worker: violations it reported\n  cloister: denied: write to /usr/bin/\S*gcc\S* \(read-only\) .*\n  cloister: denied: write to input victim\.txt \(read-only\) by bash \(openat\)$`,
		`(?m)^sandbox +5 attempts, 5 refused$`,
	} {
		expect.That(t, regexp.MustCompile(want).MatchString(out.String()),
			"got output that does not match %q:\n%s", want, out.String())
	}
	recorded := must.Get(os.ReadFile("docs/demo.svg"))(t)
	r := newRecording(io.Discard)
	io.WriteString(r, out.String())
	if got, want := stable(string(recorded)), stable(r.SVG("make demo")); !slices.Equal(got, want) {
		t.Errorf("docs/demo.svg shows\n%s\nbut the demo prints\n%s\nrun make recording", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
	expect.Equal(t, len(must.Get(os.ReadDir(temp))(t)), 0, "files left in TMPDIR")
}

// stable returns the part of a recording that is equal on every machine and for every client: the headings, the names
// in the server's banner, and what the sandbox refuses.
func stable(svg string) []string {
	section := ""
	var lines []string
	for _, m := range regexp.MustCompile(`>([^<>]+)</text>`).FindAllStringSubmatch(svg, -1) {
		line := html.UnescapeString(m[1])
		words := strings.Fields(line)
		switch {
		case len(words) == 0 || words[0] == "ready": // which may be printed later
		case !strings.HasPrefix(line, " "):
			section = words[0]
			lines = append(lines, words[0])
		case section == "serve:":
			lines = append(lines, words[0])
		case section == "sandbox:" || section == "worker:":
			line = regexp.MustCompile(`127\.0\.0\.1:\d+`).ReplaceAllString(line, "SERVER")
			lines = append(lines, regexp.MustCompile(`/usr/bin/\S+`).ReplaceAllString(line, "/usr/bin/COMPILER"))
		}
	}
	return lines
}

// A line that arrives in pieces stays one line.
func TestIndentIndentsCompleteLines(t *testing.T) {
	var out strings.Builder
	w := &indent{w: &out}
	for _, piece := range []string{"a", "b\n\nc", "d\nrest"} {
		if n, err := w.Write([]byte(piece)); n != len(piece) || err != nil {
			t.Fatalf("Write(%q) = %d, %v", piece, n, err)
		}
	}
	expect.Equal(t, out.String(), "  ab\n  \n  cd\n")
}

func TestRecordingEscapesThinsAndOrdersLines(t *testing.T) {
	var out strings.Builder
	r := newRecording(&out)
	for i := range 40 {
		fmt.Fprintf(r, "  [%d / 40] actions\n", i+1)
	}
	fmt.Fprint(r, "a <b> & c\n\nfirst build  327\n")
	svg := r.SVG("make demo")
	expect.Texts(t, svg, []string{"$ make demo", "[1 / 40]", "[40 / 40]", "a &lt;b&gt; &amp; c", `result" x="16"`})
	expect.Equal(t, strings.Count(svg, "/ 40]"), svgProgress, "progress lines")
	expect.That(t, strings.HasSuffix(out.String(), "327\n"),
		"got %q passed through, want everything that was written", out.String())
}
