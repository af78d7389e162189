// SPDX-License-Identifier: Apache-2.0

package render

import (
	"strings"
	"testing"
)

func TestCount(t *testing.T) {
	for n, want := range map[int]string{0: "0 slots", 1: "1 slot", 2: "2 slots"} {
		if got := Count(n, "slot"); got != want {
			t.Errorf("got %q, want %q", got, want)
		}
	}
	if got := Count(2, "entry") + ", " + Count(1, "entry"); got != "2 entries, 1 entry" {
		t.Errorf("got %q", got)
	}
}

func TestOnlyTerminalsGetColours(t *testing.T) {
	if Colours(&strings.Builder{}) {
		t.Error("got colours for a file, want none")
	}
}
