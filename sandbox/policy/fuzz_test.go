// SPDX-License-Identifier: Apache-2.0

package policy_test

import (
	"errors"
	"os"
	"testing"

	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/sandbox/policy"
	"github.com/cloister-build/cloister/tests/must"
)

// FuzzParse checks that Parse returns an error with a position, or a policy that answers requests and whose canonical
// text is the same policy.
func FuzzParse(f *testing.F) {
	example := must.Get(os.ReadFile("../../examples/policy.yaml"))(f)
	f.Add(example)
	for _, c := range mistakes {
		f.Add([]byte(c.text))
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		p, err := policy.Parse("policy.yaml", text)
		if err != nil {
			var at *policy.SyntaxError
			if !errors.As(err, &at) || at.Line < 1 || at.Column < 1 || at.Message == "" || at.Error() == "" {
				t.Fatalf("got %#v, want a SyntaxError with a position", err)
			}
			return
		}
		again, err := policy.Parse("text", []byte(p.Text()))
		if err != nil {
			t.Fatalf("the canonical text cannot be parsed: %v\n%s", err, p.Text())
		}
		if again.Text() != p.Text() || again.Hash() != p.Hash() {
			t.Fatalf("got\n%s\nwant\n%s", again.Text(), p.Text())
		}
		g, err := p.Compile(policy.Request{}, sandbox.AllLimits)
		if err != nil {
			t.Fatalf("an empty request is refused: %v\n%s", err, p.Text())
		}
		s := sandbox.Spec{
			Args: []string{"x"}, Dir: "/", Network: g.Network, Limits: g.Limits, Audit: g.Audit, Kill: g.Kill,
			Temp: []sandbox.Temp{{Target: "/tmp", Bytes: g.TempBytes}},
		}
		must.Succeed(t, s.Validate())
		// If nothing can be enforced, a limit of the file is the only reason to refuse.
		if _, err := p.Compile(policy.Request{}, nil); err != nil && !errors.Is(err, sandbox.ErrUnsupported) {
			t.Fatal(err)
		}
	})
}
