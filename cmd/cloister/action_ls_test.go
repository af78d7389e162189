// SPDX-License-Identifier: Apache-2.0

package main

import "testing"

// One failed action among 100,000 that wait must not take as many calls to find.
func TestActionLsAsksForLargePagesOfWhatFailed(t *testing.T) {
	for name, test := range map[string]struct {
		c      lsConfig
		filter string
		size   int32
	}{
		"few":            {lsConfig{most: 3}, ``, 3},
		"many":           {lsConfig{most: 1 << 40}, ``, 1000},
		"failed":         {lsConfig{most: 1, failed: true, target: "//a:*"}, `target="//a:*" stage="COMPLETED"`, 1000},
		"failed, stated": {lsConfig{most: 1, failed: true, stage: "QUEUED"}, `stage="QUEUED"`, 1000},
	} {
		if r := test.c.request("in"); r.Name != "in" || r.Filter != test.filter || r.PageSize != test.size {
			t.Errorf("%s: asks for %v", name, r)
		}
	}
}
