// SPDX-License-Identifier: Apache-2.0

// Package expect has the assertions of tests: a failure is reported and lets the test continue. The last arguments of
// each function, a format and its arguments, describe what was compared; they may be omitted, except in That.
package expect

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// That reports a message unless ok is true.
func That(t testing.TB, ok bool, format string, args ...any) {
	t.Helper()
	if !ok {
		t.Errorf(format, args...)
	}
}

// Equal reports got unless it equals want.
func Equal[T comparable](t testing.TB, got, want T, what ...any) {
	t.Helper()
	if got != want {
		report(t, what, show(got), show(want))
	}
}

// Slices reports got unless it has the elements of want in the same order.
func Slices[T comparable](t testing.TB, got, want []T, what ...any) {
	t.Helper()
	if !slices.Equal(got, want) {
		report(t, what, show(got), show(want))
	}
}

// Text reports got unless it contains part.
func Text(t testing.TB, got, part string, what ...any) {
	t.Helper()
	if !strings.Contains(got, part) {
		report(t, what, show(got), strconv.Quote(part)+" in it")
	}
}

// Texts reports got unless it contains all parts.
func Texts(t testing.TB, got string, parts []string, what ...any) {
	t.Helper()
	for _, part := range parts {
		Text(t, got, part, what...)
	}
}

// Error reports err unless errors.Is(err, kind). With a nil kind it reports any error.
func Error(t testing.TB, err, kind error, what ...any) {
	t.Helper()
	if !errors.Is(err, kind) {
		report(t, what, err, kind)
	}
}

// Message reports err unless it is an error that contains part.
func Message(t testing.TB, err error, part string, what ...any) {
	t.Helper()
	if err == nil || !strings.Contains(err.Error(), part) {
		report(t, what, err, "an error that contains "+strconv.Quote(part))
	}
}

// Code reports err unless its gRPC status has the code.
func Code(t testing.TB, err error, code codes.Code, what ...any) {
	t.Helper()
	if status.Code(err) != code {
		report(t, what, err, code)
	}
}

// Err returns the error of a call with one other result.
func Err[T any](_ T, err error) error { return err }

// show quotes texts, unless they have several lines, and shortens large ones.
func show(v any) any {
	s, ok := v.(string)
	if ok && len(s) > 10_000 {
		return fmt.Sprintf("%d bytes, %q... with hash %x", len(s), s[:100], sha256.Sum256([]byte(s)))
	}
	if ok && strings.Contains(s, "\n") {
		return "\n" + s
	}
	if list, many := v.([]string); ok || many && len(list) > 0 {
		return fmt.Sprintf("%q", v)
	}
	return v
}

func report(t testing.TB, what []any, got, want any) {
	t.Helper()
	name := ""
	if len(what) > 0 {
		name = fmt.Sprintf(what[0].(string), what[1:]...) + ": "
	}
	t.Errorf("%sgot %v, want %v", name, got, want)
}
