// SPDX-License-Identifier: Apache-2.0

package must_test

import (
	"fmt"
	"io"
	"testing"
	"testing/synctest"
	"time"

	"github.com/cloister-build/cloister/tests/must"
)

// A recorder is a test that records why it ends.
type recorder struct {
	testing.TB
	ended string
}

func (*recorder) Helper() {}

func (r *recorder) Fatal(args ...any) { r.ended = fmt.Sprint(args...) }

func (r *recorder) Fatalf(format string, args ...any) { r.ended = fmt.Sprintf(format, args...) }

func TestFailuresEndTheTest(t *testing.T) {
	for want, f := range map[string]func(t testing.TB){
		"":     func(t testing.TB) { must.Succeed(t, nil); must.Get(1, nil)(t); must.Be(t, true, "no") },
		"EOF":  func(t testing.TB) { must.Get(1, io.EOF)(t) },
		"1 no": func(t testing.TB) { must.Be(t, false, "%d no", 1) },
	} {
		var r recorder
		if f(&r); r.ended != want {
			t.Errorf("got %q, want %q", r.ended, want)
		}
	}
	if got := must.Get(7, nil)(t); got != 7 {
		t.Errorf("got %d, want 7", got)
	}
}

// TestPollPauses uses a condition that takes 100 ms.
func TestPollPauses(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		calls := 0
		check := func() bool {
			time.Sleep(100 * time.Millisecond)
			calls++
			return calls == 30
		}
		if must.Poll(9500*time.Millisecond, check) || calls != 20 {
			t.Errorf("got %d calls in 10 s, want 20 and no success", calls)
		}
		if !must.Poll(time.Minute, check) || calls != 30 {
			t.Errorf("got %d calls, want success at call 30", calls)
		}
	})
}
