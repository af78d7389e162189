// SPDX-License-Identifier: Apache-2.0

package reapi_test

import (
	"testing"

	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
)

// TestEveryRuleHasACheck checks the list of rules.
func TestEveryRuleHasACheck(t *testing.T) {
	titles := map[string]bool{}
	for i, r := range rules() {
		must.Be(t, r.number == i+1, "rule %d is followed by rule %d", i, r.number)
		expect.That(t, r.check != nil && r.title != "" && !titles[r.title],
			"rule %d, %q: no check or no unique title", r.number, r.title)
		titles[r.title] = true
	}
	expect.Equal(t, len(rules()), 132, "rules")
}

// TestSelection checks the flags -part and -rules.
func TestSelection(t *testing.T) {
	for _, test := range []struct {
		parts, rules string
		want         []int
	}{
		{rules: "62", want: []int{62}},
		{rules: "62,36-38", want: []int{36, 37, 38, 62}},
		{parts: "ac", rules: "1-63", want: []int{62, 63}},
		{parts: "chunk", want: []int{57, 58, 59, 60, 61}},
		{parts: "none"},
		{rules: "x"},
		{rules: "5-3"},
		{rules: "0"},
		{rules: "900"},
		{rules: "1-1000000000000"},
	} {
		got, err := selected(test.parts, test.rules)
		if (err == nil) != (test.want != nil) || len(got) != len(test.want) {
			t.Errorf("-part %q -rules %q: got %d rules, %v; want %v", test.parts, test.rules, len(got), err, test.want)
			continue
		}
		for i, n := range test.want {
			expect.That(t, got[i].number == n,
				"-part %q -rules %q: rule %d, want %d", test.parts, test.rules, got[i].number, n)
		}
	}
}
