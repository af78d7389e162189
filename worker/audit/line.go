// SPDX-License-Identifier: Apache-2.0

package audit

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"
	"unicode/utf16"
	"unicode/utf8"

	"github.com/cloister-build/cloister/sandbox"
)

// A line ends with its own hash.
const (
	hashDigits = 2 * sha256.Size
	beforeHash = `,"hash":"`
	afterHash  = "\"}"
	tailBytes  = len(beforeHash) + hashDigits + len(afterHash)
)

// body is a line without its hash.
type body struct {
	Seq        uint64    `json:"seq"`
	Prev       string    `json:"prev"`
	Time       time.Time `json:"time"`
	Note       string    `json:"note,omitempty"`
	Dropped    *dropped  `json:"dropped,omitempty"`
	Action     string    `json:"action,omitempty"`
	Instance   string    `json:"instance,omitempty"`
	Target     string    `json:"target,omitempty"`
	Mnemonic   string    `json:"mnemonic,omitempty"`
	Invocation string    `json:"invocation,omitempty"`
	Worker     string    `json:"worker,omitempty"`
	Exit       int       `json:"exit"`
	Violation  string    `json:"on_violation,omitempty"`
	Events     []event   `json:"events,omitempty"`
	Unrecorded int       `json:"unrecorded,omitempty"`
}

// event is a sandbox.Event with its names in a line. A new field there does not compile until it is added here.
type event struct {
	Kind    sandbox.EventKind `json:"kind"`
	Subject string            `json:"subject"`
	Syscall string            `json:"syscall,omitempty"`
	Process string            `json:"process,omitempty"`
	Count   int               `json:"count"`
	Actual  string            `json:"actual,omitempty"`
	Limit   string            `json:"limit,omitempty"`
	Detail  string            `json:"detail,omitempty"`

	// Lines have the texts of these.
	ActualValue int64            `json:"-"`
	LimitValue  int64            `json:"-"`
	Unit        string           `json:"-"`
	Endpoint    sandbox.Endpoint `json:"-"`
}

// dropped is a Drop with its names in a line.
type dropped struct {
	First uint64    `json:"first"`
	Last  uint64    `json:"last"`
	Since time.Time `json:"since,omitzero"`
	Until time.Time `json:"until,omitzero"`
}

// encode returns the line of an entry, without its end, and its hash. It omits what exceeds maxLine and reports that in
// the note. The log's own remarks are note and drop.
func encode(seq uint64, prev, note string, drop *Drop, e *Entry) (line []byte, hash string, err error) {
	cut := false
	text := func(s string) string {
		s, whole := bounded(s)
		cut = cut || !whole
		return s
	}
	b := body{
		Seq: seq, Prev: prev, Time: e.Time.UTC(), Dropped: (*dropped)(drop),
		Action: text(e.Action), Instance: text(e.Instance), Target: text(e.Target), Mnemonic: text(e.Mnemonic),
		Invocation: text(e.Invocation), Worker: text(e.Worker), Exit: e.Exit, Violation: text(e.OnViolation), Unrecorded: e.Unrecorded,
	}
	for _, ev := range e.Events {
		ev.Kind = sandbox.EventKind(text(string(ev.Kind)))
		ev.Subject, ev.Syscall, ev.Process = text(ev.Subject), text(ev.Syscall), text(ev.Process)
		ev.Actual, ev.Limit, ev.Detail = text(ev.Actual), text(ev.Limit), text(ev.Detail)
		b.Events = append(b.Events, event(ev))
	}
	for {
		b.Note = note
		if cut {
			b.Note = join(b.Note, fmt.Sprintf("texts were truncated to %d bytes", maxText))
		}
		if left := len(e.Events) - len(b.Events); left > 0 {
			b.Unrecorded = e.Unrecorded + left
			b.Note = join(b.Note, fmt.Sprintf("%d events were omitted because the line would be too long", left))
		}
		if line, err = printableJSON(&b); err != nil {
			return nil, "", err
		}
		if len(line)-len("}")+tailBytes < maxLine {
			break
		}
		b.Events = b.Events[:len(b.Events)/2]
	}
	line = bytes.TrimSuffix(line, []byte("}"))
	sum := sha256.Sum256(line)
	hash = hex.EncodeToString(sum[:])
	return append(line, beforeHash+hash+afterHash...), hash, nil
}

func join(a, b string) string {
	if a == "" {
		return b
	}
	return a + "; " + b
}

// bounded returns the first maxText bytes of s as UTF-8, with other bytes as \xNN, and whether that is all of s.
func bounded(s string) (text string, whole bool) {
	n := len(s)
	if n > maxText {
		for n = maxText; n > maxText-utf8.UTFMax && !utf8.RuneStart(s[n]); n-- {
		}
	}
	whole = n == len(s)
	s = s[:n]
	if utf8.ValidString(s) {
		return s, whole
	}
	var b strings.Builder
	for i, r := range s {
		if _, size := utf8.DecodeRuneInString(s[i:]); r == utf8.RuneError && size == 1 {
			fmt.Fprintf(&b, `\x%02x`, s[i])
		} else {
			b.WriteRune(r)
		}
	}
	return b.String(), whole
}

// printableJSON returns v as JSON in printable ASCII. Everything else is escaped, so that no text can end the line or
// control a terminal.
func printableJSON(v any) ([]byte, error) {
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false)
	if err := enc.Encode(v); err != nil {
		return nil, err
	}
	in := bytes.TrimSuffix(b.Bytes(), []byte("\n"))
	out := make([]byte, 0, len(in)+tailBytes)
	for len(in) > 0 {
		r, size := utf8.DecodeRune(in)
		switch hi, lo := utf16.EncodeRune(r); {
		case r < 0x7f:
			out = append(out, byte(r))
		case hi != utf8.RuneError:
			out = fmt.Appendf(out, `\u%04x\u%04x`, hi, lo)
		default:
			out = fmt.Appendf(out, `\u%04x`, r)
		}
		in = in[size:]
	}
	return out, nil
}

// decode decodes a line with its end. The error describes the line.
func decode(line []byte) (Record, error) {
	line = bytes.TrimSuffix(line, []byte("\n"))
	head := line[:max(0, len(line)-tailBytes)]
	tail := string(line[len(head):])
	if len(tail) != tailBytes || !strings.HasPrefix(tail, beforeHash) || !strings.HasSuffix(tail, afterHash) {
		return Record{}, errors.New("the line does not end with a hash")
	}
	says := tail[len(beforeHash) : len(beforeHash)+hashDigits]
	sum := sha256.Sum256(head)
	if has := hex.EncodeToString(sum[:]); says != has {
		return Record{}, fmt.Errorf("the line was changed: its hash is %s, but it says %.*q", has, hashDigits, says)
	}
	var b body
	if err := json.Unmarshal(append(slices.Clip(head), '}'), &b); err != nil {
		return Record{}, fmt.Errorf("the line is not an entry: %w", err)
	}
	r := Record{
		Seq: b.Seq, Prev: b.Prev, Hash: says, Note: b.Note, Dropped: (*Drop)(b.Dropped),
		Entry: Entry{
			Time: b.Time, Action: b.Action, Instance: b.Instance, Target: b.Target, Mnemonic: b.Mnemonic,
			Invocation: b.Invocation, Worker: b.Worker, Exit: b.Exit, OnViolation: b.Violation, Unrecorded: b.Unrecorded,
		},
		line: string(line),
	}
	for _, ev := range b.Events {
		r.Events = append(r.Events, sandbox.Event(ev))
	}
	return r, nil
}
