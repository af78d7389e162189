// SPDX-License-Identifier: Apache-2.0

package actions

import (
	"testing"
)

// Finding one failed action among 100,000 queued ones must not take as many calls.
func TestFailedUsesLargePages(t *testing.T) {
	for name, test := range map[string]struct {
		c      List
		filter string
		size   int32
	}{
		"few":            {List{Limit: 3}, ``, 3},
		"many":           {List{Limit: 1 << 40}, ``, 1000},
		"failed":         {List{Limit: 1, Failed: true, Target: "//a:*"}, `target="//a:*" stage="COMPLETED"`, 1000},
		"failed, stated": {List{Limit: 1, Failed: true, Stage: "QUEUED"}, `stage="QUEUED"`, 1000},
	} {
		if r := test.c.request("in"); r.Name != "in" || r.Filter != test.filter || r.PageSize != test.size {
			t.Errorf("%s: asks for %v", name, r)
		}
	}
}
