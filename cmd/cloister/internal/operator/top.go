// SPDX-License-Identifier: Apache-2.0

package operator

import (
	"context"
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"github.com/cloister-build/cloister/cmd/cloister/internal/interrupt"
	"github.com/cloister-build/cloister/cmd/cloister/internal/terminal"
	cloisterpb "github.com/cloister-build/cloister/proto/cloister/v1"
	"github.com/cloister-build/cloister/sandbox/printable"
)

// Top is the flags of top.
type Top struct {
	From     Fleet
	Interval time.Duration
	Rounds   int // 0: no limit
}

// Watch shows the state until a signal or q, neither of which is a failure.
func (c *Top) Watch(ctx context.Context, in io.Reader, out io.Writer) error {
	ctx, end := interrupt.Context(ctx)
	defer end()
	if file, ok := out.(*os.File); ok && terminal.Is(out) {
		ctx, quit := context.WithCancel(ctx)
		defer quit()
		if keyboard, ok := in.(*os.File); ok {
			defer terminal.CharMode(keyboard)()
			go awaitQuit(keyboard, quit)
		}
		view := &screen{file}
		view.open()
		defer view.close()
		return c.follow(ctx, view.show)
	}
	return c.follow(ctx, plainView(out))
}

// awaitQuit calls quit when q is typed. It reads until the program ends, because nothing else ends a read of a
// terminal.
func awaitQuit(keyboard io.Reader, quit func()) {
	key := make([]byte, 1)
	for {
		if n, err := keyboard.Read(key); err != nil {
			return
		} else if n == 1 && (key[0] == 'q' || key[0] == 'Q') {
			quit()
			return
		}
	}
}

// A frame is what top shows at one moment.
type frame struct {
	*State
	rate  float64 // completed operations per second since the previous frame
	rated bool    // there is a previous frame
	err   error   // why the state is outdated
}

// follow shows a frame at once and then every interval.
func (c *Top) follow(ctx context.Context, show func(frame) error) error {
	return c.From.Connect(func(client cloisterpb.FleetClient) error {
		var f frame
		var asked time.Time
		for round := 1; ; round++ {
			s, err := c.From.Status(ctx, client)
			now := time.Now()
			switch {
			case ctx.Err() != nil:
				return nil
			case err != nil && f.State == nil:
				return err
			case err != nil:
				f.err = err
			default:
				next := frame{State: s}
				if before := f.State; before != nil && f.err == nil && s.Done >= before.Done {
					next.rate, next.rated = float64(s.Done-before.Done)/now.Sub(asked).Seconds(), true
				}
				f, asked = next, now
			}
			if err := show(f); err != nil || round == c.Rounds {
				return err
			}
			select {
			case <-time.After(c.Interval):
			case <-ctx.Done():
				return nil
			}
		}
	})
}

// plainView prints a line for each frame.
func plainView(out io.Writer) func(frame) error {
	return func(f frame) error {
		if f.err != nil {
			_, err := fmt.Fprintf(out, "%s  %v\n", time.Now().UTC().Format(time.RFC3339), f.err)
			return err
		}
		_, err := fmt.Fprintf(out, "%s  %s\n", f.Time, f.summary())
		return err
	}
}

// summary describes the state in one line.
func (f *frame) summary() string {
	readiness := "ready"
	if !f.Ready {
		readiness = "NOT READY (" + printable.Text(strings.Join(f.Unready, "; ")) + ")"
	}
	parts := []string{readiness, f.Summary()}
	workers := map[string]int{}
	for _, w := range f.Workers {
		workers[w.State]++
	}
	var list []string
	for _, state := range []string{workerWorks, workerDraining, workerDrained, workerGone} {
		if n := workers[state]; n > 0 {
			list = append(list, fmt.Sprintf("%d %s", n, state))
		}
	}
	if e := f.Elsewhere; e != nil && e.Workers > 0 {
		list = append(list, fmt.Sprintf("%d of other instances", e.Workers))
	}
	if list == nil {
		list = []string{"none"}
	}
	parts = append(parts, "workers: "+strings.Join(list, ", "))
	if f.rated {
		parts = append(parts, fmt.Sprintf("%.1f/s", f.rate))
	}
	return strings.Join(parts, "; ")
}

// A screen shows frames on a terminal, each in place of the previous one.
type screen struct{ out *os.File }

// Control sequences: switch to an alternate screen without cursor and line wrap; switch back; move to the upper left
// corner; erase the rest of the line, or of the screen.
const (
	screenOpen  = "\x1b[?1049h\x1b[?25l\x1b[?7l"
	screenClose = "\x1b[?7h\x1b[?25h\x1b[?1049l"
	screenHome  = "\x1b[H"
	restOfLine  = "\x1b[K"
	restOfPage  = "\x1b[J"
)

func (v *screen) open() { io.WriteString(v.out, screenOpen) }

func (v *screen) close() { io.WriteString(v.out, screenClose) }

func (v *screen) show(f frame) error {
	lines := f.Lines()
	if f.rated {
		lines[0] += fmt.Sprintf("  %.1f/s", f.rate)
	}
	if f.err != nil {
		lines = append([]string{f.err.Error() + " (state of " + f.Time + ")"}, lines...)
	}
	if rows := terminal.Rows(v.out); rows > 1 && len(lines) > rows-1 {
		lines = append(lines[:rows-2], fmt.Sprintf("(%d more lines: cloister status)", len(lines)-(rows-2)))
	}
	var page strings.Builder
	page.WriteString(screenHome)
	for _, line := range lines {
		page.WriteString(line + restOfLine + "\r\n")
	}
	page.WriteString(restOfPage)
	_, err := io.WriteString(v.out, page.String())
	return err
}
