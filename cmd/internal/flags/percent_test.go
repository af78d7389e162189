// SPDX-License-Identifier: Apache-2.0

package flags

import (
	"testing"

	"github.com/cloister-build/cloister/tests/expect"
)

func TestPercent(t *testing.T) {
	for text, want := range map[string]string{"1%": "1%", "0.5%": "0.5%", "0.01": "1%", "100%": "100%", "0": "0%", "1e-3": "0.1%"} {
		var s Percent
		if err := s.Set(text); err != nil || s.String() != want {
			t.Errorf("%q: %s, %v; want %s", text, &s, err, want)
		}
	}
	for _, text := range []string{"", "%", "101%", "-1%", "2", "NaN", "inf", "1%%", "one", "1 %", "1", "1.0"} {
		var s Percent
		expect.That(t, s.Set(text) != nil, "%q is taken for %s", text, &s)
	}
	var s Percent
	if err := s.Set("1"); err == nil || err.Error() != "write 1% or 100%" {
		t.Errorf("got %v, want a request to write 1%% or 100%%", err)
	}
}
