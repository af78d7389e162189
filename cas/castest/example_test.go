// SPDX-License-Identifier: Apache-2.0

package castest_test

import (
	"testing"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/castest"
	"github.com/cloister-build/cloister/cas/memory"
)

// A test of a store of your own: its name begins with Test.
func ExampleTestStore() {
	_ = func(t *testing.T) {
		castest.TestStore(t, func(*testing.T) cas.Store { return memory.New(1 << 30) })
	}
}
