// SPDX-License-Identifier: Apache-2.0

package manifest_test

import (
	"testing"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/worker/manifest"
)

func plain() *manifest.Manifest {
	empty := cas.SHA256.Sum(nil)
	return &manifest.Manifest{
		Action: empty, Command: empty, InputRoot: empty, Stdout: empty, Stderr: empty,
		Spec: "cloister spec 1\narg \"true\"\n", Status: "OK",
	}
}

func TestParseReadsWhatTextWrites(t *testing.T) {
	text := plain().Text()
	m, err := manifest.Parse([]byte(text))
	if err != nil {
		t.Fatalf("%v\n%s", err, text)
	}
	if m.Text() != text || m.StableHash() != plain().StableHash() {
		t.Errorf("got\n%s\nwant\n%s", m.Text(), text)
	}
}

func TestVolatileFactsAreNotInTheStableHash(t *testing.T) {
	a, b := plain(), plain()
	b.Volatile.Worker, b.Volatile.Usage.User = "other", 5
	if a.StableHash() != b.StableHash() || a.Text() == b.Text() || len(manifest.Diff(a, b)) > 0 {
		t.Error("what is volatile is in the stable hash, or not in the text")
	}
	b.ExitCode = 1
	if d := manifest.Diff(a, b); a.StableHash() == b.StableHash() || len(d) != 1 || d[0] != (manifest.Change{A: "exit 0", B: "exit 1"}) {
		t.Errorf("another exit code: got %v", d)
	}
}
