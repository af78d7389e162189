// SPDX-License-Identifier: Apache-2.0

package expect_test

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"strings"
	"testing"

	"github.com/cloister-build/cloister/tests/expect"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// A recorder is a test that records its errors.
type recorder struct {
	testing.TB
	text string
}

func (*recorder) Helper() {}

func (r *recorder) Errorf(format string, args ...any) { r.text += fmt.Sprintf(format, args...) }

// TestDifferencesAreReported: each function reports a difference, with both sides, and nothing else.
func TestDifferencesAreReported(t *testing.T) {
	absent := fmt.Errorf("open x: %w", fs.ErrNotExist)
	for want, check := range map[string]func(t testing.TB, differs bool){
		"3 is odd": func(t testing.TB, d bool) { expect.That(t, !d, "%d is odd", 3) },
		`got "a", want "b"`: func(t testing.TB, d bool) {
			expect.Equal(t, map[bool]string{false: "b", true: "a"}[d], "b")
		},
		"sum of 2: got 4, want 5": func(t testing.TB, d bool) {
			expect.Equal(t, map[bool]int{false: 5, true: 4}[d], 5, "sum of %d", 2)
		},
		"got 20000 bytes": func(t testing.TB, d bool) {
			long := strings.Repeat("x", 20_000)
			expect.Equal(t, long, map[bool]string{false: long, true: "x"}[d])
		},
		`got ["a"], want ["a" "b"]`: func(t testing.TB, d bool) {
			expect.Slices(t, map[bool][]string{false: {"a", "b"}, true: {"a"}}[d], []string{"a", "b"})
		},
		`log: got "a b", want "c" in it`: func(t testing.TB, d bool) {
			expect.Text(t, "a b", map[bool]string{false: "b", true: "c"}[d], "log")
		},
		"got \na\nb, want \"c\" in it": func(t testing.TB, d bool) {
			expect.Texts(t, "a\nb", map[bool][]string{false: {"a", "b"}, true: {"a", "c"}}[d])
		},
		"got open x: file does not exist, want EOF": func(t testing.TB, d bool) {
			expect.Error(t, absent, map[bool]error{false: fs.ErrNotExist, true: io.EOF}[d])
		},
		"got EOF, want <nil>": func(t testing.TB, d bool) {
			expect.Error(t, map[bool]error{true: io.EOF}[d], nil)
		},
		`got <nil>, want an error that contains "x"`: func(t testing.TB, d bool) {
			expect.Message(t, map[bool]error{false: absent}[d], "x")
		},
		`got EOF, want an error that contains "x"`: func(t testing.TB, d bool) {
			expect.Message(t, map[bool]error{false: absent, true: io.EOF}[d], "x")
		},
		"want NotFound": func(t testing.TB, d bool) {
			expect.Code(t, status.Error(map[bool]codes.Code{false: codes.NotFound}[d], "x"), codes.NotFound)
		},
	} {
		for _, differs := range []bool{false, true} {
			var r recorder
			check(&r, differs)
			if (r.text != "") != differs || differs && !strings.Contains(r.text, want) {
				t.Errorf("differs %v: got %q, want %q in it", differs, r.text, want)
			}
		}
	}
	if err := expect.Err(1, absent); !errors.Is(err, absent) {
		t.Errorf("Err: got %v, want %v", err, absent)
	}
}
