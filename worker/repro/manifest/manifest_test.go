// SPDX-License-Identifier: Apache-2.0

package manifest_test

import (
	"errors"
	"strings"
	"testing"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
	"github.com/cloister-build/cloister/worker/repro/manifest"
	"github.com/google/go-cmp/cmp"
)

func TestStableHashIgnoresVolatileFacts(t *testing.T) {
	a, b := plain(), plain()
	b.Volatile = manifest.Volatile{Worker: "other"}
	expect.That(t, a.StableHash() == b.StableHash() && a.Text() != b.Text() && len(manifest.Diff(a, b)) == 0,
		"volatile facts change the stable hash, or are not in the text")
}

// Two texts of one manifest would have two stable hashes.
func TestParseAcceptsOnlyCanonicalText(t *testing.T) {
	text := vector("outputs").Text()
	for name, c := range map[string]struct{ old, new string }{
		"another version":         {"cloister-manifest v1", "cloister-manifest v2"},
		"duplicate line":          {"exit 0\n", "exit 0\nexit 0\n"},
		"missing line":            {"exit 0\n", ""},
		"wrong order":             {"status OK\nexit 0\n", "exit 0\nstatus OK\n"},
		"unknown line":            {"exit 0\n", "exit 0\nnew\n"},
		"leading zero":            {"exit 0\n", "exit 00\n"},
		"two spaces":              {"exit 0\n", "exit  0\n"},
		"a carriage return":       {"exit 0\n", "exit 0\r\n"},
		"other quotes":            {`"out/app"`, "`out/app`"},
		"another escape":          {`"out/app"`, `"out/\x61pp"`},
		"unknown kind of output":  {"executable", "socket"},
		"outputs out of order":    {`output "out/app.d"`, `output "a"`},
		"unknown digest function": {"action sha256:", "action md6:"},
		"no digest function":      {"action sha256:", "action "},
		"invalid hash":            {"spec-hash ", "spec-hash x"},
		"no separator":            {"volatile\n", ""},
		"another separator":       {"volatile\n", "volatile\nvolatile\n"},
		"no final newline":        {"unrecorded 0\n", "unrecorded 0"},
		"trailing line":           {"unrecorded 0\n", "unrecorded 0\n\n"},
		"control characters":      {"status OK", "status \x1b[2J"},
		"invalid sum":             {`program "/bin/ps" unreadable`, `program "/bin/ps" read`},
		"misplaced program":       {"tier \"full\"\n", "program \"/a\" unreadable\ntier \"full\"\n"},
		"another time zone":       {"19:15:00.000000000Z", "20:15:00.000000000+01:00"},
	} {
		changed := strings.Replace(text, c.old, c.new, 1)
		must.Be(t, changed != text, "%s: the text lacks %q", name, c.old)
		_, err := manifest.Parse([]byte(changed))
		expect.That(t, errors.Is(err, manifest.ErrSyntax) && strings.Contains(err.Error(), "line "),
			"%s: got %v, want ErrSyntax with the line", name, err)
		for _, r := range errText(err) {
			expect.That(t, r >= ' ' && r <= '~', "%s: the error is not printable: %q", name, err)
		}
	}
	odd := plain() // with a valid hash
	odd.Spec = "cloister spec 1\narg \"\u202e\"\n"
	for _, text := range []string{odd.Text(), "", "\n", "cloister-manifest v1\n", strings.Repeat("x", manifest.MaxBytes+1)} {
		expect.Error(t, expect.Err(manifest.Parse([]byte(text))), manifest.ErrSyntax, "%.20q", text)
	}
}

func errText(err error) string {
	if err == nil {
		return ""
	}
	return err.Error()
}

func TestDiffPairsLinesBySubject(t *testing.T) {
	a, b := vector("outputs"), vector("outputs")
	b.Toolchain.Release = "6.18.6"
	b.Outputs[1].Digest = cas.SHA256.Sum([]byte("other"))
	b.Outputs = b.Outputs[:5]
	b.Spec = strings.Replace(b.Spec, `env "HOME=/tmp"`, `env "HOME=/"`, 1)
	b.Spec = strings.Replace(b.Spec, "arg \"-o\"\n", "", 1)
	var got []string
	for _, c := range manifest.Diff(a, b) {
		if strings.Contains(c.A, "-hash ") {
			c.A, _, _ = strings.Cut(c.A, " ")
			c.B, _, _ = strings.Cut(c.B, " ")
		}
		got = append(got, c.A+" | "+c.B)
	}
	want := []string{
		"spec-hash | spec-hash",
		`spec arg "-o" | `,
		`spec env "HOME=/tmp" | spec env "HOME=/"`,
		"toolchain-hash | toolchain-hash",
		`toolchain kernel "Linux" "6.18.5" | toolchain kernel "Linux" "6.18.6"`,
		`output "out/app" executable sha256:` + a.Outputs[1].Digest.String() + ` | output "out/app" executable sha256:` + b.Outputs[1].Digest.String(),
		`output "out/empty" file sha256:` + cas.SHA256.Sum(nil).String() + " | ",
	}
	if d := cmp.Diff(want, got); d != "" {
		t.Errorf("(-want +got):\n%s", d)
	}
	if d := manifest.Diff(b, a); len(d) != len(want) || d[len(d)-1].A != "" {
		t.Errorf("reversed: got %q", d)
	}
}

// FuzzParse checks that Parse rejects every text that Text would not write.
func FuzzParse(f *testing.F) {
	for name := range vectors {
		f.Add([]byte(vector(name).Text()))
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		m, err := manifest.Parse(text)
		if err != nil {
			if !errors.Is(err, manifest.ErrSyntax) {
				t.Fatal(err)
			}
			return
		}
		again, hash := m.Sealed()
		must.Be(t, again == string(text) && hash == m.StableHash() && len(manifest.Diff(m, m)) == 0,
			"parsed as\n%s", again)
		for _, r := range again {
			if r != '\n' && (r < ' ' || r > '~') {
				t.Fatalf("unprintable character %q", r)
			}
		}
	})
}
