// SPDX-License-Identifier: Apache-2.0

package cas_test

import (
	"testing"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/castest"
)

type decorator struct{ cas.Store }

func (d decorator) Unwrap() cas.Store { return d.Store }

type opaque struct{ cas.Store }

func TestAsFollowsDecorators(t *testing.T) {
	memory := castest.NewMemory()
	for name, test := range map[string]struct {
		store cas.Store
		want  bool
	}{
		"the store itself":  {memory, true},
		"decorated":         {decorator{memory}, true},
		"decorated twice":   {decorator{decorator{memory}}, true},
		"not an Unwrapper":  {decorator{opaque{memory}}, false},
		"decorates nothing": {decorator{}, false},
	} {
		got, ok := cas.As[cas.Splicer](test.store)
		if ok != test.want || ok && got != cas.Splicer(memory) {
			t.Errorf("%s: got %v, %v, want %v", name, got, ok, test.want)
		}
	}
	if _, ok := cas.As[cas.Locator](decorator{memory}); ok {
		t.Error("As found a Locator in a store without one")
	}
}
