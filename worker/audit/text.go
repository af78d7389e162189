// SPDX-License-Identifier: Apache-2.0

package audit

import (
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/sandbox/printable"
)

// shownDigits is the number of digits that Lines shows of an action's digest.
const shownDigits = 12

// Lines returns one line per event of this kind, or of every kind if kind is "": time, action, kind and text. Notes
// have the kind "note", and the number of unrecorded events the kind "more". Lines are printable and have no line end.
func (r *Record) Lines(kind sandbox.EventKind) []string {
	var lines []string
	add := func(k sandbox.EventKind, text string) {
		if kind != "" && kind != k {
			return
		}
		action := r.Action[:min(len(r.Action), shownDigits)]
		if action == "" {
			action = "-"
		}
		at := r.Time.UTC().Format(time.RFC3339)
		lines = append(lines, printable.Text(fmt.Sprintf("%s  %-*s  %-7s  %s", at, shownDigits, action, k, text)))
	}
	if r.Note != "" {
		add("note", r.Note)
	}
	for _, e := range r.Events {
		add(e.Kind, e.String())
	}
	if r.Unrecorded > 0 {
		add("more", r.more())
	}
	return lines
}

func (r *Record) more() string { return fmt.Sprintf("%d more, not recorded", r.Unrecorded) }

// Text returns the entry as text: one line per field that is not empty, then one per event.
func (r *Record) Text() string {
	var b strings.Builder
	field := func(name, value string) {
		if value != "" {
			b.WriteString(printable.Text(fmt.Sprintf("%-12s%s", name, value)) + "\n")
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
	field("violation", r.OnViolation)
	for _, e := range r.Events {
		field(string(e.Kind), e.String())
	}
	if r.Unrecorded > 0 {
		field("more", r.more())
	}
	field("previous", r.Prev)
	field("hash", r.Hash)
	return b.String()
}
