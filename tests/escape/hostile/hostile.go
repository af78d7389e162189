// SPDX-License-Identifier: Apache-2.0

// Command hostile is what a sandbox must withstand: one program, one subcommand for each attack. It is run by
// the escape tests alone, inside a sandbox, and attacks nothing that it was not pointed at.
//
//	hostile ATTACK [ARGUMENT...]
//
// An attack prints one line and exits: "held: ..." and 0 if everything was refused, "ESCAPED: ..." and 1 if
// anything was not. Any other exit means that the attack could not be tried, which proves nothing. Every attack
// ends by itself and takes no more than a few seconds, a few hundred MiB and a few hundred processes, so
// that it is safe to watch it succeed.
package main

import (
	"fmt"
	"os"
	"strings"
)

// Exit codes beside 0.
const (
	exitEscaped = 1
	exitBroken  = 2
)

// A report gathers what an attack found.
type report struct {
	held, escapes, broken []string
}

// hold records something that was as it should be.
func (r *report) hold(format string, args ...any) {
	r.held = append(r.held, fmt.Sprintf(format, args...))
}

// escape records something that a run must not be able to do or see.
func (r *report) escape(format string, args ...any) {
	r.escapes = append(r.escapes, fmt.Sprintf(format, args...))
}

// stop records that the attack could not be tried.
func (r *report) stop(format string, args ...any) {
	r.broken = append(r.broken, fmt.Sprintf(format, args...))
}

// exit prints the verdict and ends the program. What escaped counts more than what could not be tried.
func (r *report) exit() {
	one := func(list []string) string { return strings.ReplaceAll(strings.Join(list, ", "), "\n", " ") }
	switch {
	case len(r.escapes) > 0:
		fmt.Println("ESCAPED:", one(r.escapes))
		os.Exit(exitEscaped)
	case len(r.broken) > 0 || len(r.held) == 0:
		fmt.Println("broken:", one(r.broken))
		os.Exit(exitBroken)
	}
	fmt.Println("held:", one(r.held))
	os.Exit(0)
}
