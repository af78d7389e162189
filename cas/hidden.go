// SPDX-License-Identifier: Apache-2.0

package cas

import (
	"reflect"
	"slices"
)

// optional lists the interfaces that a Store may have besides Store.
var optional = []reflect.Type{
	reflect.TypeFor[Batcher](), reflect.TypeFor[Fetcher](), reflect.TypeFor[Filer](), reflect.TypeFor[Locator](),
	reflect.TypeFor[PutChecker](), reflect.TypeFor[Renewer](), reflect.TypeFor[Splicer](),
}

// Hidden returns the names of the optional interfaces, such as "Locator", that a store in a field of s has and that As
// does not find in s. A decorator that embeds a Store and has no Unwrap hides them all. Without a Locator and a Filer,
// every input of an action is opened and copied; without a Fetcher, it is fetched on its own.
//
// Hidden looks only at types, so it calls no method but Unwrap.
func Hidden(s Store) []string {
	var hidden []string
	for _, t := range optional {
		if !found(s, t) && fieldHas(reflect.ValueOf(s), t, 0) {
			hidden = append(hidden, t.Name())
		}
	}
	slices.Sort(hidden)
	return hidden
}

// found is As for a type of optional.
func found(s Store, t reflect.Type) bool {
	for s != nil {
		if reflect.TypeOf(s).Implements(t) {
			return true
		}
		d, ok := s.(Unwrapper)
		if !ok {
			return false
		}
		s = d.Unwrap()
	}
	return false
}

// maxDecorators is the depth to which Hidden follows decorators; cycles end there.
const maxDecorators = 16

var storeType = reflect.TypeFor[Store]()

// fieldHas reports whether a store in a field of v has the interface t, or a store in a field of that one.
func fieldHas(v reflect.Value, t reflect.Type, depth int) bool {
	for v.Kind() == reflect.Interface || v.Kind() == reflect.Pointer {
		v = v.Elem()
	}
	if v.Kind() != reflect.Struct || depth == maxDecorators {
		return false
	}
	for _, f := range v.Fields() {
		if !f.Type().Implements(storeType) {
			continue
		}
		if f.Kind() == reflect.Interface {
			f = f.Elem()
		}
		if f.IsValid() && (f.Type().Implements(t) || fieldHas(f, t, depth+1)) {
			return true
		}
	}
	return false
}
