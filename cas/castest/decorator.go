// SPDX-License-Identifier: Apache-2.0

package castest

import (
	"slices"
	"testing"

	"github.com/cloister-build/cloister/cas"
)

// TestDecorator checks that decorated stores keep the contract of TestStore, and that they hide exactly those optional
// interfaces of the stores below them that hides names, such as "Locator".
func TestDecorator(t *testing.T, newStore func(t *testing.T) cas.Store, decorate func(cas.Store) cas.Store, hides ...string) {
	t.Helper()
	slices.Sort(hides)
	if got := cas.Hidden(decorate(newStore(t))); !slices.Equal(got, hides) {
		t.Errorf("the decorator hides %q, want %q: implement Unwrap, or these interfaces", got, hides)
	}
	TestStore(t, func(t *testing.T) cas.Store { return decorate(newStore(t)) })
}
