// SPDX-License-Identifier: Apache-2.0

package render

import (
	"os/exec"
	"strings"
	"testing"
	"unicode"

	"github.com/cloister-build/cloister/sandbox/sandboxtest"
)

// TestQuoteIsOneWord: for every shell that knows $'...', and never a control character.
func TestQuoteIsOneWord(t *testing.T) {
	bash, err := exec.LookPath("bash")
	for _, s := range []string{
		"", "plain-1.2_3/@:+=,%", "a b", "it's", `back\slash`, "$HOME `id` \"x\"", "*", "~", "-n", "two\nlines", "tab\t", "\x1b[31m'\\", "ünï", "\xff1", "\u202eltr", "\x7f\u009b7", "!x", "#c",
	} {
		q := Quote(s)
		if strings.ContainsFunc(q, func(r rune) bool { return r == unicode.ReplacementChar || !unicode.IsPrint(r) }) {
			t.Errorf("%q is shown as %q", s, q)
		}
		if err != nil {
			continue
		}
		if out, err := exec.Command(bash, "-c", "printf %s "+q).Output(); err != nil || string(out) != s {
			t.Errorf("%q becomes %s, which bash reads as %q, %v", s, q, out, err)
		}
	}
	if err != nil {
		sandboxtest.Unavailable(t, "tools", err)
	}
}
