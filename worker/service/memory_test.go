// SPDX-License-Identifier: Apache-2.0

package service

import (
	"reflect"
	"testing"

	"github.com/cloister-build/cloister/cas/tree"
	"github.com/cloister-build/cloister/tests/expect"
)

// TestCachesShareTheMemory checks that the limits of all caches add up to Config.Memory.
func TestCachesShareTheMemory(t *testing.T) {
	for _, memory := range []int64{MinMemory, DefaultMemory, 1 << 40} {
		var sum int64
		for _, limit := range reflect.ValueOf(divide(memory)).Fields() {
			expect.That(t, limit.Int() >= 1<<20, "%d bytes of memory: a cache has %d", memory, limit.Int())
			sum += limit.Int()
		}
		expect.Equal(t, sum, memory, "limits together")
	}
}

// TestDefaultMemoryKeepsTheDefaults of the packages that measurements describe.
func TestDefaultMemoryKeepsTheDefaults(t *testing.T) {
	if got := divide(DefaultMemory); got.messages != 64<<20 || got.subtrees != tree.DefaultSeenBytes {
		t.Errorf("got %+v, want %d bytes of messages and %d of subtrees", got, 64<<20, tree.DefaultSeenBytes)
	}
}
