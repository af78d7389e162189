// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"html"
	"io"
	"strings"
	"sync"
	"time"
)

// A recording passes lines through and remembers when each was written, to be replayed as an SVG animation.
type recording struct {
	w     io.Writer
	start time.Time

	mu    sync.Mutex
	rest  string // the line that has no end yet
	lines []recordedLine
}

type recordedLine struct {
	text string
	at   time.Duration // since start
}

func newRecording(w io.Writer) *recording { return &recording{w: w, start: time.Now()} }

// Write passes p through. It may be called concurrently.
func (r *recording) Write(p []byte) (int, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	err := eachLine(&r.rest, p, func(line string) error {
		r.lines = append(r.lines, recordedLine{text: line, at: time.Since(r.start)})
		return nil
	})
	if err != nil {
		return 0, err
	}
	return r.w.Write(p)
}

const (
	svgColumns  = 100
	svgLine     = 18                     // pixels
	svgColumn   = 8                      // pixels
	svgMargin   = 16                     // pixels
	svgProgress = 4                      // consecutive progress lines kept
	svgPause    = 900 * time.Millisecond // longest pause between two lines
)

// SVG returns the recording as an animation titled by the command that was run. Each line appears in its order with
// pauses cut to svgPause. Readers who prefer reduced motion, and programs that ignore animations, see all of it at
// once.
func (r *recording) SVG(command string) string {
	r.mu.Lock()
	defer r.mu.Unlock()
	lines := thin(r.lines)
	width, height := 2*svgMargin+svgColumns*svgColumn, 2*svgMargin+(len(lines)+1)*svgLine
	var b strings.Builder
	fmt.Fprintf(&b, `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %d %d" width="%d" role="img" aria-label="%s">`+"\n",
		width, height, width, html.EscapeString(command))
	b.WriteString(`<style>
text { font: 13px ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; fill: #d0d7de; white-space: pre }
.command { fill: #7ee787 } .heading { fill: #79c0ff } .result { fill: #ffffff; font-weight: bold }
@media (prefers-reduced-motion: no-preference) { .line { animation: appear 0.1s both } }
@keyframes appear { from { opacity: 0 } }
</style>
`)
	fmt.Fprintf(&b, `<rect width="%d" height="%d" rx="8" fill="#0d1117"/>`+"\n", width, height)
	y := svgMargin + svgLine - 5
	text := func(class, s string, at time.Duration) {
		fmt.Fprintf(&b, `<text class="%s" x="%d" y="%d" style="animation-delay:%.1fs">%s</text>`+"\n",
			class, svgMargin, y, at.Seconds(), html.EscapeString(s))
		y += svgLine
	}
	text("command", "$ "+command, 0)
	var shown, last time.Duration
	results := false
	for _, l := range lines {
		shown += min(l.at-last, svgPause)
		last = l.at
		results = results || l.text == ""
		switch class := "line"; {
		case results:
			text(class+" result", l.text, shown)
		case !strings.HasPrefix(l.text, " "):
			text(class+" heading", l.text, shown)
		default:
			text(class, l.text, shown)
		}
	}
	b.WriteString("</svg>\n")
	return b.String()
}

// thin drops lines in the middle of long runs of Bazel's progress and cuts long lines.
func thin(lines []recordedLine) []recordedLine {
	progress := func(l recordedLine) bool { return strings.HasPrefix(l.text, "  [") }
	var kept []recordedLine
	for i := 0; i < len(lines); {
		n := 1
		for progress(lines[i]) && i+n < len(lines) && progress(lines[i+n]) {
			n++
		}
		count := min(n, svgProgress)
		for k := range count {
			l := lines[i+k*(n-1)/max(count-1, 1)]
			if runes := []rune(l.text); len(runes) > svgColumns {
				l.text = string(runes[:svgColumns-3]) + "..."
			}
			kept = append(kept, l)
		}
		i += n
	}
	for len(kept) > 0 && kept[len(kept)-1].text == "" {
		kept = kept[:len(kept)-1]
	}
	return kept
}
