// SPDX-License-Identifier: Apache-2.0

package render

import (
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
