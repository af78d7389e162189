// SPDX-License-Identifier: Apache-2.0

package audit

import (
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/cloister-build/cloister/sandbox"
)

// shownDigits is how much of an action's digest is in a line for a person. Text shows all of it.
const shownDigits = 12

// Lines returns what happened for a person: for each event of this kind, or of every kind if it is "", one
// line of time, action, kind and text. What the log itself says is of the kind "note", and that more
// happened than was recorded is of the kind "more". Lines are printable and have no end.
func (r *Record) Lines(kind sandbox.EventKind) []string {
	var lines []string
	add := func(k sandbox.EventKind, text string) {
		if kind == "" || kind == k {
			action := r.Action[:min(len(r.Action), shownDigits)]
			if action == "" {
				action = "-"
			}
			lines = append(lines, printable(fmt.Sprintf("%s  %-*s  %-7s  %s", r.Time.UTC().Format(time.RFC3339), shownDigits, action, k, text)))
		}
	}
	if r.Note != "" {
		add("note", r.Note)
	}
	for _, e := range r.Events {
		add(e.Kind, e.String())
	}
	if r.Unrecorded > 0 {
		add("more", fmt.Sprintf("%d more, not recorded", r.Unrecorded))
	}
	return lines
}

// Text returns everything that the entry says, for a person: a line a field, then a line an event. What is
// empty is left out.
func (r *Record) Text() string {
	var b strings.Builder
	field := func(name, value string) {
		if value != "" {
			b.WriteString(printable(fmt.Sprintf("%-12s%s", name, value)) + "\n")
		}
	}
	field("entry", strconv.FormatUint(r.Seq, 10))
	field("time", r.Time.UTC().Format(time.RFC3339Nano))
	field("note", r.Note)
	field("action", r.Action)
	field("instance", r.Instance)
	field("target", r.Target)
	field("mnemonic", r.Mnemonic)
	field("invocation", r.Invocation)
	field("worker", r.Worker)
	field("exit", strconv.Itoa(r.Exit))
	for _, e := range r.Events {
		field(string(e.Kind), e.String())
	}
	if r.Unrecorded > 0 {
		field("more", fmt.Sprintf("%d more, not recorded", r.Unrecorded))
	}
	field("previous", r.Prev)
	field("hash", r.Hash)
	return b.String()
}

// printable returns s with everything that is not a printable character written as in a Go string: names
// of files are chosen by actions, and must neither end a line nor steer a terminal.
func printable(s string) string {
	var b strings.Builder
	for _, r := range s {
		if strconv.IsPrint(r) {
			b.WriteRune(r)
		} else {
			q := strconv.QuoteRuneToASCII(r)
			b.WriteString(q[1 : len(q)-1])
		}
	}
	return b.String()
}
