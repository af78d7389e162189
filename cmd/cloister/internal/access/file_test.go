// SPDX-License-Identifier: Apache-2.0

package access_test

import (
	"errors"
	"flag"
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/cloister-build/cloister/cmd/cloister/internal/access"
)

var update = flag.Bool("update", false, "write testdata anew")

// TestMistakes checks that a file with a mistake permits nothing; testdata/mistakes.txt has the messages.
func TestMistakes(t *testing.T) {
	one := func(entry string) string { return "version: 1\ncallers:\n  - {" + entry + "}\n" }
	digest := strings.Repeat("ab", 32)
	var said strings.Builder
	for _, c := range []struct{ name, text string }{
		{"nothing", ""},
		{"no version", "callers: []\n"},
		{"another version", "version: 2\n"},
		{"no callers", "version: 1\n"},
		{"an empty list", "version: 1\ncallers: []\n"},
		{"a misspelt key", "version: 1\ncaller: []\n"},
		{"a misspelt kind", one("name: a, tokens_sha256: " + digest + ", rights: [read]")},
		{"a misspelt right", one("name: a, anonymous: true, rights: [raed]")},
		{"a right that is none", one("name: a, anonymous: true, rights: [administrate]")},
		{"a misspelt right with instances", one("name: a, anonymous: true, rights: [{exceute: main}]")},
		{"no rights", one("name: a, anonymous: true")},
		{"an empty list of rights", one("name: a, anonymous: true, rights: []")},
		{"rights that are no list", one("name: a, anonymous: true, rights: read")},
		{"a right in no instance", one("name: a, anonymous: true, rights: [{read: []}]")},
		{"a right of the server in an instance", one("name: a, anonymous: true, rights: [{operate: main}]")},
		{"a star within a name", one("name: a, anonymous: true, rights: [{read: te*m}]")},
		{"a star after a name", one("name: a, anonymous: true, rights: [{read: team*}]")},
		{"no name", one("anonymous: true, rights: [read]")},
		{"a bad name", one("name: a b, anonymous: true, rights: [read]")},
		{"a name twice", "version: 1\ncallers:\n  - {name: a, anonymous: true, rights: [read]}\n  - {name: a, certificate: {subject: x}, rights: [read]}\n"},
		{"anonymous twice", "version: 1\ncallers:\n  - {name: a, anonymous: true, rights: [read]}\n  - {name: b, anonymous: true, rights: [read]}\n"},
		{"known by nothing", one("name: a, rights: [read]")},
		{"known by two things", one("name: a, anonymous: true, certificate: {subject: x}, rights: [read]")},
		{"not anonymous", one("name: a, anonymous: false, rights: [read]")},
		{"a token in clear text", one("name: a, token_sha256: hunter2, rights: [read]")},
		{"a token in clear text, by another key", one("name: a, token: hunter2, rights: [read]")},
		{"a token in clear text, and a mistake behind it", "version: 1\ncallers:\n  - name: a\n    token_sha256: 'hunter2'\n    rights: [read\n"},
		{"half of a digest", one("name: a, token_sha256: abcd, rights: [read]")},
		{"no tokens", one("name: a, token_sha256: [], rights: [read]")},
		{"a token twice", "version: 1\ncallers:\n  - {name: a, token_sha256: " + digest + ", rights: [read]}\n  - {name: b, token_sha256: " + digest + ", rights: [read]}\n"},
		{"an empty certificate", one("name: a, certificate: {}, rights: [read]")},
		{"an empty subject", one(`name: a, certificate: {subject: ""}, rights: [read]`)},
		{"a misspelt name of a certificate", one("name: a, certificate: {subjekt: x}, rights: [read]")},
		{"no keys", one("name: a, jwt: {issuer: x}, rights: [read]")},
		{"keys that are not there", one("name: a, jwt: {keys: /nonexistent/keys.json}, rights: [read]")},
		{"an empty audience", one(`name: a, jwt: {keys: /nonexistent, audience: ""}, rights: [read]`)},
		{"an anchor", "version: 1\ncallers: &a []\n"},
	} {
		r, err := access.Parse("auth.yaml", []byte(c.text))
		if r != nil || err == nil || !strings.HasPrefix(err.Error(), "auth.yaml:") {
			t.Errorf("%s: got %v, %v; want an error with its place", c.name, r, err)
		}
		if strings.Contains(fmt.Sprint(err), "hunter2") {
			t.Errorf("the message repeats a token: %v", err)
		}
		fmt.Fprintf(&said, "== %s\n%v\n\n", c.name, err)
	}
	if *update {
		if err := os.WriteFile("testdata/mistakes.txt", []byte(said.String()), 0o666); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile("testdata/mistakes.txt")
	if err != nil {
		t.Fatal(err)
	}
	if said.String() != string(want) {
		t.Errorf("got\n%s\nwant testdata/mistakes.txt\n%s", &said, want)
	}
	if r, err := access.ReadFile("../../../../examples/auth.yaml"); err != nil || r.String() != "4 callers" {
		t.Errorf("the example: %v, %v", r, err)
	}
	if _, err := access.ReadFile("/nonexistent/auth.yaml"); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("a file that is not there: %v", err)
	}
}
