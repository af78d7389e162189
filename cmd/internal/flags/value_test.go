// SPDX-License-Identifier: Apache-2.0

package flags

import (
	"testing"
	"time"

	"github.com/cloister-build/cloister/tests/expect"
)

func TestRate(t *testing.T) {
	for text, want := range map[string]int64{"0": 0, "50MiB": 50 << 20, "50MiB/s": 50 << 20, "1000": 1000} {
		r := Rate(7)
		if err := r.Set(text); err != nil || int64(r) != want {
			t.Errorf("%q is %d, %v, want %d", text, int64(r), err, want)
		}
	}
	for _, text := range []string{"", "-1", "5%", "fast", "1/m", "50MiB/s/s"} {
		var r Rate
		if err := r.Set(text); err == nil {
			t.Errorf("%q is %d", text, int64(r))
		}
	}
}

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
