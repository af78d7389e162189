// SPDX-License-Identifier: Apache-2.0

package transport

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
)

// TestTokenFileIsReread: tokens are renewed while a command runs.
func TestTokenFileIsReread(t *testing.T) {
	file := filepath.Join(t.TempDir(), "token")
	b := &bearer{file: file}
	for _, token := range []string{"one", "another"} {
		must.Succeed(t, os.WriteFile(file, []byte(token+"\n"), 0o600))
		got, err := b.GetRequestMetadata(t.Context())
		expect.That(t, err == nil && len(got) == 1 && got["authorization"] == "Bearer "+token,
			"got %v, %v, want %s", got, err, token)
	}
	for _, bad := range []string{"", "two words", "line\nbreak", "\u00fcml\u00e4ut"} {
		must.Succeed(t, os.WriteFile(file, []byte(bad), 0o600))
		if got, err := b.GetRequestMetadata(t.Context()); err == nil || bad != "" && strings.Contains(err.Error(), bad) {
			t.Errorf("%q: got %v, %v", bad, got, err)
		}
	}
}

// TestMistakesAreNamed: credentials without effect, unusable files and malformed addresses are errors.
func TestMistakesAreNamed(t *testing.T) {
	for want, c := range map[string]struct {
		credentials Credentials
		address     string
	}{
		"Cert and Key":      {Credentials{Cert: "c"}, "grpcs://h:1"},
		"CA and Cert":       {Credentials{CA: "c"}, "grpc://h:1"},
		"Credentials.CA":    {Credentials{CA: "/nonexistent"}, "grpcs://h:1"},
		"Credentials.Cert":  {Credentials{Cert: "/nonexistent", Key: "/nonexistent"}, "grpcs://h:1"},
		"Credentials.Token": {Credentials{Token: "/nonexistent"}, "grpcs://h:1"},
		"grpc://HOST:PORT":  {Credentials{}, "h:1"},
	} {
		if _, _, err := Dial(c.address, c.credentials); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("got %v, want an error that contains %q", err, want)
		}
	}
	if _, _, err := Dial("http://h:1", Credentials{}); !errors.Is(err, ErrAddress) {
		t.Errorf("got %v, want ErrAddress", err)
	}
}

func TestDialReturnsTheInstance(t *testing.T) {
	conn, instance, err := Dial("grpc://127.0.0.1:1/main/team", Credentials{})
	must.Be(t, err == nil && instance == "main/team" && conn.Target() == "127.0.0.1:1",
		"got %v, %q, %v", conn, instance, err)
	conn.Close()
}
