// SPDX-License-Identifier: Apache-2.0

package worker

import (
	"regexp"
	"strings"
)

// TraceHeaders are the headers of https://www.w3.org/TR/trace-context/, in lower case.
var TraceHeaders = []string{traceParent, traceState}

const (
	traceParent = "traceparent"
	traceState  = "tracestate"
	// maxTraceState is how long a tracestate is passed on, in bytes: as long as the specification asks for.
	maxTraceState = 512
)

// parent is a traceparent of version 00, with the trace's id as its group. Later versions begin like it, and a call is
// made by the version that whoever makes it knows.
var parent = regexp.MustCompile(`^(?:[0-9a-e][0-9a-f]|f[0-9a-e])-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?$`)

// ParseTrace returns of headers those that say which trace a call is a part of, in the form that is passed on, or nil if
// they say it of none, or not well. Names are in lower case. A state that is malformed or too long is left out.
func ParseTrace(headers map[string]string) map[string]string {
	text := headers[traceParent]
	if len(text) > maxTraceState {
		return nil
	}
	m := parent.FindStringSubmatch(text)
	switch {
	case m == nil, strings.Trim(m[1], "0") == "", strings.Trim(m[2], "0") == "", m[4] != "" && strings.HasPrefix(text, "00"):
		return nil
	}
	trace := map[string]string{traceParent: "00-" + m[1] + "-" + m[2] + "-" + m[3]}
	state := strings.TrimSpace(headers[traceState])
	if state != "" && len(state) <= maxTraceState && !strings.ContainsFunc(state, func(r rune) bool { return (r < ' ' || r > '~') && r != '\t' }) {
		trace[traceState] = state
	}
	return trace
}

// TraceID returns the id of the trace that ParseTrace's result names, "" if that is nil.
func TraceID(trace map[string]string) string {
	if m := parent.FindStringSubmatch(trace[traceParent]); m != nil {
		return m[1]
	}
	return ""
}
