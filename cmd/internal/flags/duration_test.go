// SPDX-License-Identifier: Apache-2.0

package flags

import (
	"testing"
	"time"
)

func TestDuration(t *testing.T) {
	for text, want := range map[string]time.Duration{
		"0": 0, "90s": 90 * time.Second, "3h": 3 * time.Hour, "14d": 14 * Day, "1d12h": 36 * time.Hour, "36500d": MaxDuration, "1h30m": 90 * time.Minute,
	} {
		var s, again Duration
		if err := s.Set(text); err != nil || time.Duration(s) != want {
			t.Errorf("%q is %v, %v, want %v", text, time.Duration(s), err, want)
		}
		if err := again.Set(s.String()); err != nil || again != s {
			t.Errorf("%q is printed as %q, which is %v, %v", text, s.String(), time.Duration(again), err)
		}
	}
	for _, text := range []string{"", "d", "-1s", "-1d", "1d-1h", "14", "1.5d", "1y", "36501d", "36500d1s", "99999999d", "1dd", "876001h"} {
		var s Duration
		if err := s.Set(text); err == nil {
			t.Errorf("%q is %v", text, time.Duration(s))
		}
	}
}
