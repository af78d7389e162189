// SPDX-License-Identifier: Apache-2.0

package tree_test

import (
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/castest"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
)

var update = flag.Bool("update", false, "rewrite the plans in testdata")

// A shape is a file of testdata/plan: comments, the working directory, outputs and the input root, a line "---" and the
// plan.
type shape struct {
	name    string
	head    string // everything before the plan
	workdir string
	outputs []string
	dirs    []string // those of outputs that are declared as directories
	input   *node
	plan    string
}

func shapes(t testing.TB) []shape {
	paths := must.Get(filepath.Glob("testdata/plan/*.txt"))(t)
	must.Be(t, len(paths) != 0, "no plans in testdata")
	var all []shape
	for _, p := range paths {
		head, plan, ok := strings.Cut(string(must.Get(os.ReadFile(p))(t)), "---\n")
		must.Be(t, ok, "%s has no plan", p)
		s := shape{name: strings.TrimSuffix(filepath.Base(p), ".txt"), head: head, plan: plan}
		var lines []string
		for line := range strings.Lines(head) {
			line = strings.TrimSuffix(line, "\n")
			if strings.HasPrefix(line, "#") {
				continue
			}
			if dir, ok := strings.CutPrefix(line, "workdir:"); ok {
				s.workdir = strings.TrimPrefix(dir, " ")
			} else if out, ok := strings.CutPrefix(line, "output:"); ok {
				s.outputs = append(s.outputs, strings.TrimPrefix(out, " "))
			} else if out, ok := strings.CutPrefix(line, "directory:"); ok {
				s.outputs = append(s.outputs, strings.TrimPrefix(out, " "))
				s.dirs = append(s.dirs, strings.TrimPrefix(out, " "))
			} else {
				lines = append(lines, line)
			}
		}
		s.input = parse(t, lines...)
		all = append(all, s)
	}
	return all
}

func TestPlan(t *testing.T) {
	for _, s := range shapes(t) {
		t.Run(s.name, func(t *testing.T) {
			l, err := load(t, castest.NewMemory(), s.input).Plan(s.workdir, s.outputs, s.dirs)
			var got string
			switch {
			case err != nil && !errors.Is(err, cas.ErrInvalid):
				t.Fatalf("%v is not ErrInvalid", err)
			case err != nil:
				got = "error: " + err.Error() + "\n"
			default:
				got = l.String()
			}
			expect.Equal(t, strings.HasPrefix(s.name, "error_"), err != nil,
				"the file name does not match the error %v", err)
			if *update {
				must.Succeed(t, os.WriteFile("testdata/plan/"+s.name+".txt", []byte(s.head+"---\n"+got), 0o644))
			} else if got != s.plan {
				t.Errorf("got\n%s\nwant\n%s", got, s.plan)
			}
		})
	}
}

func TestPlanRejectsMalformedPaths(t *testing.T) {
	in := load(t, castest.NewMemory(), parse(t, "a/"))
	for name, p := range map[string]string{
		"NUL": "a\x00b", "LongName": strings.Repeat("n", 256), "NotUTF8": "a/\xff",
		"LongPath": strings.Repeat("n/", 2001) + "n", "Parent": "..", "Root": "/",
	} {
		t.Run(name, func(t *testing.T) {
			_, err := in.Plan("", []string{p}, nil)
			wantError(t, err, cas.ErrInvalid, "")
			_, err = in.Plan(p, nil, nil)
			wantError(t, err, cas.ErrInvalid, "")
		})
	}
}

// Writable directories have separate paths, so deep outputs take far more memory than their declarations.
func TestPlanLimitsWritableDirectories(t *testing.T) {
	t.Parallel()
	in := load(t, castest.NewMemory(), parse(t, "a/"))
	var flat, branching, deep []string
	for i := range 100_001 {
		flat = append(flat, fmt.Sprint(i))
	}
	for i := range 60_000 {
		branching = append(branching, fmt.Sprint("d", i, "/f"))
	}
	for i := range 10 { // together 40 KB
		deep = append(deep, fmt.Sprint(i)+strings.Repeat("/d", 1999))
	}
	for _, c := range []struct {
		name    string
		outputs []string
		want    string // in the error
	}{
		{"OutputsThatFit", flat[:100_000], ""},
		{"Outputs", flat, "100000 paths"},
		{"DirectoriesThatFit", branching[:50_000], ""},
		{"Directories", branching, "100000 paths"},
		{"BytesThatFit", deep[:4], ""},
		{"Bytes", deep, "16777216 bytes"},
	} {
		t.Run(c.name, func(t *testing.T) {
			_, err := in.Plan("", c.outputs, nil)
			if c.want == "" {
				must.Succeed(t, err)
			} else {
				wantError(t, err, cas.ErrInvalid, c.want)
			}
		})
	}
}
