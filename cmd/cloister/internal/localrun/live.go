// SPDX-License-Identifier: Apache-2.0

package localrun

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"slices"
	"sync"
	"time"

	"github.com/cloister-build/cloister/cmd/cloister/internal/terminal"
	"github.com/cloister-build/cloister/cmd/internal/proctree"
	"github.com/cloister-build/cloister/sandbox"
)

// interval is the time between two updates of the live line, and before the first.
const interval = time.Second

// A live is a status line on a terminal, below the command's output, with the time and resources of the current run.
type live struct {
	to         io.Writer
	ps         func() ([]proctree.Process, error) // the descendants of this process, and itself
	background func() bool                        // another program may use the terminal

	mu     sync.Mutex
	shown  bool
	within bool // the command has printed part of a line, after which nothing is shown
}

// start shows the line of a run that begins now, until stop is called. heading begins the line. A nil line shows
// nothing.
func (l *live) start(heading string, every time.Duration) (stop func()) {
	if l == nil {
		return func() {}
	}
	began := time.Now()
	before, err := l.ps()
	if err != nil {
		return func() {}
	}
	done, ended := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(ended)
		tick := time.NewTicker(every)
		defer tick.Stop()
		for {
			select {
			case <-done:
				return
			case <-tick.C:
				l.draw(heading, time.Since(began), before)
			}
		}
	}()
	return func() {
		close(done)
		<-ended
		l.mu.Lock()
		defer l.mu.Unlock()
		l.clear()
	}
}

// draw replaces the line.
func (l *live) draw(heading string, elapsed time.Duration, before []proctree.Process) {
	var memory int64
	processes := 0
	all, _ := l.ps() // it worked before
	for _, p := range all {
		if !slices.ContainsFunc(before, func(b proctree.Process) bool { return b.PID == p.PID }) {
			memory += p.Resident
			processes++
		}
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.within || l.background() {
		return
	}
	l.shown = true
	// On a narrow terminal the line is cut, since the next update could not remove one that wraps.
	fmt.Fprintf(l.to, "\r\x1b[K\x1b[?7l%s%v · %s · %d processes\x1b[?7h",
		heading, elapsed.Truncate(time.Second), sandbox.Bytes(memory), processes)
}

// clear removes the line. The caller holds l.mu.
func (l *live) clear() {
	if l.shown && !l.background() {
		fmt.Fprint(l.to, "\r\x1b[K")
	}
	l.shown = false
}

// beside returns a writer to a terminal that removes the line first.
func (l *live) beside(w io.Writer) io.Writer { return &besideLive{l, w} }

type besideLive struct {
	*live
	w io.Writer
}

func (b *besideLive) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.clear()
	if len(p) > 0 {
		b.within = !bytes.HasSuffix(p, []byte("\n"))
	}
	return b.w.Write(p)
}

// liveLine returns the line of the runs and the writers for the output of their commands. The line is nil unless stderr
// is a terminal and the run is not interactive, and shows nothing while the run is in the background. It is also nil if
// stdout is a pipe, whose reader, such as less, may use the terminal.
func (c *Config) liveLine() (l *live, stdout, stderr io.Writer) {
	fi, err := os.Stdout.Stat()
	piped := err == nil && fi.Mode()&os.ModeNamedPipe != 0
	if c.Shell || c.TTY || c.Interactive || piped || !terminal.Is(c.Notes) {
		return nil, os.Stdout, os.Stderr
	}
	l = &live{
		to: c.Notes, ps: func() ([]proctree.Process, error) { return proctree.Of(os.Getpid()) },
		background: func() bool { return terminal.Background(c.Notes) },
	}
	if stdout = os.Stdout; terminal.Is(stdout) {
		stdout = l.beside(stdout)
	}
	return l, stdout, l.beside(os.Stderr)
}

// heading says which of several runs is live, and how many violations the earlier ones had.
func (c *Config) heading(m *metrics) string {
	if c.Runs == 1 {
		return ""
	}
	var violations int64
	for _, r := range m.Runs {
		violations += r.Violations
	}
	return fmt.Sprintf("run %d of %d · %d violations so far · ", len(m.Runs)+1, c.Runs, violations)
}
