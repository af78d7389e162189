// SPDX-License-Identifier: Apache-2.0

// Command hostile attacks a sandbox from inside, with one subcommand per attack. Only the escape tests run it, in a
// sandbox, and it attacks nothing but its arguments.
//
//	hostile ATTACK [ARGUMENT...]
//
// An attack prints one line and exits: "held: ..." with 0 if everything was refused, and "ESCAPED: ..." with 1
// otherwise. Any other exit means that the attack could not run, which proves nothing. Every attack ends by itself and
// takes at most a few seconds, a few hundred MiB and a few hundred processes, so that it may safely succeed.
package main

import (
	"fmt"
	"os"
	"strings"
)

// Exit codes other than 0.
const (
	exitEscaped = 1
	exitBroken  = 2
)

// A report collects the findings of an attack.
type report struct {
	held, escapes, broken []string
}

// hold records something that was refused.
func (r *report) hold(format string, args ...any) {
	r.held = append(r.held, fmt.Sprintf(format, args...))
}

// escape records something that a run must not be able to do or see.
func (r *report) escape(format string, args ...any) {
	r.escapes = append(r.escapes, fmt.Sprintf(format, args...))
}

// stop records that the attack could not run.
func (r *report) stop(format string, args ...any) {
	r.broken = append(r.broken, fmt.Sprintf(format, args...))
}

// exit prints the verdict and exits. An escape takes precedence over an attack that could not run.
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
