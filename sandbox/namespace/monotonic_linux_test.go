// SPDX-License-Identifier: Apache-2.0

package namespace

import (
	"strings"
	"testing"
	"time"
)

// TestHeardIsThatMomentOnBothClocks: the time of day is what was read, to the nanosecond, and there is a reading of the
// monotonic clock, so that who sets the clock does not change how long a run took.
func TestHeardIsThatMomentOnBothClocks(t *testing.T) {
	read := time.Now().Add(-time.Millisecond).Round(0)
	got := withMonotonic(read.UnixNano())
	if !got.Equal(read) || !strings.Contains(got.String(), " m=") || strings.Contains(read.String(), " m=") {
		t.Errorf("got %v of %v", got, read)
	}
}
