// SPDX-License-Identifier: Apache-2.0

package node

import (
	"log/slog"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/cloister-build/cloister/tests/expect"
)

// lines are the lines of a log, each written with one call.
type lines chan string

// Write implements io.Writer.
func (l lines) Write(line []byte) (int, error) {
	l <- strings.TrimSuffix(string(line), "\n")
	return len(line), nil
}

// TestRepeatedWarningsAreCounted: the first is logged at once, and then once a minute the latest, with the number
// since.
func TestRepeatedWarningsAreCounted(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		out := make(lines, 10)
		plain := slog.New(slog.NewTextHandler(out, &slog.HandlerOptions{ReplaceAttr: func(_ []string, a slog.Attr) slog.Attr {
			if a.Key == slog.TimeKey {
				return slog.Attr{}
			}
			return a
		}}))
		log, flush := LimitRepeats(plain)
		wait := func(d time.Duration) {
			time.Sleep(d)
			synctest.Wait()
		}
		expect := func(when string, want ...string) {
			t.Helper()
			var got []string
			for len(out) > 0 {
				got = append(got, <-out)
			}
			expect.Slices(t, got, want, "%s", when)
		}
		for i := range 5 {
			log.With("server", "a").Warn("violation", "action", i)
		}
		log.Warn("another")
		log.Info("started")
		log.Info("started")
		expect("at once", "level=WARN msg=violation server=a action=0", "level=WARN msg=another", "level=INFO msg=started", "level=INFO msg=started")
		wait(59 * time.Second)
		log.Warn("violation", "action", 5)
		expect("within a minute")
		wait(2 * time.Second)
		expect("after a minute", "level=WARN msg=violation action=5 repeated=5")
		log.Warn("violation", "action", 6)
		wait(time.Minute)
		expect("after two minutes", "level=WARN msg=violation action=6 repeated=1")
		wait(time.Minute)
		log.Warn("violation", "action", 7)
		expect("after a quiet minute", "level=WARN msg=violation action=7")
		log.Warn("violation", "action", 8)
		flush()
		expect("at the end", "level=WARN msg=violation action=8 repeated=1")
		wait(time.Hour)
		expect("after the end")
	})
}
