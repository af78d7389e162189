// SPDX-License-Identifier: Apache-2.0

package execserver

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestParseFilter(t *testing.T) {
	for text, want := range map[string]filter{
		"":                               nil,
		"   ":                            nil,
		"target=//a:b AND  stage=QUEUED": {{"target", "//a:b"}, {"stage", "QUEUED"}},
		`target="//a b*" mnemonic=*`:     {{"target", "//a b*"}, {"mnemonic", "*"}},
		`invocation="\"" action=`:        {{"invocation", `"`}, {"action", ""}},
		"target=a=b":                     {{"target", "a=b"}},
	} {
		got, err := parseFilter(text)
		if diff := cmp.Diff(want, got, cmp.AllowUnexported(term{})); diff != "" || err != nil {
			t.Errorf("%q: %v (-want +got):\n%s", text, err, diff)
		}
	}
}

// FuzzParseFilter checks that a filter has only terms with known keys, or is refused.
func FuzzParseFilter(f *testing.F) {
	for _, text := range []string{"", "target=a", `target="a b"`, "AND", "target=a AND AND stage=QUEUED", `target="`, "=", "target=a\"b", "stage=QUEUE*"} {
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text string) {
		got, err := parseFilter(text)
		if err != nil {
			return
		}
		if len(got) > strings.Count(text, "=") {
			t.Errorf("%q has %d terms", text, len(got))
		}
		for _, term := range got {
			if _, ok := map[string]bool{"action": true, "invocation": true, "mnemonic": true, "stage": true, "target": true}[term.key]; !ok {
				t.Errorf("%q has a term with key %q", text, term.key)
			}
		}
	})
}

// FuzzParseToken checks that only tokens of token are accepted.
func FuzzParseToken(f *testing.F) {
	for _, text := range []string{"", "x", token(0), token(1), token(1 << 63), token(7) + "A", token(7) + "\n"} {
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text string) {
		seq, err := parseToken(text)
		if err == nil && text != "" && token(seq) != text {
			t.Errorf("parseToken(%q) = %d, whose token is %q", text, seq, token(seq))
		}
	})
}
