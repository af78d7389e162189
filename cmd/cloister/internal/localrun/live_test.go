// SPDX-License-Identifier: Apache-2.0

package localrun

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/cloister-build/cloister/cmd/internal/proctree"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
	"github.com/cloister-build/cloister/tests/syncbuf"
)

// TestLiveLine: the line counts only the processes of the run, stays below the output, and disappears at the end.
func TestLiveLine(t *testing.T) {
	var screen syncbuf.Buffer
	all := []proctree.Process{{PID: 1, Resident: 1 << 30}}
	background := false
	l := &live{
		to: &screen, ps: func() ([]proctree.Process, error) { return all, nil }, background: func() bool { return background },
	}
	before := all
	all = append(all, proctree.Process{PID: 2, Resident: 2 << 20}, proctree.Process{PID: 3, Resident: 1 << 20})
	out := l.beside(&screen)
	l.draw("run 2 of 9 · ", 90*time.Second, before)
	fmt.Fprint(out, "a\n")
	fmt.Fprint(out, "b")
	l.draw("", time.Second, before)
	fmt.Fprint(out, "c\n")
	background = true
	l.draw("", time.Second, before)
	background = false
	want := "\r\x1b[K\x1b[?7lrun 2 of 9 · 1m30s · 3.0 MiB · 2 processes\x1b[?7h\r\x1b[Ka\nbc\n"
	expect.Equal(t, screen.String(), want)
	stop := l.start("", time.Millisecond)
	must.Hold(t, "a line is shown", func() bool { return strings.Contains(screen.String()[len(want):], "processes") })
	stop()
	if got := screen.String(); !strings.HasSuffix(got, " processes\x1b[?7h\r\x1b[K") {
		t.Errorf("got %q, want no line at the end", got)
	}
}
