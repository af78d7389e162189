// SPDX-License-Identifier: Apache-2.0

// Package render prints results for people and programs. It quotes names chosen by others, so that they can neither
// forge a line nor control the terminal.
package render

import (
	"fmt"
	"io"
)

// A page prints lines of a name and a value, the name of equal ones once.
type Page struct {
	W    io.Writer
	last string
	Err  error // of the first line that could not be written
}

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

func (p *Page) Lines(name string, values []string) {
	for _, v := range values {
		p.Line(name, v)
	}
}
