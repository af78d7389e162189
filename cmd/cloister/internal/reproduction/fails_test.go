// SPDX-License-Identifier: Apache-2.0

package reproduction

import (
	"testing"

	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/worker/repro"
	"github.com/cloister-build/cloister/worker/repro/compare"
)

func TestFailOnSelectsCauses(t *testing.T) {
	owner := []repro.Difference{{Difference: compare.Difference{Cause: compare.Owner}}}
	for name, c := range map[string]struct {
		verdict repro.Verdict
		on      []string
		want    bool
	}{
		"any cause":     {repro.Verdict{Result: repro.Differs, Differences: owner}, nil, true},
		"the cause":     {repro.Verdict{Result: repro.Differs, Differences: owner}, []string{"owner"}, true},
		"another cause": {repro.Verdict{Result: repro.Differs, Differences: owner}, []string{"timestamp"}, false},
		"a flaky exit":  {repro.Verdict{Result: repro.FlakyExit}, []string{"timestamp"}, true},
		"not compared":  {repro.Verdict{Result: repro.Differs, Unexplained: []string{"out: too large"}}, []string{"timestamp"}, true},
		"the same":      {repro.Verdict{Result: repro.Same}, []string{"timestamp"}, false},
	} {
		f := Config{FailOn: c.on}
		expect.Equal(t, f.Fails(repro.Report{&c.verdict}), c.want, "%s", name)
	}
}
