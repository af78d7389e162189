// SPDX-License-Identifier: Apache-2.0

package namespace

import (
	"strings"
	"testing"
	"time"

	"github.com/cloister-build/cloister/tests/expect"
)

// TestWithMonotonicKeepsTheTime: the result equals the given time to the nanosecond and has a monotonic reading.
func TestWithMonotonicKeepsTheTime(t *testing.T) {
	read := time.Now().Add(-time.Millisecond).Round(0)
	got := withMonotonic(read.UnixNano())
	expect.That(t, got.Equal(read) && strings.Contains(got.String(), " m=") && !strings.Contains(read.String(), " m="),
		"got %v, want %v with a monotonic reading", got, read)
}
