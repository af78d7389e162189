// SPDX-License-Identifier: Apache-2.0

package render

import (
	"strings"
	"testing"

	"github.com/cloister-build/cloister/tests/expect"
)

func TestAge(t *testing.T) {
	for seconds, want := range map[float64]string{
		0: "0.0s", 0.25: "0.2s", 9.99: "10.0s", 10: "10s", 59.9: "59s", 60: "1m00s", 3599: "59m59s", 3600: "1h00m", 86399: "23h59m", 86400: "1d0h", 1e6: "11d13h",
	} {
		expect.Equal(t, Age(seconds), want, "%v", seconds)
	}
}

func TestCount(t *testing.T) {
	for n, want := range map[int]string{0: "0 slots", 1: "1 slot", 2: "2 slots"} {
		expect.Equal(t, Count(n, "slot"), want)
	}
	expect.Equal(t, Count(2, "entry")+", "+Count(1, "entry"), "2 entries, 1 entry")
}

func TestOnlyTerminalsGetColours(t *testing.T) {
	expect.That(t, !Colours(&strings.Builder{}), "got colours for a file, want none")
}
