// SPDX-License-Identifier: Apache-2.0

package worker

import (
	"strings"
	"unicode"
	"unicode/utf8"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
)

// maxSaid bounds, in bytes, each text that is taken from what a client says of itself.
const maxSaid = 512

// Sanitize returns a text that a client says of itself, or "" if it is too long or cannot be printed: one that was changed
// might mean something else.
func Sanitize(s string) string {
	if len(s) > maxSaid || !utf8.ValidString(s) || strings.ContainsFunc(s, func(r rune) bool { return !unicode.IsPrint(r) }) {
		return ""
	}
	return s
}

// SetMetadata sets in t what the client says of itself.
func (t *Task) SetMetadata(who *repb.RequestMetadata) {
	t.Target, t.Mnemonic = Sanitize(who.GetTargetId()), Sanitize(who.GetActionMnemonic())
	t.Invocation, t.Correlated = Sanitize(who.GetToolInvocationId()), Sanitize(who.GetCorrelatedInvocationsId())
}
