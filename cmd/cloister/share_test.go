// SPDX-License-Identifier: Apache-2.0

package main

import "testing"

func TestShare(t *testing.T) {
	for text, want := range map[string]string{"1%": "1%", "0.5%": "0.5%", "0.01": "1%", "100%": "100%", "1": "100%", "0": "0%"} {
		var s share
		if err := s.Set(text); err != nil || s.String() != want {
			t.Errorf("%q: %s, %v; want %s", text, &s, err, want)
		}
	}
	for _, text := range []string{"", "%", "101%", "-1%", "2", "NaN", "inf", "1%%", "one"} {
		var s share
		if err := s.Set(text); err == nil {
			t.Errorf("%q is taken for %s", text, &s)
		}
	}
}
