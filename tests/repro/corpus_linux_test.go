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
	"github.com/rogpeppe/go-internal/txtar"
)

var built program.Program

func TestMain(m *testing.M) { os.Exit(built.Main(m)) }

var (
	update = flag.Bool("update", false, "rewrite the table in docs/repro.md")
	all    = flag.Bool("all", false, "check all programs instead of one per combination of causes and factors")
)

// A script is a program of the corpus. It writes the output "out". Its first lines state the expected verdict.
type script struct {
	name, text string
	// what describes it.
	what string
	// causes and factors are those of its differences. The factor "none" means that runs differ with all factors held.
	causes  []string
	factors []repro.Factor
	// vary are the factors to vary, "all" unless that takes too long.
	vary string
	// chance, if not "", explains why other factors may be found as well, or none.
	chance string
	// miss, if not "", is what repro does not recognize: a wrong verdict is counted, and no failure.
	miss string
	// needs is a required program of the host.
	needs string
}

// minScripts is the minimum number of programs, and minChecked of those whose tools are installed in CI. If at least
// minDiffering irreproducible ones ran, repro verifies minVerified percent of the fixes that it suggests for them.
const (
	minScripts, minChecked    = 150, 120
	minDiffering, minVerified = 80, 80
)

// scripts returns the programs whose names begin with dir.
func scripts(t *testing.T, dir string) []script {
	t.Helper()
	corpus, err := txtar.ParseFile("testdata/corpus.txtar")
	must.Be(t, err == nil && len(corpus.Files) >= minScripts, "got %v, want at least %d programs", err, minScripts)
	var all []script
	for _, file := range corpus.Files {
		s := script{name: file.Name, text: string(file.Data), vary: "all"}
		for line := range strings.Lines(s.text) {
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
			case key == "Vary" && keyed:
				s.vary = value
			case key == "Chance" && keyed:
				s.chance = value
			case key == "Miss" && keyed:
				s.miss = value
			case key == "Needs" && keyed:
				s.needs = value
			default:
				s.what = strings.TrimSpace(s.what + " " + strings.TrimSpace(head))
			}
		}
		if s.what == "" || s.needs == "" || dir == "differs" && strings.HasPrefix(s.name, dir) && (len(s.causes) == 0 || len(s.factors) == 0) {
			t.Fatalf("%s lacks a description or an expectation", s.name)
		}
		if strings.HasPrefix(s.name, dir+"/") {
			all = append(all, s)
		}
	}
	return all
}

// chosen returns the programs to check whose names begin with dir: with -all, or if -run names programs, all; otherwise
// for each combination of causes and factors the first one with installed tools, and the reproducible ones of the same
// names.
func chosen(t *testing.T, dir string) []script {
	t.Helper()
	if selected := flag.Lookup("test.run").Value.String(); *all || strings.Contains(selected, "/") {
		return scripts(t, dir)
	}
	shown, names := map[string]bool{}, map[string]bool{}
	for _, s := range scripts(t, "differs") {
		if what := fmt.Sprint(s.causes, s.factors); inSandbox(s.needs) && !shown[what] {
			shown[what], names[strings.TrimPrefix(s.name, "differs/")] = true, true
		}
	}
	return slices.DeleteFunc(scripts(t, dir), func(s script) bool { return !names[strings.TrimPrefix(s.name, dir+"/")] })
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
		cmd := exec.Command("go", "build", "-ldflags=-s -w", "-o", filepath.Join(dir, "programs", name), source)
		cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("%v\n%s", err, out)
		}
	}
	return dir
}

// inSandbox reports whether a program of this name is in a directory that the sandbox has.
func inSandbox(name string) bool {
	for _, path := range []string{name, "/usr/local/bin/" + name, "/usr/bin/" + name, "/usr/sbin/" + name} {
		path, err := exec.LookPath(path)
		if err == nil {
			path, err = filepath.EvalSymlinks(path)
		}
		if err == nil && strings.HasPrefix(path, "/usr/") {
			return true
		}
	}
	return false
}

// checked returns the verdict of cloister repro on a program, and the exit code.
func (s *script) checked(t *testing.T, in string, flags ...string) (*repro.Verdict, int) {
	t.Helper()
	if !inSandbox(s.needs) {
		sandboxtest.Unavailable(t, "corpus", s.needs+" is not installed below /usr")
	}
	ctx, path := built.Within(t, 10*time.Minute)
	args := append(append([]string{"repro", "--json", "--in", in, "--out", "out", "--vary", s.vary}, flags...), "--", "sh", "-c", s.text)
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

// problems returns what is wrong with the causes and with the factors of the verdict on an irreproducible program.
func (s *script) problems(v *repro.Verdict) (causes, factors []string) {
	var found []string
	for i := range v.Differences {
		d := &v.Differences[i]
		if d.Cause != compare.Unknown {
			found = append(found, string(d.Cause))
		}
		for _, f := range d.Factors {
			if s.chance == "" && !slices.Contains(s.factors, f) {
				factors = append(factors, fmt.Sprintf("%q is attributed to %s", d.What, f))
			}
		}
	}
	b := v.Bisection
	slices.Sort(found)
	if s.chance != "" && len(b.Nondeterministic) > 0 {
		// Chance made two controls differ, so the causes are unpredictable.
	} else if found = slices.Compact(found); !slices.Equal(found, slices.Sorted(slices.Values(s.causes))) {
		causes = append(causes, fmt.Sprintf("got causes %q, want %q", found, s.causes))
	}
	switch found := slices.Sorted(slices.Values(b.Factors)); {
	case slices.Equal(s.factors, []repro.Factor{"none"}):
		if len(found) > 0 || len(b.Nondeterministic) == 0 {
			factors = append(factors, fmt.Sprintf("got factors %q, want none and nondeterministic outputs: %s", found, b.Summary))
		}
	case s.chance != "" && (slices.Contains(found, s.factors[0]) || len(b.Nondeterministic) > 0):
	case !slices.Equal(found, slices.Sorted(slices.Values(s.factors))):
		factors = append(factors, fmt.Sprintf("got factors %q, want %q: %s", found, s.factors, b.Summary))
	}
	return causes, factors
}

// A tally collects a line per program and counts.
type tally struct {
	sync.Mutex
	lines map[string]string

	differs, causes, factors int // irreproducible programs, and those with the right causes and factors
	same, alarms             int // reproducible programs, and false alarms
	fixes, verified          int // distinct suggestions, and those that repro tried with success
	byHand                   int // those of other programs that have a reproducible twin of the same name
}

func (l *tally) add(name, format string, args ...any) {
	l.lines[name] = fmt.Sprintf("%-26s "+format, append([]any{name}, args...)...)
}

// addDiffering counts the verdict on an irreproducible program, and adds a line.
func (l *tally) addDiffering(s *script, v *repro.Verdict, causes, factors []string, twins map[string]bool) {
	l.Lock()
	defer l.Unlock()
	l.differs++
	if len(causes) == 0 {
		l.causes++
	}
	if len(factors) == 0 {
		l.factors++
	}
	suggested := map[string]bool{} // whether it is verified
	for i := range v.Differences {
		if d := &v.Differences[i]; d.Fix != "" {
			suggested[d.Fix] = suggested[d.Fix] || d.FixVerified
		}
	}
	var fixes []string
	for fix, verified := range suggested {
		l.fixes++
		switch {
		case verified:
			l.verified++
			fix = "verified: " + fix
		case twins[strings.TrimPrefix(s.name, "differs/")]:
			l.byHand++
			fix = "by hand: " + fix
		}
		fixes = append(fixes, fix)
	}
	slices.Sort(fixes)
	d := v.Differences[0]
	l.add(s.name, "%-14s %-14s %s: %s [%s]", strings.Join(s.causes, ", "), repro.Join(v.Bisection.Factors), strings.Join(d.Where, " > "),
		d.What, strings.Join(fixes, " | "))
}

// addSame counts the verdict on a reproducible program, and adds a line.
func (l *tally) addSame(s *script, v *repro.Verdict) {
	l.Lock()
	defer l.Unlock()
	l.same++
	if v.Result != repro.Same {
		l.alarms++
	}
	l.add(s.name, "%s in %d runs, %d factors", v.Result, len(v.Runs), len(v.Factors))
}

func (l *tally) String() string {
	return fmt.Sprintf("cause %d of %d, factor %d of %d, false alarms %d of %d, fixes verified %d of %d, "+
		"%d of them by hand", l.causes, l.differs, l.factors, l.differs, l.alarms, l.same, l.verified+l.byHand, l.fixes, l.byHand)
}

// TestCorpus checks that every chosen irreproducible program is found with its cause and exactly its factors, and that
// the reproducible ones cause no false alarm. With -all, which make corpus sets, it checks every program.
func TestCorpus(t *testing.T) {
	b := namespace.New(namespace.Config{})
	defer b.Close()
	if _, err := b.Probe(t.Context()); err != nil {
		sandboxtest.Unavailable(t, "namespaces", err)
	}
	in := inputs(t)
	twins := map[string]bool{}
	for _, s := range scripts(t, "same") {
		twins[strings.TrimPrefix(s.name, "same/")] = true
	}
	counts := &tally{lines: map[string]string{}}
	atOnce := make(chan struct{}, runtime.NumCPU())
	each := func(t *testing.T, dir string, check func(t *testing.T, s *script)) {
		for _, s := range chosen(t, dir) {
			t.Run(s.name, func(t *testing.T) {
				t.Parallel()
				atOnce <- struct{}{}
				defer func() { <-atOnce }()
				check(t, &s)
			})
		}
	}
	t.Run("all", func(t *testing.T) {
		each(t, "differs", func(t *testing.T, s *script) {
			v, code := s.checked(t, in, "--bisect", "-n", "2")
			if why := s.missing(v); why != "" {
				sandboxtest.Unavailable(t, "conditions", why)
			}
			if code != 1 || v.Result != repro.Differs || v.Bisection == nil || len(v.Differences) == 0 {
				t.Fatalf("exit code %d, %s, %+v", code, v.Result, v.Bisection)
			}
			causes, factors := s.problems(v)
			counts.addDiffering(s, v, causes, factors, twins)
			for _, wrong := range slices.Concat(causes, factors) {
				if s.miss != "" {
					t.Logf("%s: %s", wrong, s.miss)
				} else {
					t.Error(wrong)
				}
			}
		})
		each(t, "same", func(t *testing.T, s *script) {
			v, code := s.checked(t, in)
			counts.addSame(s, v)
			if code != 0 || v.Result != repro.Same || len(v.Runs) != repro.DefaultRuns {
				t.Errorf("exit code %d, %s: %+v", code, v.Result, v.Differences)
			}
		})
	})
	for _, name := range slices.Sorted(maps.Keys(counts.lines)) {
		t.Log(counts.lines[name])
	}
	t.Log(counts)
	// With fewer programs, such as those that -run selects, the ratio means little.
	expect.That(t, counts.differs < minDiffering || counts.verified*100 >= minVerified*counts.fixes,
		"repro verified %d of %d fixes, want %d %%", counts.verified, counts.fixes, minVerified)
	runnable := slices.DeleteFunc(slices.Concat(scripts(t, "differs"), scripts(t, "same")), func(s script) bool { return !inSandbox(s.needs) })
	if n := len(runnable); n < minChecked {
		sandboxtest.Unavailable(t, "tools", fmt.Sprintf("only %d programs have their tools", n))
	}
}

// TestCorpusShowsEveryCause checks that each cause and each factor of a program has one.
func TestCorpusShowsEveryCause(t *testing.T) {
	shown := map[string]bool{}
	for _, s := range scripts(t, "differs") {
		for _, c := range s.causes {
			shown[c] = true
		}
	}
	elsewhere := []compare.Cause{
		compare.Compressed,       // a bisection finds the cause of what was compressed
		compare.PersistentWorker, // no program here has one; see TestWarmDifferenceIsFound
	}
	for _, row := range compare.Causes {
		if !shown[string(row.Cause)] && !slices.Contains(elsewhere, row.Cause) {
			t.Errorf("no program shows the cause %s", row.Cause)
		}
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
	text := must.Get(os.ReadFile(path))(t)
	before, rest, ok := strings.Cut(string(text), begin)
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
