// SPDX-License-Identifier: Apache-2.0

package tests

import (
	"fmt"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
)

// conformance is the document with a table row for each rule.
const conformance = "docs/reapi.md"

// lastRule is the number of the last rule.
const lastRule = 132

var (
	// ruleRow matches a row: number, rule, implementation, tests.
	ruleRow = regexp.MustCompile(`(?m)^\| ([0-9]+) \|(.*)\|$`)
	// namedTest matches a test in the last column: PACKAGE.TEST or TestRules/NNN.
	namedTest = regexp.MustCompile("`([^`]+)`")
	// testFunction matches a test in the source, checkedRule a rule in the tables of tests/reapi.
	testFunction = regexp.MustCompile(`(?m)^func (Test\w+)\(t \*testing\.T\)`)
	checkedRule  = regexp.MustCompile(`(?m)^\t\{([0-9]+), "[a-z]+", "[^"]+", `)
	// ruleOfTest matches the number of a rule in the name of a test.
	ruleOfTest = regexp.MustCompile(`[0-9]{3}`)
)

// rowFaults returns the faults in the rows of a document. The tests are those that exist.
func rowFaults(document string, tests map[string]bool) (faults []string) {
	fault := func(format string, args ...any) { faults = append(faults, fmt.Sprintf(format, args...)) }
	rows := map[int]int{}
	for _, m := range ruleRow.FindAllStringSubmatch(document, -1) {
		n, _ := strconv.Atoi(m[1]) // too large a number is not in the list either
		rows[n]++
		columns := strings.Split(m[2], " | ")
		if len(columns) != 3 {
			fault("rule %s: got %d columns, want rule, implementation and tests", m[1], len(columns))
			continue
		}
		for i, column := range columns {
			if strings.TrimSpace(column) == "" {
				fault("rule %s: column %d is empty", m[1], i+2)
			}
		}
		named := namedTest.FindAllStringSubmatch(columns[2], -1)
		if check := fmt.Sprintf("TestRules/%03d", n); len(named) == 0 || named[0][1] != check {
			fault("rule %s: the first test is not %s", m[1], check)
		}
		for _, test := range named {
			if !tests[test[1]] {
				fault("rule %s: no test %s", m[1], test[1])
			}
			// A test with numbers in its name must have this one.
			_, name, ok := strings.Cut(test[1], ".TestRule")
			if ok && !slices.Contains(ruleOfTest.FindAllString(name, -1), fmt.Sprintf("%03d", n)) {
				fault("rule %s: %s is a test of another rule", m[1], test[1])
			}
		}
	}
	for n := 1; n <= lastRule; n++ {
		if rows[n] != 1 {
			fault("rule %d has %d rows, want one", n, rows[n])
		}
		delete(rows, n)
	}
	for n := range rows {
		fault("no rule %d", n)
	}
	return faults
}

// existingTests returns the names of all tests in the form of the document.
func existingTests(t *testing.T) map[string]bool {
	t.Helper()
	tests := map[string]bool{}
	sources(t, func(file, text string) {
		if !strings.HasSuffix(file, "_test.go") {
			return
		}
		dir := path.Base(filepath.ToSlash(filepath.Dir(file)))
		for _, m := range testFunction.FindAllStringSubmatch(text, -1) {
			tests[dir+"."+m[1]] = true
		}
		if dir != "reapi" {
			return
		}
		for _, m := range checkedRule.FindAllStringSubmatch(text, -1) {
			n, _ := strconv.Atoi(m[1])
			tests[fmt.Sprintf("TestRules/%03d", n)] = true
		}
	}, ".go")
	return tests
}

// TestEveryRuleHasARow checks that the document has a row for each of the 132 rules and that the tests it names exist.
func TestEveryRuleHasARow(t *testing.T) {
	document := must.Get(os.ReadFile(filepath.Join(root, filepath.FromSlash(conformance))))(t)
	for _, f := range rowFaults(string(document), existingTests(t)) {
		t.Errorf("%s: %s", conformance, f)
	}
}

func TestRowFaultsAreReported(t *testing.T) {
	tests := map[string]bool{"cas.TestOfSomething": true, "cas.TestRule001_X": true, "cas.TestRule007And008_X": true}
	var good []string
	for n := 1; n <= lastRule; n++ {
		check := fmt.Sprintf("TestRules/%03d", n)
		tests[check] = true
		good = append(good, fmt.Sprintf("| %d | what | how | `%s`, `cas.TestOfSomething` |", n, check))
	}
	with := func(n int, row string) string {
		rows := append([]string{"| Rule | What | How | Tests |", "|---|---|---|---|"}, good[:n-1]...)
		return strings.Join(append(append(rows, row), good[n:]...), "\n")
	}
	if faults := rowFaults(with(8, "| 8 | what | how | `TestRules/008`, `cas.TestRule007And008_X` |"), tests); len(faults) > 0 {
		t.Errorf("a correct document: got faults %q, want none", faults)
	}
	for what, c := range map[string]struct{ document, words string }{
		"no row":                 {with(5, ""), "rule 5 has 0 rows"},
		"two rows":               {with(5, good[4]+"\n"+good[4]), "rule 5 has 2 rows"},
		"unknown rule":           {with(5, good[4]+"\n| 133 | what | how | `TestRules/133` |"), "no rule 133"},
		"no test":                {with(5, "| 5 | what | how | |"), "column 4 is empty"},
		"no implementation":      {with(5, "| 5 | what |  | `TestRules/005` |"), "column 3 is empty"},
		"another rule's check":   {with(5, "| 5 | what | how | `TestRules/006` |"), "not TestRules/005"},
		"another rule's test":    {with(5, "| 5 | what | how | `TestRules/005`, `cas.TestRule001_X` |"), "of another rule"},
		"an unknown test":        {with(5, "| 5 | what | how | `TestRules/005`, `cas.TestOfNothing` |"), "no test cas.TestOfNothing"},
		"another package":        {with(5, "| 5 | what | how | `TestRules/005`, `tree.TestOfSomething` |"), "no test tree.TestOfSomething"},
		"a row without a column": {with(5, "| 5 | what | `TestRules/005` |"), "2 columns"},
	} {
		expect.Text(t, strings.Join(rowFaults(c.document, tests), "\n"), c.words, "%s", what)
	}
	delete(tests, "TestRules/009")
	if faults := rowFaults(with(5, good[4]), tests); len(faults) != 1 || !strings.Contains(faults[0], "no test TestRules/009") {
		t.Errorf("an unchecked rule: got %q, want one fault", faults)
	}
}
