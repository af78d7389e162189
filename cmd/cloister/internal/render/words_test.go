// SPDX-License-Identifier: Apache-2.0

package render

import (
	"strings"
	"testing"

	"github.com/cloister-build/cloister/tests/expect"
)

func TestCount(t *testing.T) {
	for n, want := range map[int]string{0: "0 slots", 1: "1 slot", 2: "2 slots"} {
		expect.Equal(t, Count(n, "slot"), want)
	}
	expect.Equal(t, Count(2, "entry")+", "+Count(1, "entry"), "2 entries, 1 entry")
}

func TestOnlyTerminalsGetColours(t *testing.T) {
	expect.That(t, !Colours(&strings.Builder{}), "got colours for a file, want none")
}
