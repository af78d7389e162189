// SPDX-License-Identifier: Apache-2.0

package cas

// An Unwrapper is a Store that decorates another one: it changes some methods and delegates the rest.
type Unwrapper interface {
	Store
	// Unwrap returns the decorated store.
	Unwrap() Store
}

// As returns the first store that implements T: s, the store that s decorates, and so on. T is an optional interface,
// such as Batcher or Filer.
//
// A capability found below a decorator bypasses it. Therefore a decorator that changes Put implements Batcher and
// Splicer too, one that changes Open implements Filer and Locator, and one that cannot does not implement Unwrapper.
// Hidden lists the lost interfaces.
func As[T any](s Store) (T, bool) {
	for {
		if t, ok := s.(T); ok {
			return t, true
		}
		d, ok := s.(Unwrapper)
		if !ok {
			var none T
			return none, false
		}
		s = d.Unwrap()
	}
}
