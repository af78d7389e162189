// SPDX-License-Identifier: Apache-2.0

package reapi_test

import "fmt"

// executionRules are the rules 70 to 132.
var executionRules = func() (rules []rule) {
	for n := 70; n <= 132; n++ {
		rules = append(rules, rule{number: n, part: "exec", title: fmt.Sprintf("rule %d", n), needs: execution})
	}
	return rules
}()
