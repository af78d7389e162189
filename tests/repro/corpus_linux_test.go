// SPDX-License-Identifier: Apache-2.0

// Package repro_test checks small real programs: some that are irreproducible for a known reason, and some that are
// reproducible.
package repro_test

import (
	"bytes"
	"encoding/json"
	"flag"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/cloister-build/cloister/sandbox/namespace"
	"github.com/cloister-build/cloister/sandbox/sandboxtest"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/internal/program"
	"github.com/cloister-build/cloister/tests/must"
	"github.com/cloister-build/cloister/worker/repro"
	"github.com/cloister-build/cloister/worker/repro/compare"
)

var built program.Program

func TestMain(m *testing.M) { os.Exit(built.Main(m)) }

var update = flag.Bool("update", false, "rewrite the table in docs/repro.md")

// A script is a program of the corpus. It writes the output "out". Its first lines state the expected verdict.
type script struct {
	name string
	// what describes it.
	what string
	// causes and factors are those of its differences. The factor "none" means that runs differ with all factors held.
	causes  []string
	factors []repro.Factor
	// chance, if not "", explains why other factors may be found as well, or none.
	chance string
	// needs is a required program of the host.
	needs string
}

// scripts returns the programs in a directory of testdata.
func scripts(t *testing.T, dir string) []script {
	t.Helper()
	names, err := filepath.Glob(filepath.Join("testdata", dir, "*.sh"))
	must.Be(t, err == nil && len(names) >= 20, "got %d programs in %s, %v, want at least 20", len(names), dir, err)
	var all []script
	for _, name := range names {
		text := must.Get(os.ReadFile(name))(t)
		s := script{name: dir + "/" + strings.TrimSuffix(filepath.Base(name), ".sh")}
		for line := range strings.Lines(string(text)) {
			head, comment := strings.CutPrefix(line, "# ")
			if !comment {
				break
			}
			key, value, keyed := strings.Cut(strings.TrimSpace(head), ": ")
			switch {
			case key == "Cause" && keyed:
				s.causes = strings.Split(value, ", ")
			case key == "Factor" && keyed:
				for name := range strings.SplitSeq(value, ", ") {
					s.factors = append(s.factors, repro.Factor(name))
				}
			case key == "Chance" && keyed:
				s.chance = value
			case key == "Needs" && keyed:
				s.needs = value
			case key != "SPDX-License-Identifier":
				s.what = strings.TrimSpace(s.what + " " + strings.TrimSpace(head))
			}
		}
		if s.what == "" || s.needs == "" || dir == "differs" && (len(s.causes) == 0 || len(s.factors) == 0) {
			t.Fatalf("%s lacks a description or an expectation", name)
		}
		all = append(all, s)
	}
	return all
}

// inputs returns an input directory with the programs.
func inputs(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	must.Succeed(t, os.CopyFS(dir, os.DirFS("testdata")))
	for _, name := range []string{"mapiter", "mapsorted"} {
		source := filepath.Join(t.TempDir(), name+".go")
		text := must.Get(os.ReadFile(filepath.Join("testdata/programs", name+".go.txt")))(t)
		must.Succeed(t, os.WriteFile(source, text, 0o644))
		cmd := exec.Command("go", "build", "-o", filepath.Join(dir, "programs", name), source)
		cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("%v\n%s", err, out)
		}
	}
	return dir
}

// checked returns the verdict of cloister repro on a program, and the exit code.
func (s *script) checked(t *testing.T, in string, flags ...string) (*repro.Verdict, int) {
	t.Helper()
	if _, err := exec.LookPath(s.needs); err != nil {
		sandboxtest.Unavailable(t, "tools", s.needs+" is not installed")
	}
	ctx, path := built.Within(t, 2*time.Minute)
	args := append(append([]string{"repro", "--json", "--in", in, "--out", "out"}, flags...), "--", "sh", s.name+".sh")
	cmd := exec.CommandContext(ctx, path, args...)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, _ := cmd.Output() // the exit code is checked below
	var r repro.Report
	if err := json.Unmarshal(out, &r); err != nil || len(r) != 1 {
		t.Fatalf("%v: exit code %d, %d verdicts, %v\n%s", args, cmd.ProcessState.ExitCode(), len(r), err, stderr.String())
	}
	for i, run := range r[0].Runs {
		must.Be(t, run.ExitCode == 0 && run.Code == "", "run %d: exit code %d %s", i+1, run.ExitCode, run.Code)
	}
	return r[0], cmd.ProcessState.ExitCode()
}

// missing returns why a factor of s was not varied, "" if all were.
func (s *script) missing(v *repro.Verdict) string {
	for _, k := range v.Skipped {
		if slices.Contains(s.factors, k.Factor) {
			return fmt.Sprintf("%s: %s", k.Factor, k.Why)
		}
	}
	return ""
}

// problems returns what is wrong with the verdict on an irreproducible program.
func (s *script) problems(v *repro.Verdict) (wrong []string) {
	complain := func(format string, args ...any) { wrong = append(wrong, fmt.Sprintf(format, args...)) }
	var causes []string
	for i := range v.Differences {
		d := &v.Differences[i]
		causes = append(causes, string(d.Cause))
		for _, f := range d.Factors {
			if s.chance == "" && !slices.Contains(s.factors, f) {
				complain("%q is attributed to %s", d.What, f)
			}
		}
	}
	b := v.Bisection
	slices.Sort(causes)
	if s.chance != "" && len(b.Nondeterministic) > 0 {
		// Chance made two controls differ, so the causes are unpredictable.
	} else if causes = slices.Compact(causes); !slices.Equal(causes, slices.Sorted(slices.Values(s.causes))) {
		complain("got causes %q, want %q", causes, s.causes)
	}
	switch found := slices.Sorted(slices.Values(b.Factors)); {
	case slices.Equal(s.factors, []repro.Factor{"none"}):
		if len(found) > 0 || len(b.Nondeterministic) == 0 {
			complain("got factors %q, want none and nondeterministic outputs: %s", found, b.Summary)
		}
	case s.chance != "" && (slices.Contains(found, s.factors[0]) || len(b.Nondeterministic) > 0):
	case !slices.Equal(found, slices.Sorted(slices.Values(s.factors))):
		complain("got factors %q, want %q: %s", found, s.factors, b.Summary)
	}
	return wrong
}

// A table collects a line per program.
type table struct {
	sync.Mutex
	lines map[string]string
}

func (l *table) add(name, format string, args ...any) {
	l.Lock()
	defer l.Unlock()
	l.lines[name] = fmt.Sprintf("%-26s "+format, append([]any{name}, args...)...)
}

// TestCorpus checks that every irreproducible program is found with its cause and exactly its factors, and that the
// reproducible ones cause no false alarm.
func TestCorpus(t *testing.T) {
	b := namespace.New(namespace.Config{})
	defer b.Close()
	if _, err := b.Probe(t.Context()); err != nil {
		sandboxtest.Unavailable(t, "namespaces", err)
	}
	in := inputs(t)
	lines := &table{lines: map[string]string{}}
	atOnce := make(chan struct{}, runtime.NumCPU())
	t.Run("all", func(t *testing.T) {
		for _, s := range scripts(t, "differs") {
			t.Run(s.name, func(t *testing.T) {
				t.Parallel()
				atOnce <- struct{}{}
				defer func() { <-atOnce }()
				v, code := s.checked(t, in, "--bisect", "-n", "2")
				if why := s.missing(v); why != "" {
					sandboxtest.Unavailable(t, "conditions", why)
				}
				must.Be(t, code == 1 && v.Result == repro.Differs && v.Bisection != nil && len(v.Differences) != 0,
					"exit code %d, %s, %+v", code, v.Result, v.Bisection)
				for _, wrong := range s.problems(v) {
					t.Error(wrong)
				}
				d := v.Differences[0]
				lines.add(s.name, "%-14s %-14s %s: %s", strings.Join(s.causes, ", "), repro.Join(v.Bisection.Factors),
					strings.Join(d.Where, " > "), d.What)
			})
		}
		for _, s := range scripts(t, "same") {
			t.Run(s.name, func(t *testing.T) {
				t.Parallel()
				atOnce <- struct{}{}
				defer func() { <-atOnce }()
				v, code := s.checked(t, in)
				expect.That(t, code == 0 && v.Result == repro.Same && len(v.Runs) == repro.DefaultRuns,
					"exit code %d, %s: %+v", code, v.Result, v.Differences)
				lines.add(s.name, "same in %d runs, %d factors", len(v.Runs), len(v.Factors))
			})
		}
	})
	for _, name := range slices.Sorted(maps.Keys(lines.lines)) {
		t.Log(lines.lines[name])
	}
}

// TestCorpusShowsEveryCause checks that each cause and each factor has a program.
func TestCorpusShowsEveryCause(t *testing.T) {
	shown := map[string]bool{}
	for _, s := range scripts(t, "differs") {
		for _, c := range s.causes {
			shown[c] = true
		}
	}
	for _, row := range compare.Causes {
		expect.That(t, shown[string(row.Cause)], "no program shows the cause %s", row.Cause)
		delete(shown, string(row.Cause))
	}
	expect.That(t, len(shown) == 0, "unknown causes %v", shown)
	varied := slices.Clone(repro.AllFactors)
	for _, s := range scripts(t, "differs") {
		varied = slices.DeleteFunc(varied, func(f repro.Factor) bool { return slices.Contains(s.factors, f) })
	}
	expect.That(t, len(varied) == 0, "no program shows the factors %q", varied)
}

// docs/repro.md contains the table between these marks.
const (
	begin = "<!-- the programs -->\n"
	end   = "<!-- end of the programs -->\n"
)

func TestDocumentListsPrograms(t *testing.T) {
	const path = "../../docs/repro.md"
	before, rest, ok := strings.Cut(string(must.Get(os.ReadFile(path))(t)), begin)
	old, after, ends := strings.Cut(rest, end)
	must.Be(t, ok && ends, "%s lacks the marks %q and %q", path, begin, end)
	var b strings.Builder
	fmt.Fprintf(&b, "| Program | Description | Cause | Factor |\n|---|---|---|---|\n")
	for _, dir := range []string{"differs", "same"} {
		for _, s := range scripts(t, dir) {
			causes := strings.Join(s.causes, "`, `")
			if causes != "" {
				causes = "`" + causes + "`"
			}
			factors := repro.Join(s.factors)
			if s.chance != "" {
				factors += ", and chance: " + s.chance
			}
			fmt.Fprintf(&b, "| %s | %s | %s | %s |\n", s.name, s.what, causes, factors)
		}
	}
	if b.String() == old {
		return
	}
	must.Be(t, *update, "%s is out of date; run this test with -update", path)
	must.Succeed(t, os.WriteFile(path, []byte(before+begin+b.String()+end+after), 0o644))
}
