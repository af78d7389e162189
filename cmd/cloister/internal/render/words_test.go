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
}

func TestOnlyTerminalsGetColours(t *testing.T) {
	if Colours(&strings.Builder{}) {
		t.Error("got colours for a file, want none")
	}
}
