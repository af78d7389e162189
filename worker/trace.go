// SPDX-License-Identifier: Apache-2.0

package worker

import (
	"regexp"
	"strings"
)

// The headers of https://www.w3.org/TR/trace-context/.
const (
	traceParent = "traceparent"
	traceState  = "tracestate"
	// maxTraceState is the length, in bytes, up to which the specification requires tracestate to be propagated.
	maxTraceState = 512
)

// parent matches a traceparent; its first group is the trace ID. Later versions of the format begin like version 00,
// which is the version of our own calls.
var parent = regexp.MustCompile(`^(?:[0-9a-e][0-9a-f]|f[0-9a-e])-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?$`)

// ParseTrace returns the trace context of a call in the form in which it is propagated, or nil if there is none or a
// malformed one. header returns the value of a header by its name in lower case. ParseTrace drops a tracestate that is
// malformed or too long.
func ParseTrace(header func(name string) string) map[string]string {
	text := header(traceParent)
	if len(text) > maxTraceState {
		return nil
	}
	m := parent.FindStringSubmatch(text)
	if m == nil || strings.Trim(m[1], "0") == "" || strings.Trim(m[2], "0") == "" {
		return nil
	}
	if m[4] != "" && strings.HasPrefix(text, "00") {
		return nil // version 00 has no further fields
	}
	trace := map[string]string{traceParent: "00-" + m[1] + "-" + m[2] + "-" + m[3]}
	state := strings.TrimSpace(header(traceState))
	malformed := func(r rune) bool { return (r < ' ' || r > '~') && r != '\t' }
	if state != "" && len(state) <= maxTraceState && !strings.ContainsFunc(state, malformed) {
		trace[traceState] = state
	}
	return trace
}

// TraceID returns the ID of a trace that ParseTrace returned, or "" for nil.
func TraceID(trace map[string]string) string {
	if m := parent.FindStringSubmatch(trace[traceParent]); m != nil {
		return m[1]
	}
	return ""
}
