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

// Said returns a text that a client says of itself, or "" if it is too long or cannot be printed: one that was changed
// might mean something else.
func Said(s string) string {
	if len(s) > maxSaid || !utf8.ValidString(s) || strings.ContainsFunc(s, func(r rune) bool { return !unicode.IsPrint(r) }) {
		return ""
	}
	return s
}

// Describe sets in t what the client says of itself.
func (t *Task) Describe(who *repb.RequestMetadata) {
	t.Target, t.Mnemonic = Said(who.GetTargetId()), Said(who.GetActionMnemonic())
	t.Invocation, t.Correlated = Said(who.GetToolInvocationId()), Said(who.GetCorrelatedInvocationsId())
}
