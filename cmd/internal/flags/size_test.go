// SPDX-License-Identifier: Apache-2.0

package flags

import (
	"testing"
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
