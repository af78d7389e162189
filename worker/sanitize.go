// SPDX-License-Identifier: Apache-2.0

package worker

import (
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
)

// maxClientText bounds, in bytes, each text accepted from a client's RequestMetadata.
const maxClientText = 512

// Sanitize returns s, which a client chose, or "" if it is too long or not printable. It never changes the text, since
// a changed one might mean something else.
func Sanitize(s string) string {
	notPrintable := func(r rune) bool { return !unicode.IsPrint(r) }
	if len(s) > maxClientText || !utf8.ValidString(s) || strings.ContainsFunc(s, notPrintable) {
		return ""
	}
	return s
}

// SetMetadata copies the client's metadata to t.
func (t *Task) SetMetadata(m *repb.RequestMetadata) {
	t.Target, t.Mnemonic = Sanitize(m.GetTargetId()), Sanitize(m.GetActionMnemonic())
	t.Invocation, t.Correlated = Sanitize(m.GetToolInvocationId()), Sanitize(m.GetCorrelatedInvocationsId())
	if tool := m.GetToolDetails(); tool.GetToolName() != "" {
		t.Tool = Sanitize(tool.GetToolName() + " " + tool.GetToolVersion())
	}
}

// expectsDirectories reports whether the client relies on directories of output_directories that exist and are empty
// before the action runs: Bazel before version 5. The API says that only their parents exist, and later versions of
// Bazel put such directories into the input root.
func (t *Task) expectsDirectories() bool {
	version, ok := strings.CutPrefix(t.Tool, "bazel ")
	major, _, _ := strings.Cut(version, ".")
	n, err := strconv.Atoi(major)
	return ok && err == nil && n < 5
}
