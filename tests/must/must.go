// SPDX-License-Identifier: Apache-2.0

// Package must has checks of a test's setup: a failure ends the test immediately.
package must

import (
	"testing"
	"time"
)

// Succeed ends the test if err is not nil.
func Succeed(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// Get ends the test if err is not nil, and returns v: f := must.Get(os.Open(name))(t).
func Get[T any](v T, err error) func(t testing.TB) T {
	return func(t testing.TB) T {
		t.Helper()
		Succeed(t, err)
		return v
	}
}

// Be ends the test with a message unless ok is true.
func Be(t testing.TB, ok bool, format string, args ...any) {
	t.Helper()
	if !ok {
		t.Fatalf(format, args...)
	}
}

// Hold waits until condition holds, and ends the test if that takes more than a minute. what describes the condition.
func Hold(t testing.TB, what string, condition func() bool) {
	t.Helper()
	if !Poll(time.Minute, condition) {
		t.Fatalf("timeout: %s", what)
	}
}

// Poll waits until condition holds, and reports whether it did before the limit. Between checks it pauses for four
// times the duration of the last one, at least 10 ms and at most a second, so that slow conditions, such as those that
// start programs, leave the processors to other tests.
func Poll(limit time.Duration, condition func() bool) bool {
	end := time.Now().Add(limit)
	for {
		began := time.Now()
		if condition() {
			return true
		}
		now := time.Now()
		if now.After(end) {
			return false
		}
		time.Sleep(min(max(10*time.Millisecond, 4*now.Sub(began)), time.Second))
	}
}
