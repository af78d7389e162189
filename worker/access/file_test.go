// SPDX-License-Identifier: Apache-2.0

package access_test

import (
	"crypto/rand"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"math/big"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
	"github.com/cloister-build/cloister/tests/syncbuf"
	"github.com/cloister-build/cloister/worker/access"
	"google.golang.org/grpc/codes"
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
		{"all below the nameless instance", one(`name: a, anonymous: true, rights: [{work: ["", "/*"]}]`)},
		{"a slash first", one(`name: a, anonymous: true, rights: [{read: /x}]`)},
		{"a slash last", one(`name: a, anonymous: true, rights: [{work: [main, main/]}]`)},
		{"two slashes", one(`name: a, anonymous: true, rights: [{read: "main//*"}]`)},
		{"a reserved word", one(`name: a, anonymous: true, rights: [{read: "main/blobs/*"}]`)},
		{"an instance with a control character", one(`name: a, anonymous: true, rights: [{read: "main\0"}]`)},
		{"an instance that is too long", one(`name: a, anonymous: true, rights: [{read: "` + strings.Repeat("a/", 128) + `*"}]`)},
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
		{"a URI with dots", one(`name: a, certificate: {uri: "spiffe://farm/../x/*"}, rights: [read]`)},
		{"a URI with an escape", one(`name: a, certificate: {uri: "spiffe://farm/%78"}, rights: [read]`)},
		{"a URI that ends in a slash", one(`name: a, certificate: {uri: "spiffe://farm/"}, rights: [read]`)},
		{"a misspelt name of a certificate", one("name: a, certificate: {subjekt: x}, rights: [read]")},
		{"no keys", one("name: a, jwt: {issuer: x}, rights: [read]")},
		{"keys that are not there", one("name: a, jwt: {keys: /nonexistent/keys.json}, rights: [read]")},
		{"an empty audience", one(`name: a, jwt: {keys: /nonexistent, audience: ""}, rights: [read]`)},
		{"an anchor", "version: 1\ncallers: &a []\n"},
	} {
		r, err := access.Parse("auth.yaml", []byte(c.text))
		expect.That(t, r == nil && err != nil && strings.HasPrefix(err.Error(), "auth.yaml:"),
			"%s: got %v, %v; want an error with its place", c.name, r, err)
		expect.That(t, !strings.Contains(fmt.Sprint(err), "hunter2"), "the message repeats a token: %v", err)
		fmt.Fprintf(&said, "== %s\n%v\n\n", c.name, err)
	}
	if *update {
		must.Succeed(t, os.WriteFile("testdata/mistakes.txt", []byte(said.String()), 0o666))
	}
	want := must.Get(os.ReadFile("testdata/mistakes.txt"))(t)
	expect.That(t, said.String() == string(want), "got\n%s\nwant testdata/mistakes.txt\n%s", &said, want)
	if r, err := access.ReadFile("../../examples/auth.yaml"); err != nil || r.String() != "4 callers" {
		t.Errorf("the example: %v, %v", r, err)
	}
	expect.Error(t, expect.Err(access.ReadFile("/nonexistent/auth.yaml")), os.ErrNotExist, "a file that is not there")
}

// TestWarnings checks that files that work but are dangerous are reported.
func TestWarnings(t *testing.T) {
	k, a := newKeys(t), newAuthority(t)
	dir := t.TempDir()
	template := &x509.Certificate{SerialNumber: big.NewInt(1), NotAfter: time.Unix(1_700_000_000, 0)}
	der := must.Get(x509.CreateCertificate(rand.Reader, template, a.cert, k.ec.Public(), a.key))(t)
	write(t, filepath.Join(dir, "expired.pem"), pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}))
	write(t, filepath.Join(dir, "keys.pem"), publicPEM(t, k.ec.Public()))
	jwt := func(text string) string {
		return "version: 1\ncallers:\n  - {name: a, jwt: {" + text + "}, rights: [read]}\n"
	}
	safe := jwt("keys: keys.pem, issuer: i")
	for _, c := range []struct {
		name, text     string
		file, key, dir os.FileMode
		want           []string
	}{
		{"nothing", safe, 0o600, 0o644, 0o700, nil},
		{"only an audience", jwt("keys: keys.pem, audience: i"), 0o600, 0o644, 0o700, nil},
		{"neither issuer nor audience", jwt("keys: keys.pem, claims: {sub: x}"), 0o600, 0o600, 0o700, []string{"state issuer and audience"}},
		{"an expired certificate", jwt("keys: expired.pem, issuer: i"), 0o600, 0o600, 0o700, []string{"expired at 2023-11-14T22:13:20Z"}},
		{"a writable file", safe, 0o666, 0o600, 0o700, []string{"can write to " + filepath.Join(dir, "auth.yaml")}},
		{"a writable key", safe, 0o600, 0o602, 0o700, []string{"can write to " + filepath.Join(dir, "keys.pem")}},
		{"a writable directory", safe, 0o600, 0o600, 0o777, []string{"can replace " + dir, "can replace " + dir}},
		{"a writable directory in which only owners remove", safe, 0o600, 0o600, 0o777 | os.ModeSticky, nil},
	} {
		file := filepath.Join(dir, "auth.yaml")
		write(t, file, []byte(c.text))
		must.Succeed(t, errors.Join(os.Chmod(file, c.file), os.Chmod(filepath.Join(dir, "keys.pem"), c.key), os.Chmod(dir, c.dir)))
		var log syncbuf.Buffer
		live, err := access.NewLive(file, func(*access.Rules) error { return nil }, slog.New(slog.NewTextHandler(&log, nil)))
		must.Be(t, err == nil, "%s: %v", c.name, err)
		live.Close()
		good := strings.Count(log.String(), "level=WARN") == len(c.want)
		for _, text := range c.want {
			good = good && strings.Contains(log.String(), text)
		}
		expect.That(t, good, "%s: got the log\n%swant the warnings %q", c.name, &log, c.want)
	}
}

// TestNobody checks that an empty list keeps everybody out, while an operator finds out what has happened.
func TestNobody(t *testing.T) {
	s := serve(t, parse(t, "version: 1\ncallers: []\n"), nil)
	for name, call := range calls {
		expect.Code(t, call(t.Context(), s.dial(nil, "Bearer x"), ""), codes.Unauthenticated, "%s", name)
	}
}

// TestDuplicateKeys checks that no key of a mapping replaces an earlier one, however it is written.
func TestDuplicateKeys(t *testing.T) {
	for _, text := range []string{
		"version: 1\ncallers: []\ncallers: [{name: a, anonymous: true, rights: [read]}]\n",
		"version: 1\ncallers: []\n\"callers\": [{name: a, anonymous: true, rights: [read]}]\n",
		"version: 1\ncallers: [{name: a, anonymous: true, rights: [read], rights: [write]}]\n",
		"version: 1\ncallers: [{name: a, anonymous: true, rights: [read], \"rights\": [write]}]\n",
		"version: 1\ncallers: [{name: a, anonymous: true, rights: [read], \"r\\x69ghts\": [write]}]\n",
		"version: 1\ncallers: [{name: a, anonymous: true, rights: [read], 'rights': [write]}]\n",
		"version: 1\ncallers: [{name: a, anonymous: true, name: b, rights: [read]}]\n",
		"version: 1\ncallers: [{name: a, anonymous: true, anonymous: true, rights: [read]}]\n",
		"version: 1\ncallers: [{name: a, certificate: {uri: a, uri: b}, rights: [read]}]\n",
		"version: 1\ncallers: [{name: a, anonymous: true, rights: [{read: a, read: b}]}]\n",
		"version: 1\nversion: 1\ncallers: []\n",
		"version: 1\n? callers\n: []\n? callers\n: []\n",
		"version: 1\ncallers:\n  - name: a\n    anonymous: true\n    rights: [read]\n    rights: [write]\n",
		"version: 1\ncallers: []\n---\nversion: 1\ncallers: []\n",
	} {
		if r, err := access.Parse("auth.yaml", []byte(text)); err == nil {
			t.Errorf("%q is valid, with %v", text, r)
		}
	}
}
