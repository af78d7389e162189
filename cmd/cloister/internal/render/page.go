// SPDX-License-Identifier: Apache-2.0

// Package render prints results for people and programs. It quotes text chosen by others, so that it can neither forge
// a line nor control the terminal.
package render

import (
	"encoding/json"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/cloister-build/cloister/cmd/internal/flags"
)

// A Page prints lines of a name and a value. Successive lines with the same name print it once.
type Page struct {
	W    io.Writer
	Err  error // of the first line that could not be written
	last string
}

// Line prints a line.
func (p *Page) Line(name, value string) {
	if name == p.last {
		name = ""
	} else {
		p.last = name
	}
	if p.Err == nil {
		_, p.Err = fmt.Fprintf(p.W, "%-12s %s\n", name, value)
	}
}

// JSON prints v as indented JSON.
func JSON(out io.Writer, v any) error {
	e := json.NewEncoder(out)
	e.SetIndent("", "  ")
	return e.Encode(v)
}

// Age formats a duration in its two largest units.
func Age(seconds float64) string {
	d := time.Duration(seconds * float64(time.Second))
	switch {
	case d < 10*time.Second:
		return fmt.Sprintf("%.1fs", d.Seconds())
	case d < time.Minute:
		return fmt.Sprintf("%ds", d/time.Second)
	case d < time.Hour:
		return fmt.Sprintf("%dm%02ds", d/time.Minute, d%time.Minute/time.Second)
	case d < flags.Day:
		return fmt.Sprintf("%dh%02dm", d/time.Hour, d%time.Hour/time.Minute)
	}
	return fmt.Sprintf("%dd%dh", d/flags.Day, d%flags.Day/time.Hour)
}

// Count returns a number with its noun, which is plural unless there is one: "1 action", "2 actions", "2 entries".
func Count[N int | int32 | int64 | uint64](n N, noun string) string {
	if n == 1 {
		return "1 " + noun
	}
	if stem, ok := strings.CutSuffix(noun, "ry"); ok {
		noun = stem + "rie"
	}
	return fmt.Sprintf("%d %ss", n, noun)
}

// Red returns text in red if coloured is set. Text must be printable.
func Red(text string, coloured bool) string {
	if !coloured {
		return text
	}
	return "\x1b[31m" + text + "\x1b[0m"
}
